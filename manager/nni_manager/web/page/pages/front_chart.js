/** The chart of several objectives: each trial a mark in the plane of two of them, and the Pareto front as a line. */

import { h } from "../dom.js";
import * as format from "../format.js";
import { short } from "../plain.js";
import { MOST_MARKS, thinned } from "../series.js";
import { Chart, colours, label } from "../widgets/charts.js";

/** @import { Row, Summary } from "../types.js" */
/** @import { Drawing } from "../widgets/charts.js" */

/** @typedef {{row: Row, x: number, y: number}} Mark */

/**
 * The chart with a chooser of two objectives if there are more.
 *
 * @param {(id: string) => void} onPoint
 */
export function frontChart(onPoint) {
  const chart = new Chart("Pareto front", { test: "front-chart", height: 340, onPoint });
  const across = h("select", { "data-test": "front-x", change: () => redraw() });
  const up = h("select", { "data-test": "front-y", change: () => redraw() });
  const chooser = h("div", { class: "inline" }, h("label", {}, "Across ", across), " ", h("label", {}, "Up ", up));
  const element = h("div", {}, chooser, chart.element);
  let redraw = () => {};
  let named = "";

  /**
   * @param {readonly Row[]} rows  all trials, or a sample that has the front
   * @param {Summary} summary
   */
  function update(rows, summary) {
    const { objectives } = summary;
    const names = objectives.map(({ metric }) => metric);
    if (named !== names.join("\n")) {
      named = names.join("\n");
      for (const [select, first] of /** @type {[HTMLSelectElement, number][]} */ ([[across, 0], [up, 1]])) {
        select.replaceChildren(...names.map((name) => h("option", { value: name }, short(name, 40))));
        select.value = names[first] ?? "";
      }
      chooser.hidden = names.length < 3;
    }
    chart.note = format.soFar("No trial has reported all objectives", summary);
    redraw = () => chart.draw(() => {
      const chosen = [across.value, up.value].map((name) => objectives.find(({ metric }) => metric === name) ?? { metric: name, mode: "" });
      return drawing(rows, summary, chosen);
    });
    redraw();
  }
  return { element, update, destroy: () => chart.destroy() };
}

/**
 * @param {readonly Row[]} rows
 * @param {Summary} summary
 * @param {{metric: string, mode: string}[]} chosen  the objectives across and up
 * @returns {Drawing | null}
 */
function drawing(rows, summary, [across, up]) {
  if (across === undefined || up === undefined) return null;
  const best = new Set(summary.front.ids);
  /** @type {Mark[]} */
  const marks = [];
  for (const row of rows) {
    const [x, y] = [across, up].map(({ metric }) => (metric === summary.objectives[0]?.metric ? row.value : row.metrics?.[metric]));
    if (row.value !== null && typeof x === "number" && typeof y === "number") marks.push({ row, x, y });
  }
  if (marks.length === 0) return null;
  const front = marks.filter(({ row }) => best.has(row.id)).sort((a, b) => a.x - b.x);
  const infeasible = marks.filter(({ row }) => row.infeasible);
  const others = marks.filter(({ row }) => !row.infeasible && !best.has(row.id));
  const colour = colours();
  const series = (/** @type {readonly Mark[]} */ some, /** @type {string} */ name, /** @type {object} */ look) => ({
    type: "scatter", mode: "markers", name, x: some.map(({ x }) => x), y: some.map(({ y }) => y), customdata: some.map(({ row }) => row.id),
    text: some.map(({ row }) => label(`trial ${row.seq} · ${row.id}`)), hovertemplate: "%{text}<br>%{x}, %{y}<extra></extra>", ...look,
  });
  const traces = [
    series(thinned(others, MOST_MARKS), "other trials", { marker: { color: colour["quiet"], size: 6, opacity: 0.55 } }),
    series(thinned(infeasible, MOST_MARKS), "violate a constraint", { marker: { color: colour["bad"], size: 7, symbol: "x", opacity: 0.6 } }),
    // Only with two objectives is the front a staircase in their plane.
    series(front, "Pareto front", { mode: summary.objectives.length === 2 ? "lines+markers" : "markers", marker: { color: colour["accent"], size: 9 },
      line: { color: colour["accent"], width: 2, shape: across.mode === "maximize" ? "vh" : "hv" } }),
  ].filter((trace) => trace.x.length > 0);
  const better = (/** @type {{metric: string, mode: string}} */ each) => label(`${short(each.metric, 60)} (${each.mode === "minimize" ? "lower" : "higher"} is better)`);
  const bound = summary.constraints.length > 0 ? ` Constraints: ${summary.constraints.map((each) => short(each, 80)).join(", ")}.` : "";
  return {
    traces,
    layout: { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, xaxis: { title: better(across) }, yaxis: { title: better(up) } },
    words: `${format.counted(summary.front.count, "trial")} on the Pareto front${front.length < summary.front.count ? `, ${format.count(front.length)} drawn` : ""}; ${format.counted(marks.length, "result")}${infeasible.length > 0 ? `, ${format.count(infeasible.length)} of them violate a constraint` : ""}.${bound}`,
  };
}
