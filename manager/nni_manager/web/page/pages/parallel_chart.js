/** Parallel coordinates of the trials: parameters and result on axes beside each other. */

import { fill, h } from "../dom.js";
import * as format from "../format.js";
import { short } from "../plain.js";
import { MOST_LINES, parallel, thinned, top } from "../series.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { LOADING, some } from "./charted_trials.js";

/** @import { ChartedTrials, OpenChart } from "./charted_trials.js" */

const SHARES = [1, 5, 10, 20, 50, 100];
/** The least distance of two axes, in pixels: their labels fit beside each other. */
const AXIS_WIDTH = 96;
/** Maximum number of axes of parallel coordinates; more are not readable. */
const MOST_AXES = 12;
/** Above this number of lines, parallel coordinates show the best tenth first. */
const MANY = 500;

/**
 * Parallel coordinates: each trial is a line through its parameters to its result.
 *
 * @param {ChartedTrials} trials
 * @param {HTMLElement} panel
 * @returns {OpenChart}
 */
export function parallelChart(trials, panel) {
  const chart = new Chart("Parameters and result of each trial", { height: 360 });
  const share = h("select", { "data-test": "top-percent", change: () => show() }, SHARES.map((percent) => h("option", { value: percent }, `best ${percent} %`)));
  share.value = trials.valued.length > MANY ? "10" : "100";
  fill(panel, h("label", { class: "check" }, "Trials ", share), chart.element);
  const show = () => chart.draw(() => {
    chart.note = trials.scales === null ? LOADING : trials.note;
    const all = trials.valued;
    if (trials.scales === null || all.length === 0) return null;
    const best = top(all, trials.live.maximize, Number(share.value));
    const rows = thinned(best, MOST_LINES);
    const names = trials.names.slice(0, MOST_AXES);
    const { axes, shades } = parallel(rows, all, names, trials.scales, trials.metric);
    if (axes.length === 0) {
      chart.note = `${format.counted(all.length, "result")}: all parameters and results are the same, so there is nothing to compare.`;
      return null;
    }
    const left = trials.names.length > names.length ? ` The first ${MOST_AXES} of ${trials.names.length} parameters have an axis.` : "";
    return {
      ...parallelFigure(axes, shades, trials.live.maximize),
      minWidth: axes.length * AXIS_WIDTH,
      words: `${format.counted(best.length, "trial")} of ${format.counted(all.length, "result")}${trials.among}, each a line; the stronger its colour, the better its result.${some(rows.length, best.length)} Parameters with only one value have no axis.${left}`,
    };
  });
  return { show, close: () => chart.destroy() };
}

/**
 * @param {import("../series.js").Axis[]} axes
 * @param {(number | null)[][]} shades
 * @param {boolean} maximize
 */
function parallelFigure(axes, shades, maximize) {
  const colour = colours();
  const ordered = maximize ? shades : [...shades].reverse();
  const x = axes.map((_, index) => index);
  const traces = ordered.map((heights, shade) => ({
    type: "scatter", mode: "lines", hoverinfo: "skip", y: heights, x: Array.from({ length: heights.length }, (_, at) => [...x, null][at % (axes.length + 1)]),
    line: { width: heights.length > 2000 ? 0.7 : 1.2, color: mix(colour["shade-low"] ?? "", colour["shade-high"] ?? "", shade / (ordered.length - 1)), simplify: false }, opacity: 0.35 + (0.5 * shade) / (ordered.length - 1),
  })).filter((trace) => trace.y.length > 0);
  const annotations = axes.flatMap((axis, index) => [
    { x: index, y: 1, yshift: 18, text: label(short(axis.name, 18)), showarrow: false, font: { size: 12, weight: 600 } },
    ...axis.ticks.filter((_, at) => axis.ticks.length <= 9 || at % Math.ceil(axis.ticks.length / 9) === 0).map(({ at, label: text }) =>
      ({ x: index, y: at, xshift: index === axes.length - 1 ? -4 : 4, xanchor: index === axes.length - 1 ? "right" : "left", text: label(short(text, 14)), showarrow: false, font: { size: 10, color: colour["text"] }, bgcolor: colour["surface"], opacity: 0.9 })),
  ]);
  return {
    traces,
    layout: {
      margin: { l: 56, r: 64, t: 44, b: 16 }, annotations, hovermode: false, dragmode: false,
      shapes: axes.map((_, index) => ({ type: "line", x0: index, x1: index, y0: 0, y1: 1, line: { color: colour["muted"], width: 1 } })),
      xaxis: { visible: false, fixedrange: true, range: [-0.08, axes.length - 1 + 0.08] }, yaxis: { visible: false, fixedrange: true, range: [-0.03, 1.03] },
    },
  };
}

/**
 * A colour between two, in the browser's form `rgb(…)`.
 *
 * @param {string} low
 * @param {string} high
 * @param {number} share
 */
function mix(low, high, share) {
  const one = low.match(/\d+/g)?.map(Number) ?? [];
  const other = high.match(/\d+/g)?.map(Number) ?? [];
  return `rgb(${[0, 1, 2].map((place) => Math.round((one[place] ?? 0) + ((other[place] ?? 0) - (one[place] ?? 0)) * share)).join(", ")})`;
}
