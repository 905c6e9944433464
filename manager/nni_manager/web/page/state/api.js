/** Requests to the manager's HTTP API. The session is a cookie that no script can read. */

/** @import { Attempt, Changes, Job, KnownExperiment, LogPiece, Metric, Profile, Trial, UsageSample } from "../types.js" */

const ROOT = "/api/v1/nni";
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
 * @param {RequestInit} [options]
 * @returns {Promise<any>} null when there is no body
 */
async function ask(path, options = {}) {
  let response;
  let text;
  try {
    response = await fetch(ROOT + path, {
      cache: "no-store",
      credentials: "same-origin",
      signal: AbortSignal.timeout(PATIENCE_MS),
      ...options,
      // Forms and images of other pages cannot send it.
      headers: { "X-Trial-Keeper": "page", ...options.headers },
    });
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
  /** @param {string | null} since */
  eventsUrl: (since) => (since === null ? `${ROOT}/events` : `${ROOT}/events?since=${encodeURIComponent(since)}`),
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
  enter: (code) => ask("/session", change("POST", { code })),
  leave: () => ask("/session", change("DELETE")),
};
