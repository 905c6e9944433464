/** The numbers of a result that is a dict. The default metric has the name "". */

/** @import { Row } from "./types.js" */

/** Before the name of a metric, where it stands beside names of parameters; as the columns of a CSV export. */
export const METRIC_PREFIX = "value/";

/**
 * The names of the metrics of trials, without the default one, in order of first occurrence.
 *
 * @param {Iterable<Row>} rows
 * @param {number} [most] maximum number of names
 */
export function metricNamesOf(rows, most = 50) {
  /** @type {Set<string>} */
  const names = new Set();
  for (const row of rows) {
    if (row.metrics === undefined) continue;
    for (const name of Object.keys(row.metrics)) if (names.size < most) names.add(name);
  }
  return [...names];
}

/**
 * The trials with one of their metrics in place of the default one.
 *
 * @param {readonly Row[]} rows
 * @param {string} name
 */
export function withMetric(rows, name) {
  return name === "" ? rows : rows.map((row) => ({ ...row, value: row.metrics?.[name] ?? null }));
}
