/**
 * Requests to the manager's HTTP API. A session has two secrets: a cookie, which no script can read, and a key, which the page
 * keeps and sends with everything it asks. Cookies reach every port of a host; what is stored here reaches this page alone.
 */

/** @import { Attempt, Changes, Job, KnownExperiment, LogPiece, Metric, Profile, Trial, UsageSample } from "../types.js" */

const ROOT = "/api/v1/nni";
const KEY = "trial-keeper-key";
/** A manager that takes longer is told of as one that does not answer. */
const PATIENCE_MS = 30_000;

/** A request that was refused; `message` is the manager's own sentence. */
export class Refused extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Nobody answered. */
export class Unreachable extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function send(path, options) {
  const key = storedKey();
  const headers = new Headers(options.headers);
  if (key !== null) headers.set("X-Trial-Keeper", key);
  const early = path === "/changes" ? asked(key) : null;
  const response = await (early ?? fetch(ROOT + path, { cache: "no-store", credentials: "same-origin", ...options, headers }));
  // Another tab may have been let in meanwhile: its key stays.
  if (response.status === 401 && key !== null && storedKey() === key) localStorage.removeItem(KEY);
  return response;
}

/** @returns {string | null} */
function storedKey() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is forbidden here
  }
}

/**
 * The answer to what early.js has asked with this key, once.
 *
 * @param {string | null} key
 * @returns {Promise<Response> | null}
 */
function asked(key) {
  /** @type {{firstChanges?: {key: string, asked: Promise<Response>}}} */
  const early = /** @type {any} */ (window);
  const first = early.firstChanges;
  delete early.firstChanges;
  return first !== undefined && first.key === key ? first.asked : null;
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<any>} null when there is no body
 */
async function ask(path, options = {}) {
  let response;
  let text;
  try {
    response = await send(path, { signal: AbortSignal.timeout(PATIENCE_MS), ...options });
    text = await response.text();
  } catch (error) {
    throw new Unreachable("The manager does not answer.", { cause: error });
  }
  if (!response.ok) throw new Refused(response.status, sentence(text) ?? `The manager answered ${response.status}.`);
  if (text === "") return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Unreachable("What answers at this address is not the manager.", { cause: error });
  }
}

/** @param {string} text */
function sentence(text) {
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : null;
  } catch {
    return null;
  }
}

/**
 * @param {string} method
 * @param {unknown} [body]
 * @returns {RequestInit}
 */
function change(method, body) {
  return body === undefined
    ? { method }
    : { method, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
}

/** @param {string} id */
function trialPath(id) {
  return `/trial-jobs/${encodeURIComponent(id)}`;
}

/** Every request that the page makes. Each rejects with Refused or Unreachable. */
export const api = {
  /** @param {string | null} since @returns {Promise<Changes>} */
  changes: (since) => ask(since === null ? "/changes" : `/changes?since=${encodeURIComponent(since)}`),
  /**
   * The stream of changes, which ends with `signal` alone. Null: there is none to be had now.
   *
   * @param {string | null} since
   * @param {AbortSignal} signal
   * @returns {Promise<ReadableStream<Uint8Array<ArrayBuffer>> | null>}
   */
  events: async (since, signal) => {
    const response = await send(since === null ? "/events" : `/events?since=${encodeURIComponent(since)}`, { signal });
    return response.ok ? response.body : null;
  },
  /** @returns {Promise<Profile>} */
  profile: () => ask("/experiment"),
  /** @returns {Promise<{text: string, searchSpace: unknown}>} */
  configuration: () => ask("/configuration"),
  /** @returns {Promise<{importances: {name: string, value: number}[], trials: number, why: string}>} */
  importance: () => ask("/importance?metric=default"),
  /** @returns {Promise<Job[]>} */
  jobs: () => ask("/jobs"),
  /** @returns {Promise<KnownExperiment[]>} */
  experiments: () => ask("/experiments"),
  /** @param {string} id @returns {Promise<Trial>} */
  trial: (id) => ask(trialPath(id)),
  /** @param {string} id @returns {Promise<Attempt[]>} */
  attempts: (id) => ask(`${trialPath(id)}/attempts`),
  /** @param {string} id @returns {Promise<UsageSample[]>} */
  usage: (id) => ask(`${trialPath(id)}/usage`),
  /** @param {string} id @returns {Promise<Metric[]>} */
  intermediates: (id) => ask(`/metric-data/${encodeURIComponent(id)}?type=PERIODICAL`),
  /**
   * @param {string} id
   * @param {string} stream
   * @param {{attempt: number, task: string, from: number, limit: number}} range
   * @returns {Promise<LogPiece>}
   */
  log: (id, stream, { attempt, task, from, limit }) =>
    ask(
      `${trialPath(id)}/log/${stream}?` +
        new URLSearchParams({ attempt: String(attempt), task, from: String(from), limit: String(limit) }),
    ),
  /** @param {string} updateType @param {{[name: string]: number | null}} params */
  update: (updateType, params) => ask(`/experiment?update_type=${updateType}`, change("PUT", { params })),
  stop: () => ask("/experiment", change("DELETE")),
  /** @param {string} id */
  kill: (id) => ask(trialPath(id), change("DELETE")),
  /** @param {string} id @returns {Promise<{sequenceId: number, trialJobId: string}>} */
  retry: (id) => ask(`${trialPath(id)}/retry`, change("POST")),
  /** @param {unknown} parameters @returns {Promise<{sequenceId: number, trialJobId: string}>} */
  propose: (parameters) => ask("/trial-jobs", change("POST", parameters)),
  /** @param {string} code */
  enter: async (code) => {
    const { key } = await ask("/session", change("POST", { code }));
    localStorage.setItem(KEY, key);
  },
  /** From here on nobody is let in with what this browser has, whatever the answer. */
  leave: async () => {
    try {
      await ask("/session", change("DELETE"));
    } finally {
      localStorage.removeItem(KEY);
    }
  },
};
