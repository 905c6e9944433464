/** As ../state/api.js, in a report: the answers are embedded in its file, and nothing can be changed. */

import { textOf } from "./embedded.js";

/** @import { Changes, Configuration, Metric, Trial } from "../types.js" */

/**
 * @typedef {object} Documents
 * @property {number} madeAt
 * @property {Changes} changes
 * @property {unknown} profile
 * @property {Configuration} configuration
 * @property {unknown} importance
 * @property {{[id: string]: Trial}} trials
 * @property {{[id: string]: Metric[]}} intermediates
 * @property {{[digest: string]: string[]}} packages
 */

export class Refused extends Error {
  status = 404;
}

/** @type {Documents} */
const documents = JSON.parse(await textOf("documents"));

/** When the report was made. @type {{madeAt: number} | null} */
export const report = { madeAt: documents.madeAt };

/**
 * @template T
 * @param {T | undefined} found
 * @returns {Promise<T>}
 */
function answer(found) {
  return found === undefined ? Promise.reject(new Refused("The report does not contain this.")) : Promise.resolve(found);
}

export const api = {
  changes: () => answer(documents.changes),
  everything: () => answer(documents.changes),
  profile: () => answer(documents.profile),
  configuration: () => answer(documents.configuration),
  importance: () => answer(documents.importance),
  /** @param {string} id */
  trial: (id) => answer(documents.trials[id]),
  attempts: () => answer([]),
  usage: () => answer([]),
  /** @param {string} digest */
  packages: (digest) => answer(documents.packages[digest]),
  /** @param {string} id */
  intermediates: (id) => answer(documents.intermediates[id] ?? []),
};
