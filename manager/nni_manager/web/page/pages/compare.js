/** Several trials side by side, with differences marked. */

import { h } from "../dom.js";
import * as format from "../format.js";
import { metricNamesOf } from "../metrics.js";
import { flat, namesOf, shown } from "../parameters.js";
import { short } from "../plain.js";
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
export function openCompare(chosen, live) {
  const rows = chosen.slice(0, MOST_COMPARED);
  const others = metricNamesOf(rows).filter((name) => name !== live.objectives[0]?.metric);
  /** @type {[string, (row: Row) => string][]} */
  const lines = [
    ["State", format.trialState],
    [metricTitle(live.objectives), (row) => format.number(row.value)],
    ...others.map((name) => /** @type {[string, (row: Row) => string]} */ ([name, (row) => format.number(row.metrics?.[name] ?? null)])),
    ["Latest report", (row) => format.number(row.latest)],
    ["Reports", (row) => format.count(row.count)],
    ["Duration", (row) => format.duration(format.runSeconds(row, Date.now()))],
    ["Tags", (row) => short((row.tags ?? []).join(" "), 200)],
    ["Note", (row) => short(row.note ?? "", 200)],
    ["Why it ended", (row) => short(format.why(row), 200)],
    ...namesOf(rows).map((name) => /** @type {[string, (row: Row) => string]} */ ([name, (row) => short(shown(flat(row.parameters).get(name)), 200)])),
  ];
  const body = lines.map(([name, text]) => {
    const texts = rows.map(text);
    const differs = new Set(texts).size > 1;
    return h("tr", { class: differs ? "differs" : null }, h("th", { scope: "row" }, short(name, 80)), texts.map((each) => h("td", {}, each)));
  });
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
