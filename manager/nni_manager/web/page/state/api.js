/**
 * Requests to the manager's HTTP API. A session has two secrets: a cookie, which scripts cannot read, and a key, which the page
 * stores and sends with every request. Browsers send cookies to every port of a host; the stored key is limited to this origin.
 */

import { BASE } from "../base.js";

/** @import { Attempt, Changes, Configuration, Job, KnownExperiment, LogPiece, Metric, Remarks, RemarksChange, Trial, TrialSample, TrialWindow, UsageSample } from "../types.js" */
/** @import { Filters, Query } from "../query.js" */

/** As in early.js. */
const FIRST_CHANGES = "/changes?windows=true";
const ROOT = `${BASE}/api/v1/nni`;
/** Managers behind one proxy share the storage of its origin. */
const KEY = `trial-keeper-key${BASE}`;
/** Request timeout; a slower manager is shown as unresponsive. */
const PATIENCE_MS = 30_000;

/** When the report was made; null: this is no report, see report/api.js. @type {{madeAt: number} | null} */
export const report = null;

/** A rejected request; `message` is the manager's error message. */
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

/** The manager did not answer. */
export class Unreachable extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function send(path, options) {
  const key = storedKey();
  const headers = new Headers(options.headers);
  if (key !== null) headers.set("X-Trial-Keeper", key);
  const early = path === FIRST_CHANGES ? asked(key) : null;
  const response = await (early ?? fetch(ROOT + path, { cache: "no-store", credentials: "same-origin", ...options, headers }));
  // Another tab may have signed in meanwhile; keep its key.
  if (response.status === 401 && key !== null && storedKey() === key) localStorage.removeItem(KEY);
  return response;
}

/** @returns {string | null} */
function storedKey() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is forbidden
  }
}

/**
 * The response to the request that early.js sent with this key; returned once.
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
 * @returns {Promise<any>} null if there is no body
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
    throw new Unreachable("The server at this address is not the manager.", { cause: error });
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

/**
 * The filters as parameters of a request. JSON has no infinite numbers: an open end of a mark is null.
 *
 * @param {Filters} filters
 */
function filtersOf({ states, text, conditions }) {
  return { states: [...states].join(","), text, conditions: JSON.stringify(conditions) };
}

/** @param {string} id */
function trialPath(id) {
  return `/trials/${encodeURIComponent(id)}`;
}

/** All requests of the page. Each rejects with Refused or Unreachable. */
export const api = {
  /** @param {string | null} since @returns {Promise<Changes>} */
  changes: (since) => ask(since === null ? FIRST_CHANGES : `${FIRST_CHANGES}&since=${encodeURIComponent(since)}`),
  /** All trials, also of a large experiment. @returns {Promise<Changes>} */
  everything: () => ask("/changes"),
  /**
   * A range of the trials that match, in order.
   *
   * @param {Query} query
   * @param {{offset?: number, around?: string, limit: number}} range  `around`: the id of a trial in its middle
   * @returns {Promise<TrialWindow>}
   */
  trialWindow: (query, { offset = 0, around, limit }) =>
    ask("/trial-window?" + new URLSearchParams({
      ...filtersOf(query), sort: query.order.column, descending: String(query.order.descending), offset: String(offset), limit: String(limit),
      ...(around === undefined ? {} : { around }),
    })),
  /** @param {Filters} filters @param {number} limit @returns {Promise<TrialSample>} */
  trialSample: (filters, limit) => ask("/trial-sample?" + new URLSearchParams({ ...filtersOf(filters), limit: String(limit) })),
  /**
   * The event stream of changes, which ends only by `signal`. Null: not available now.
   *
   * @param {string | null} since
   * @param {AbortSignal} signal
   * @returns {Promise<ReadableStream<Uint8Array<ArrayBuffer>> | null>}
   */
  events: async (since, signal) => {
    const response = await send(since === null ? "/events?windows=true" : `/events?windows=true&since=${encodeURIComponent(since)}`, { signal });
    return response.ok ? response.body : null;
  },
  /** NNI's profile; its keys depend on the schema of the experiment file. @returns {Promise<unknown>} */
  profile: () => ask("/experiment"),
  /** @returns {Promise<Configuration>} */
  configuration: () => ask("/configuration"),
  /** @returns {Promise<{importances: {name: string, value: number}[], trials: number, why: string}>} */
  importance: () => ask("/importance"),
  /** @returns {Promise<Job[]>} */
  jobs: () => ask("/jobs"),
  /** @returns {Promise<KnownExperiment[]>} */
  experiments: () => ask("/experiments"),
  /** @param {string} id @returns {Promise<Trial>} */
  trial: (id) => ask(trialPath(id)),
  /** @param {string} id @returns {Promise<Attempt[]>} */
  attempts: (id) => ask(`${trialPath(id)}/attempts`),
  /** @param {string} digest @returns {Promise<string[]>} */
  packages: (digest) => ask(`/packages/${encodeURIComponent(digest)}`),
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
  kill: (id) => ask(`/trial-jobs/${encodeURIComponent(id)}`, change("DELETE")),
  /** @param {string} id @param {"start" | "checkpoint"} from @returns {Promise<{sequenceId: number, trialJobId: string}>} */
  retry: (id, from) => ask(`${trialPath(id)}/retry?from=${from}`, change("POST")),
  /** @param {unknown} parameters @returns {Promise<{sequenceId: number, trialJobId: string}>} */
  propose: (parameters) => ask("/trial-jobs", change("POST", parameters)),
  /** Of a trial, or without an id of the experiment. @param {RemarksChange} remarks @param {string} [id] @returns {Promise<Remarks>} */
  remark: (remarks, id) => ask(`${id === undefined ? "" : trialPath(id)}/remarks`, change("PATCH", remarks)),
  /** @param {string} code */
  enter: async (code) => {
    const { key } = await ask("/session", change("POST", { code }));
    localStorage.setItem(KEY, key);
  },
  /** Sign out. The key is removed from this browser even if the request fails. */
  leave: async () => {
    try {
      await ask("/session", change("DELETE"));
    } finally {
      localStorage.removeItem(KEY);
    }
  },
};
