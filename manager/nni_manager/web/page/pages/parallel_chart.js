/**
 * Parallel coordinates of the trials: parameters and result on axes beside each other.
 *
 * The lines are traces of plotly's scatter plot, and the axes' controls are elements in front of them. Plotly's own `parcoords` has
 * marks and movable axes, but needs WebGL and so `eval`, does not say which line is under the pointer, and has no place for "not chosen".
 */

import { fill, h, say } from "../dom.js";
import * as format from "../format.js";
import { isMarked, markText } from "../marks.js";
import { METRIC_PREFIX } from "../metrics.js";
import { distinctShort } from "../plain.js";
import { named } from "../query.js";
import { MOST_LINES, parallel, SHADES, thinned, top, valued } from "../series.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { FRAME, ParallelAxes } from "../widgets/parallel_axes.js";
import { identity, LOADING, some } from "./charted_trials.js";

/** @import { Mark } from "../marks.js" */
/** @import { Scale } from "../scales.js" */
/** @import { Row } from "../types.js" */
/** @import { Figure } from "../widgets/charts.js" */
/** @import { Axis, Line, Valued } from "../series.js" */
/** @import { ChartedTrials, OpenChart } from "./charted_trials.js" */

const SHARES = [1, 5, 10, 20, 50, 100];
/** The least distance of two axes, in pixels: their labels fit beside each other. */
const AXIS_WIDTH = 96;
/** Maximum number of axes of parallel coordinates; more are not readable. */
const MOST_AXES = 12;
/** Above this number of lines, parallel coordinates show the best tenth first. */
const MANY = 500;
const HINT = "Drag along an axis to mark a part of it, and its name to move it. Keys on a name: ← → move the axis, ↑ ↓ the lower end of the marked part, "
  + "with Shift the upper end, Delete clears it.";

/**
 * Parallel coordinates: each trial is a line through its parameters to its result. Marks on the axes fade the other lines.
 *
 * @param {ChartedTrials} trials
 * @param {HTMLElement} panel
 * @returns {OpenChart}
 */
export function parallelChart(trials, panel) {
  const overlay = new ParallelAxes({
    onMark: (id, mark) => {
      if (mark === null) trials.marks.delete(id);
      else trials.marks.set(id, mark);
      change();
    },
    onOrder: (ids) => {
      trials.order = ids;
      change();
    },
    onLine: ({ row }) => trials.open(row.id),
    identityOf: ({ row }) => {
      const lines = identity(row, trials.resultName);
      if (trials.metric !== "") lines.splice(2, 0, `${trials.metricName} ${format.number(row.metrics?.[trials.metric] ?? null)}`);
      return lines;
    },
  });
  const chart = new Chart("Parameters and result of each trial", { height: FRAME.height, overlay: overlay.element });
  const share = h("select", { "data-test": "top-percent", change: () => change() }, SHARES.map((percent) => h("option", { value: percent }, `best ${percent} %`)));
  share.value = trials.valued.length > MANY ? "10" : "100";
  const marked = marksBar(trials, () => change(), panel);
  fill(panel, h("label", { class: "check" }, "Trials ", share), chart.element, marked.element, h("p", { class: "muted hint" }, HINT));

  // What does not depend on the marks is kept while one is dragged: with 10,000 trials it takes as long as the drawing.
  const prepare = rememberedLast((/** @type {readonly Row[]} */ rows, /** @type {string[]} */ names, /** @type {ReadonlyMap<string, Scale>} */ scales,
    /** @type {string} */ metric, /** @type {string[]} */ order, /** @type {number} */ percent, /** @type {boolean} */ maximize, /** @type {string} */ result) => {
    const all = valued(rows);
    const best = top(all, maximize, percent);
    return { all, best, ...parallel(best, all, names.slice(0, MOST_AXES), scales, metric, order, result) };
  });
  const build = () => {
    const nothing = (/** @type {string} */ why) => {
      chart.note = why;
      marked.show([], "");
      return null;
    };
    if (trials.scales === null) return nothing(LOADING);
    const { all, best, axes, lineOf } = prepare(trials.rows, trials.names, trials.scales, trials.metric, trials.order, Number(share.value), trials.live.maximize, trials.resultName);
    if (all.length === 0) return nothing(trials.note);
    if (axes.length === 0) return nothing(`${format.counted(all.length, "result")}: all parameters and results are the same, so there is nothing to compare.`);
    const marks = axes.map((axis) => trials.marks.get(axis.id)).filter((mark) => mark !== undefined);
    const holds = (/** @type {Valued} */ row) => marks.every((mark) => isMarked(mark, named(row, mark.name)));
    // Marked trials first: a mark may leave few of many thousands.
    const clear = thinned(marks.length === 0 ? best : best.filter(holds), MOST_LINES);
    const faded = marks.length === 0 ? [] : thinned(best.filter((row) => !holds(row)), MOST_LINES - clear.length);
    const lines = clear.map(lineOf);
    overlay.show(axes, lines, trials.marks);
    const markedCount = all.filter(holds).length;
    marked.show(marks, marks.length === 0 ? "" : countText(markedCount, all.length, clear.length < markedCount ? clear.length : null));
    const left = trials.names.length > MOST_AXES ? ` The first ${MOST_AXES} of ${trials.names.length} parameters have an axis.` : "";
    return {
      ...figure(axes, lines, faded.map(lineOf), trials.live.maximize),
      minWidth: axes.length * AXIS_WIDTH,
      words: `${format.counted(best.length, "trial")} of ${format.counted(all.length, "result")}${trials.among}, each a line; the stronger its colour, the better its result.${some(clear.length + faded.length, best.length)} Parameters with only one value have no axis.${left}`,
    };
  };
  const change = () => {
    chart.draw(build);
    chart.drawAtOnce();
  };
  return { show: () => chart.draw(build), close: () => chart.destroy() };
}

