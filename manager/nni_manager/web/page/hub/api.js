/** Requests to the server of all experiments. */

import { ask, change } from "../state/requests.js";

/** @import { KnownExperiment } from "../types.js" */

/**
 * @typedef {[results: number, seconds: number, best: number]} Point  an improvement
 *
 * @typedef {KnownExperiment & {best?: Point[], managerIsRunning?: boolean, durationS?: number}} Line
 *
 * @typedef {object} Curve
 * @property {string} id
 * @property {string} name
 * @property {string} metric
 * @property {string} mode
 * @property {Point[]} points
 * @property {number} results
 * @property {number} seconds
 */

/** @param {string} id */
function pathOf(id) {
  return `/all/${encodeURIComponent(id)}`;
}

export const api = {
  /** @returns {Promise<Line[]>} */
  all: () => ask("/all"),
  /** @param {string[]} ids @returns {Promise<Curve[]>} */
  curves: (ids) => ask("/curves?" + new URLSearchParams({ ids: ids.join(",") })),
  /** Actions start or end processes, which takes longer than other requests. */
  /** @param {string} config @returns {Promise<{message: string}>} */
  create: (config) => ask("/all", { ...change("POST", { config }), signal: AbortSignal.timeout(LONGEST_ACTION_MS) }),
  /** @param {string} id @returns {Promise<{message: string}>} */
  resume: (id) => ask(`${pathOf(id)}/resume`, { ...change("POST"), signal: AbortSignal.timeout(LONGEST_ACTION_MS) }),
  /** @param {string} id @returns {Promise<{message: string}>} */
  stop: (id) => ask(`${pathOf(id)}/stop`, { ...change("POST"), signal: AbortSignal.timeout(LONGEST_ACTION_MS) }),
  /** @param {string} id @returns {Promise<{message: string}>} */
  remove: (id) => ask(pathOf(id), { ...change("DELETE"), signal: AbortSignal.timeout(LONGEST_ACTION_MS) }),
};

/** The server ends an action that takes longer. */
const LONGEST_ACTION_MS = 200_000;
