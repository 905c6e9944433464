/** As ../state/api.js, in a report: the answers are embedded in its file, and nothing can be changed. */

import { Refused } from "../state/requests.js";
import { textOf } from "./embedded.js";

/** @import { Changes, Configuration, Importance, Metric, Row, Trial } from "../types.js" */

/**
 * @typedef {object} Documents
 * @property {number} madeAt
 * @property {Changes} changes
 * @property {unknown} profile
 * @property {Configuration} configuration
 * @property {{[metric: string]: Importance}} importances  of each objective
 * @property {{[id: string]: Trial}} trials
 * @property {{[id: string]: Row}} wholeRows  of trials whose row leaves out values
 * @property {{[id: string]: Metric[]}} intermediates
 * @property {{[digest: string]: string[]}} packages
 */

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
  return found === undefined ? Promise.reject(new Refused(404, "The report does not contain this.")) : Promise.resolve(found);
}

/**
 * The importance for a metric; "" is that of the first objective.
 *
 * @param {string} metric
 * @returns {Importance}
 */
function importanceOf(metric) {
  const { importances, changes } = documents;
  const name = metric === "" ? changes.summary.objectives[0]?.metric ?? "default" : metric;
  if (Object.hasOwn(importances, name)) return /** @type {Importance} */ (importances[name]);
  return { importances: [], trials: 0, why: `The report has the importance only for ${Object.keys(importances).join(", ")}; \`nnictl view\` shows others.` };
}

export const api = {
  changes: () => answer(documents.changes),
  /** @param {unknown} _ @param {readonly Row[]} rows */
  wholeTrials: (_, rows) => answer(rows.map((row) => documents.wholeRows[row.id] ?? row)),
  profile: () => answer(documents.profile),
  configuration: () => answer(documents.configuration),
  /** @param {string} metric */
  importance: (metric) => answer(importanceOf(metric)),
  /** @param {string} id */
  trial: (id) => answer(documents.trials[id]),
  attempts: () => answer([]),
  usage: () => answer([]),
  /** @param {string} digest */
  packages: (digest) => answer(documents.packages[digest]),
  /** @param {string} id */
  intermediates: (id) => answer(documents.intermediates[id] ?? []),
};
