/** Several trials side by side, with differences marked. */

import { h } from "../dom.js";
import * as format from "../format.js";
import { metricNamesOf } from "../metrics.js";
import { flat, namesOf, shown } from "../parameters.js";
import { short } from "../plain.js";
import { metricIn, otherMetricNames } from "../series.js";
import { api } from "../state/api.js";
import { IntermediateCurves } from "./intermediates.js";
import { metricTitle } from "../widgets/facts.js";
import { openDialog } from "../widgets/dialog.js";

/** @import { Row } from "../types.js" */

/** Maximum number of compared trials. */
const MOST_COMPARED = 20;

/**
 * @param {Row[]} chosen
 * @param {{objectives: {metric: string}[]}} live
 */
export async function openCompare(chosen, live) {
  const rows = await Promise.all(chosen.slice(0, MOST_COMPARED).map((row) => (row.cut ? wholeRow(row, live.objectives) : row)));
  const body = comparedLines(rows, live.objectives).map(({ name, texts, differs }) =>
    h("tr", { class: differs ? "differs" : null }, h("th", { scope: "row" }, short(name, 80)), texts.map((each) => h("td", {}, each))));
  const head = h("tr", {}, h("td", {}), rows.map((row) => h("th", { scope: "col" }, `${row.seq} · ${row.id}`)));
  const curves = new IntermediateCurves("Intermediate results of the compared trials", live);
  curves.show(rows);
  const note = chosen.length > rows.length ? h("p", { class: "muted" }, `The first ${MOST_COMPARED} of ${chosen.length} are shown.`) : null;
  const { closed } = openDialog(`Compare ${format.counted(rows.length, "trial")}`, [
    note,
    h("p", { class: "muted" }, "Rows in which the trials differ are marked."),
    h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Comparison" }, h("table", { class: "plain lines", "data-test": "comparison" }, h("thead", {}, head), h("tbody", {}, body))),
    curves.element,
  ], { isWide: true });
  void closed.then(() => curves.close());
}

/**
 * A row that leaves out values, with all of them.
 *
 * @param {Row} row
 * @param {{metric: string}[]} objectives
 * @returns {Promise<Row>}
 */
async function wholeRow(row, objectives) {
  const { parameters, finalMetricData } = await api.trial(row.id);
  const result = finalMetricData?.[0]?.data ?? "";
  // A result that does not count has no numbers in the row.
  const names = row.value === null && row.metrics === undefined ? [] : otherMetricNames(result, objectives);
  const metrics = Object.fromEntries(names.flatMap((name) => {
    const value = metricIn(result, name);
    return value === null ? [] : [[name, value]];
  }));
  return { ...row, parameters, metrics };
}

/**
 * The lines of a comparison. Values that are shown alike may differ: numbers in a late digit, long texts at their end.
 *
 * @param {readonly Row[]} rows  with all values in full
 * @param {{metric: string}[]} objectives
 */
export function comparedLines(rows, objectives) {
  const others = metricNamesOf(rows, Infinity).filter((name) => name !== objectives[0]?.metric);
  /** @type {[string, (row: Row) => unknown, ((value: any) => string)?][]} */
  const lines = [
    ["State", format.trialState],
    [metricTitle(objectives), (row) => row.value, format.number],
    ...others.map((name) => /** @type {[string, (row: Row) => unknown, (value: any) => string]} */ ([name, (row) => row.metrics?.[name], format.number])),
    ["Latest report", (row) => row.latest, format.number],
    ["Reports", (row) => row.count, format.count],
    ["Duration", (row) => format.duration(format.runSeconds(row, Date.now()))],
    ["Tags", (row) => (row.tags ?? []).join(" ")],
    ["Note", (row) => row.note ?? ""],
    ["Why it ended", format.why],
    ...namesOf(rows).map((name) => /** @type {[string, (row: Row) => unknown, (value: any) => string]} */ ([name, (row) => flat(row.parameters).get(name), shown])),
  ];
  return lines.map(([name, valueOf, text = String]) => {
    const values = rows.map(valueOf);
    return { name, texts: values.map((value) => short(text(value), 200)), differs: new Set(values).size > 1 };
  });
}
