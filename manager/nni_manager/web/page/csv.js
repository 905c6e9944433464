/** The shown trials as a CSV file (RFC 4180). */
import { h } from "./dom.js";
import { runSeconds } from "./format.js";
import { METRIC_PREFIX } from "./metrics.js";
import { flat } from "./parameters.js";
import { notify } from "./widgets/dialog.js";

/** @import { Row } from "./types.js" */

/**
 * A line for each trial: number, id, state, result, duration in seconds, its other metrics, its tags if a trial has any, and each
 * parameter.
 *
 * @param {readonly Row[]} rows
 * @param {readonly string[]} names  of the parameters
 * @param {readonly string[]} [metrics]
 */
export function csvOf(rows, names, metrics = []) {
  const ofTags = rows.some((row) => row.tags) ? ["tags"] : [];
  const head = ["number", "trialJobId", "state", "value", "durationS", ...metrics.map((name) => METRIC_PREFIX + name), ...ofTags, ...names.map((name) => (OWN.includes(name) ? `parameter/${name}` : name))];
  const lines = rows.map((row) => {
    const parameters = flat(row.parameters);
    const ended = row.end === null ? null : runSeconds(row, row.end);
    return [row.seq, row.id, row.state, row.value, ended, ...metrics.map((name) => row.metrics?.[name]), ...ofTags.map(() => row.tags?.join(" ")), ...names.map((name) => parameters.get(name))];
  });
  return [head, ...lines].map((cells) => cells.map(cell).join(",")).join("\r\n") + "\r\n";
}

const OWN = ["number", "trialJobId", "state", "value", "durationS", "tags"];

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

/**
 * Say that a downloaded file has cut values, and which command writes them whole: rows of the table have no long values.
 *
 * @param {readonly Row[]} rows
 * @param {string} command
 */
export function tellOfCuts(rows, command) {
  if (rows.some((row) => row.cut)) notify(`Long values are cut in this file. \`${command}\` writes them whole.`, "bad");
}
