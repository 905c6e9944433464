/** The shown trials as a CSV file (RFC 4180). */
import { h } from "./dom.js";
import { runSeconds } from "./format.js";
import { METRIC_PREFIX, metricNamesOf } from "./metrics.js";
import { flat, namesOf } from "./parameters.js";

/** @import { Row } from "./types.js" */

/**
 * A line for each trial: number, id, state, result, duration in seconds, its other metrics, its tags if a trial has any, and each
 * parameter. A parameter with the name of another column is `parameter/NAME`, as in `nnictl experiment export`.
 *
 * @param {readonly Row[]} rows  with all values in full
 */
export function csvOf(rows) {
  const names = namesOf(rows, Infinity);
  const metrics = metricNamesOf(rows, Infinity);
  const ofTags = rows.some((row) => row.tags) ? ["tags"] : [];
  const own = ["number", "trialJobId", "state", "value", "durationS", ...metrics.map((name) => METRIC_PREFIX + name)];
  const taken = new Set([...own, "tags"]);
  const head = [...own, ...ofTags, ...names.map((name) => (taken.has(name) ? `parameter/${name}` : name))];
  const lines = rows.map((row) => {
    const parameters = flat(row.parameters);
    const ended = row.end === null ? null : runSeconds(row, row.end);
    return [row.seq, row.id, row.state, row.value, ended, ...metrics.map((name) => row.metrics?.[name]), ...ofTags.map(() => row.tags?.join(" ")), ...names.map((name) => parameters.get(name))];
  });
  return [head, ...lines].map((cells) => cells.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** @param {unknown} value */
function cell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * Let the browser save a text as a file.
 *
 * @param {string} name
 * @param {string} text
 */
export function saveAs(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  h("a", { href: address, download: name }).click();
  // The download has begun by then.
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
