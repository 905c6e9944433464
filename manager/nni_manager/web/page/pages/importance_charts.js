/** The importance of each parameter, and slices: the results against one parameter. */

import { fill, h, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { flat } from "../parameters.js";
import { distinctShort, short } from "../plain.js";
import { improvements, MOST_MARKS, thinned, valued } from "../series.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { hover, LOADING, parameterAxis, some } from "./charted_trials.js";

/** @import { Scale } from "../scales.js" */
/** @import { Valued } from "../series.js" */
/** @import { ChartedTrials, OpenChart } from "./charted_trials.js" */

/** Minimum interval between requests, since the manager computes importances from all results. */
const IMPORTANCE_EVERY_MS = 15_000;
/** After a failed request: nothing else asks again while the experiment does not change. */
const RETRY_AFTER_MS = 5_000;
const COMPUTING = "Computing…";

/**
 * How much each parameter matters, and the results against one of them.
 *
 * @param {ChartedTrials} trials
 * @param {HTMLElement} panel
 * @returns {OpenChart}
 */
export function importanceCharts(trials, panel) {
  const bars = new Chart("Importance of each parameter", { height: 280, test: "importance-chart", note: COMPUTING });
  const slice = new Chart("Result against one parameter", { height: 280, onPoint: trials.open });
  const parameter = h("select", { "aria-label": "Parameter", "data-test": "slice-parameter", change: () => show() });
  // Of a large experiment, the names arrive with the sample.
  const setNames = whenChanged((/** @type {string[]} */ names) => {
    const chosen = parameter.value;
    fill(parameter, names.map((name) => h("option", { value: name }, short(name, 60))));
    if (names.includes(chosen)) parameter.value = chosen;
  });
  fill(panel, h("div", { class: "columns" },
    h("section", { "aria-label": "Importance" }, h("h3", {}, "Importance"), bars.element),
    h("section", { "aria-label": "Slice" }, h("h3", {}, "Slice by ", parameter), slice.element)));
  let askedAtMs = -Infinity;
  let results = -1;
  /** The metric of the last request. */
  let askedFor = "";
  let isGone = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let retrying;
  const load = async () => {
    const { metric } = trials;
    const isOther = metric !== askedFor;
    const count = Object.values(trials.live.summary?.counts ?? {}).reduce((sum, each) => sum + each, 0) + valued(trials.live.rows.all).length;
    if (!isOther && (count === results || performance.now() - askedAtMs < IMPORTANCE_EVERY_MS)) return;
    if (isOther) bars.note = COMPUTING;
    if (isOther || askedAtMs === -Infinity) bars.draw(() => null);
    clearTimeout(retrying);
    askedFor = metric;
    askedAtMs = performance.now();
    results = count;
    try {
      const found = await trials.importance();
      if (isGone || metric !== askedFor) return;
      bars.note = found.why || "There is nothing to compare yet.";
      const { metricName } = trials;
      bars.draw(() => importanceDrawing(found.importances, found.trials, metricName, bestOf(trials)));
    } catch (error) {
      if (isGone || metric !== askedFor) return;
      results = -1;
      askedAtMs = -Infinity;
      retrying = setTimeout(load, RETRY_AFTER_MS);
      bars.note = error instanceof Error ? error.message : String(error);
      bars.draw(() => null);
    }
  };
  const show = () => {
    void load();
    setNames(trials.names);
    slice.draw(() => {
      slice.note = trials.scales === null ? LOADING : trials.note;
      return trials.scales === null ? null : sliceDrawing(trials.valuedByMetric, trials.metricName, parameter.value, trials.scales.get(parameter.value), trials.live.maximize, trials.among);
    });
  };
  return { show, close: () => {
    isGone = true;
    clearTimeout(retrying);
    bars.destroy();
    slice.destroy();
  } };
}

/**
 * The word for the trials that the manager compares with all. A metric that is no objective has no best results: the manager
 * takes it in the direction of the first objective.
 *
 * @param {ChartedTrials} trials
 */
function bestOf({ metric, live }) {
  if (metric === "" || live.objectives.some((each) => each.metric === metric)) return "best";
  return live.maximize ? "highest" : "lowest";
}

/**
 * @param {{name: string, value: number}[]} importances
 * @param {number} trials
 * @param {string} metric
 * @param {string} best  what the tenth of the trials is that is compared with all
 */
function importanceDrawing(importances, trials, metric, best) {
  if (importances.length === 0) return null;
  const sorted = [...importances].sort((a, b) => a.value - b.value).slice(-20);
  const first = sorted[sorted.length - 1];
  const labels = distinctShort(new Map(sorted.map(({ name }) => [name, name])), 30);
  return {
    traces: [{ type: "bar", orientation: "h", x: sorted.map(({ value }) => value), y: sorted.map(({ name }) => label(labels.get(name) ?? "")), text: sorted.map(({ value }) => format.percent(value * 100)), textposition: "auto", textangle: 0, hoverinfo: "skip", marker: { color: colours()["accent"] } }],
    layout: { xaxis: { title: "share of the differences between results", tickformat: ".0%", rangemode: "tozero" }, yaxis: { type: "category" }, margin: { l: 90, r: 16, t: 8, b: 44 } },
    words: `The most important parameter for the ${metric} is ${short(first?.name ?? "", 60)}, ${format.percent((first?.value ?? 0) * 100)}; computed from ${format.counted(trials, "trial")}. It measures how far the ${best} tenth of them differs from all in that parameter (PED-ANOVA).`,
  };
}

/**
 * @param {readonly Valued[]} all
 * @param {string} metric
 * @param {string} name
 * @param {Scale | undefined} scale
 * @param {boolean} maximize
 * @param {string} of
 */
function sliceDrawing(all, metric, name, scale, maximize, of) {
  const rows = all.filter((row) => flat(row.parameters).has(name));
  if (rows.length === 0) return null;
  const axis = parameterAxis(name, rows.map((row) => flat(row.parameters).get(name)), scale);
  const hasOneValue = rows.every((row) => flat(row.parameters).get(name) === flat(rows[0]?.parameters ?? {}).get(name));
  const bySeq = [...rows].sort((a, b) => a.seq - b.seq);
  const drawn = thinned(bySeq, MOST_MARKS, improvements(bySeq, maximize));
  const colour = colours();
  return {
    traces: [{
      type: "scatter", mode: "markers", y: drawn.map((row) => row.value), text: drawn.map((row) => hover(row, metric)), customdata: drawn.map((row) => row.id), hovertemplate: "%{text}<extra></extra>",
      x: drawn.map((row) => axis.at(flat(row.parameters).get(name))),
      marker: { size: 6, opacity: 0.75, color: drawn.map((row) => row.seq), colorscale: [[0, colour["shade-low"]], [1, colour["shade-high"]]] },
    }],
    layout: { xaxis: axis.layout, yaxis: { title: label(metric) } },
    words: `${format.counted(rows.length, "result")}${of} against ${short(name, 60)}${hasOneValue ? ", which has only one value" : ""}; the stronger the colour, the later the trial.${some(drawn.length, rows.length)}`,
  };
}