/**
 * `compute`, which is called only when an argument is another one than the last time.
 *
 * @template {unknown[]} Given
 * @template Found
 * @param {(...given: Given) => Found} compute
 * @returns {(...given: Given) => Found}
 */
function rememberedLast(compute) {
  /** @type {{given: Given, found: Found} | null} */
  let last = null;
  return (...given) => {
    if (last === null || given.some((value, index) => value !== last?.given[index])) last = { given, found: compute(...given) };
    return last.found;
  };
}

/**
 * What is marked, with the number of trials, and what can be done with them. Empty without a mark.
 *
 * @param {ChartedTrials} trials
 * @param {() => void} onChange
 * @param {HTMLElement} panel  gets the focus when the buttons vanish
 */
function marksBar(trials, onChange, panel) {
  const count = h("span", { role: "status", "data-test": "marked-count" });
  const chips = h("span", { class: "chips" });
  /** @type {Mark[]} */
  let shownMarks = [];
  const clear = () => {
    trials.marks.clear();
    panel.focus();
    onChange();
  };
  const buttons = h("span", { class: "chips" },
    h("button", { type: "button", class: "small", "data-test": "show-marked", click: () => {
      const marks = [...shownMarks];
      // Trials without a result have no line, so they are not among "these trials".
      if (!marks.some(({ name }) => name === METRIC_PREFIX)) marks.push({ name: METRIC_PREFIX, low: -Infinity, high: Infinity, words: [], notChosen: false });
      clear();
      trials.narrow(marks);
    } }, "Show only these trials"),
    h("button", { type: "button", class: "small", "data-test": "clear-marks", click: clear }, "Clear all marks"));
  buttons.hidden = true;
  const element = h("div", { class: "bar marks" }, count, chips, buttons);

  /**
   * @param {Mark[]} marks
   * @param {string} text
   */
  function show(marks, text) {
    say(count, text);
    buttons.hidden = marks.length === 0;
    const isSame = marks.length === shownMarks.length && marks.every((mark, index) => mark === shownMarks[index]);
    shownMarks = marks;
    if (isSame) return;
    fill(chips, marks.map((mark) => h("button", { type: "button", class: "chip", "aria-pressed": "true", "aria-label": `Clear the mark ${markText(mark, trials.resultName)}`, click: () => {
      trials.marks.delete(mark.name);
      panel.focus();
      onChange();
    } }, `${markText(mark, trials.resultName)} ×`)));
  }
  return { element, show };
}

