/** Requests to the manager of an experiment. */

import { ask, change, FIRST_CHANGES, send } from "./requests.js";

/** @import { Attempt, Changes, Configuration, Gpu, Importance, Job, KnownExperiment, LogPiece, Metric, Remarks, RemarksChange, Row, Trial, TrialSample, TrialWindow, UsageSample } from "../types.js" */
/** @import { Filters, Query } from "../query.js" */

/** Number of trials of one request for all of them. */
const PAGE = 5000;

/** When the report was made; null: this is no report, see report/api.js. @type {{madeAt: number} | null} */
export const report = null;

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
  /**
   * All trials that match, in order, with all values in full.
   *
   * @param {Query} query
   * @param {readonly Row[]} _  the trials in the page, of which a report has no others
   * @returns {Promise<readonly Row[]>}
   */
  wholeTrials: async (query, _) => {
    /** @type {Map<string, Row>} */
    const found = new Map();
    for (let offset = 0, matching = 1; offset < matching; offset += PAGE) {
      const page = await api.trialWindow(query, { offset, limit: PAGE, whole: true });
      matching = page.matching;
      // A trial that changes in the meantime may be on two pages.
      for (const row of page.trials) found.set(row.id, row);
    }
    return [...found.values()];
  },
  /**
   * A range of the trials that match, in order.
   *
   * @param {Query} query
   * @param {{offset?: number, around?: string, limit: number, whole?: boolean}} range  `around`: the id of a trial in its middle;
   *   `whole`: with all values in full
   * @returns {Promise<TrialWindow>}
   */
  trialWindow: (query, { offset = 0, around, limit, whole = false }) =>
    ask("/trial-window?" + new URLSearchParams({
      ...filtersOf(query), sort: query.order.column, descending: String(query.order.descending), offset: String(offset), limit: String(limit), whole: String(whole),
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
  /** For the best results of a metric; "" is that of the first objective. @param {string} metric @returns {Promise<Importance>} */
  importance: (metric) => ask(metric === "" ? "/importance" : `/importance?${new URLSearchParams({ metric })}`),
  /** @returns {Promise<Job[]>} */
  jobs: () => ask("/jobs"),
  /** The end of the log of each task of a job. @param {string} id @returns {Promise<{task: string, text: string}[]>} */
  jobLog: (id) => ask(`/jobs/${encodeURIComponent(id)}/log`),
  /** @returns {Promise<Gpu[]>} */
  gpus: () => ask("/gpus"),
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
};