/**
 * @param {number} marked
 * @param {number} all
 * @param {number | null} drawn  how many of the marked ones have a line; null: all
 */
function countText(marked, all, drawn) {
  const lines = drawn === null ? "" : `, ${format.count(drawn)} of them with a line`;
  return `${format.count(marked)} of ${format.counted(all, "trial")} ${marked === 1 ? "is" : "are"} in the marked parts${lines}`;
}

/**
 * @param {Axis[]} axes
 * @param {Line[]} lines
 * @param {Line[]} faded  lines outside the marked parts
 * @param {boolean} maximize
 */
function figure(axes, lines, faded, maximize) {
  const colour = colours();
  /** @type {Line[][]} */
  const shades = Array.from({ length: SHADES }, () => []);
  for (const line of lines) shades[line.shade]?.push(line);
  if (!maximize) shades.reverse();
  const width = lines.length > MANY ? 0.7 : 1.2;
  /** @type {Figure[]} */
  const traces = shades.map((shade, index) => ({
    ...strokes(shade, axes.length), opacity: 0.35 + (0.5 * index) / (SHADES - 1),
    line: { width, simplify: false, color: mix(colour["shade-low"] ?? "", colour["shade-high"] ?? "", index / (SHADES - 1)) },
  }));
  traces.unshift({ ...strokes(faded, axes.length), opacity: 0.6, line: { width: 0.7, simplify: false, color: colour["line"] } });
  const texts = axisTexts(axes);
  const annotations = axes.flatMap((axis, index) => [
    { x: index, y: 1, yshift: 18, text: label(texts[index]?.name ?? ""), showarrow: false, font: { size: 12, weight: 600 } },
    ...axis.ticks.filter((_, at) => axis.ticks.length <= 9 || at % Math.ceil(axis.ticks.length / 9) === 0).map((tick) =>
      ({ x: index, y: tick.at, xshift: index === axes.length - 1 ? -4 : 4, xanchor: index === axes.length - 1 ? "right" : "left", text: label(texts[index]?.tick(tick) ?? ""), showarrow: false, font: { size: 10, color: colour["text"] }, bgcolor: colour["surface"], opacity: 0.9 })),
  ]);
  return {
    traces: traces.filter((trace) => trace["y"].length > 0),
    layout: {
      margin: FRAME.margin, annotations, hovermode: false, dragmode: false,
      shapes: axes.map((_, index) => ({ type: "line", x0: index, x1: index, y0: 0, y1: 1, line: { color: colour["muted"], width: 1 } })),
      xaxis: { visible: false, fixedrange: true, range: [-FRAME.beside, axes.length - 1 + FRAME.beside] }, yaxis: { visible: false, fixedrange: true, range: [-FRAME.above, 1 + FRAME.above] },
    },
  };
}

/**
 * The short name of each axis and of its ticks. Names are different from each other, and so are categories; numbers are in full.
 *
 * @param {readonly Axis[]} axes
 */
export function axisTexts(axes) {
  // The default metric's id is only the prefix.
  const keyOf = (/** @type {Axis} */ { id, name }) => (id === METRIC_PREFIX ? id + name : id);
  const names = distinctShort(new Map(axes.map((axis) => [keyOf(axis), axis.name])), 18);
  return axes.map((axis) => {
    const words = distinctShort(new Map(axis.ticks.flatMap(({ word, label: text }) => (word === undefined ? [] : [[word, text]]))), 14);
    return { name: names.get(keyOf(axis)) ?? "", tick: (/** @type {Axis["ticks"][number]} */ { word, label: text }) => (word === undefined ? text : (words.get(word) ?? "")) };
  });
}

/**
 * Many lines as one trace: a gap ends each.
 *
 * @param {Line[]} lines
 * @param {number} axes
 */
function strokes(lines, axes) {
  const x = [...Array(axes).keys(), null];
  return { type: "scatter", mode: "lines", hoverinfo: "skip", y: lines.flatMap(({ heights }) => [...heights, null]), x: lines.flatMap(() => x) };
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
