/** The results of trials over two parameters: points, and a surface through them. */

import { fill, h, say, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { flat } from "../parameters.js";
import { short } from "../plain.js";
import { improvements, MOST_MARKS, thinned } from "../series.js";
import { LEAST_TRIALS, surface, twoParameters } from "../surface.js";
import { Chart, colours } from "../widgets/charts.js";
import { hover, LOADING, parameterAxis, some } from "./charted_trials.js";

/** @import { Valued } from "../series.js" */
/** @import { Surface } from "../surface.js" */
/** @import { Drawing } from "../widgets/charts.js" */
/** @import { ChartedTrials, OpenChart } from "./charted_trials.js" */

/** Time to wait for the importance, which the manager computes from all results: of thousands it takes many seconds. */
const MOST_WAIT_MS = 3000;

/**
 * The results over two parameters: at first the two most important ones, or numbers while the importance is not known.
 *
 * @param {ChartedTrials} trials
 * @param {HTMLElement} panel
 * @returns {OpenChart}
 */
export function contourChart(trials, panel) {
  const chart = new Chart("Results over two parameters", { height: 380, onPoint: trials.open, test: "contour-chart" });
  const legend = colourLegend();
  let isChosen = false;
  let isGone = false;
  const x = h("select", { "data-test": "contour-x", change: () => choose(x, y) });
  const y = h("select", { "data-test": "contour-y", change: () => choose(y, x) });
  fill(panel, h("div", { class: "inline" }, h("label", { class: "check" }, "Across ", x), h("label", { class: "check" }, "Up ", y), legend.element), chart.element);
  /** The parameters in both lists. @type {[string, string]} */
  let pair = ["", ""];

  /**
   * @param {HTMLSelectElement} changed
   * @param {HTMLSelectElement} other
   */
  function choose(changed, other) {
    isChosen = true;
    // The other one cannot be the same: the two change places.
    if (changed.value === other.value) other.value = changed === x ? pair[0] : pair[1];
    pair = [x.value, y.value];
    draw();
    chart.drawAtOnce();
  }

  const setNames = whenChanged((/** @type {string[]} */ names) => {
    for (const list of [x, y]) fill(list, names.map((name) => h("option", { value: name }, short(name, 60))));
    [x.value, y.value] = pair;
  });

  function draw() {
    setNames(trials.names);
    const scales = trials.scales;
    if (scales !== null && !isChosen) {
      pair = twoParameters(trials.names, scales, trials.important ?? []);
      [x.value, y.value] = pair;
    }
    chart.draw(() => {
      const [first, second] = pair;
      legend.element.hidden = true;
      const all = trials.valuedByMetric;
      const drawing = scales === null ? LOADING
        : all.length === 0 ? trials.note
          : trials.names.length < 2 ? "A contour needs two parameters."
            : trials.important === null && !isChosen ? "Computing which parameters are the most important…"
              : contourDrawing(trials, legend, all, { name: first, scale: scales.get(first) }, { name: second, scale: scales.get(second) });
      if (typeof drawing !== "string") return drawing;
      chart.note = drawing;
      return null;
    });
  }

  // Numbers then stay, also when the importance arrives: nothing changes before the reader's eyes.
  const patience = setTimeout(() => {
    isChosen ||= trials.important === null && pair[1] !== "";
    draw();
  }, MOST_WAIT_MS);
  if (trials.important === null) {
    void trials.importance().catch(() => {
      trials.important = []; // the bar at the top reports that the manager does not answer
    }).then(() => {
      if (!isGone) draw();
    });
  }
  return { show: draw, close: () => {
    isGone = true;
    clearTimeout(patience);
    chart.destroy();
  } };
}

/**
 * @typedef {{name: string, scale: import("../scales.js").Scale | undefined}} Chosen  a parameter
 *
 * @param {ChartedTrials} trials
 * @param {ReturnType<typeof colourLegend>} legend
 * @param {readonly Valued[]} all
 * @param {Chosen} x
 * @param {Chosen} y
 * @returns {Drawing | string} the reason why there is none
 */
function contourDrawing(trials, legend, all, x, y) {
  const { maximize } = trials.live;
  const bySeq = all.filter(({ parameters }) => flat(parameters).has(x.name) && flat(parameters).has(y.name)).sort((a, b) => a.seq - b.seq);
  const names = `${short(x.name, 60)} and ${short(y.name, 60)}`;
  if (bySeq.length < LEAST_TRIALS) return `A contour needs at least ${LEAST_TRIALS} trials with a result, ${names}${trials.among}; there ${bySeq.length === 1 ? "is" : "are"} ${bySeq.length}.`;
  const drawn = thinned(bySeq, MOST_MARKS, improvements(bySeq, maximize));
  const valueOf = (/** @type {Valued} */ row, /** @type {Chosen} */ { name }) => flat(row.parameters).get(name);
  const found = surface(drawn.map((row) => ({ x: valueOf(row, x) ?? null, y: valueOf(row, y) ?? null, value: row.value })), x, y);
  if (typeof found === "string") return `${short(found, 60)} has only one value in these trials, or too many categories to compare.`;
  const [across, up] = [x, y].map((each) => parameterAxis(each.name, drawn.map((row) => valueOf(row, each)), each.scale));
  if (across === undefined || up === undefined) return "";
  const colour = colours();
  const isDefault = trials.metric === "";
  const [low, high] = found.range;
  const outliers = drawn.filter(({ value }) => value < low || value > high).length;
  const lacking = all.length - bySeq.length;
  // Each trace has the scale itself: contours and points on a `coloraxis` together make plotly loop for ever. Its own colour
  // bar has style attributes, which the page's policy forbids; so the legend is an element of the page.
  const scale = { colorscale: [[0, colour["shade-low"]], [1, colour["shade-high"]]], reversescale: isDefault && !maximize };
  legend.show(low, high, scale.reversescale);
  return {
    traces: [
      { ...surfaceTrace(found, across.at, up.at, colour["muted"]), ...scale, zmin: low, zmax: high, showscale: false },
      {
        type: "scatter", mode: "markers", x: drawn.map((row) => across.at(valueOf(row, x))), y: drawn.map((row) => up.at(valueOf(row, y))),
        text: drawn.map((row) => hover(row, trials.metricName)), customdata: drawn.map((row) => row.id), hovertemplate: "%{text}<extra></extra>",
        marker: { size: drawn.length > 300 ? 5 : 7, color: drawn.map(({ value }) => value), ...scale, cmin: low, cmax: high, showscale: false, line: { width: 1, color: colour["text"] } },
      },
    ],
    layout: { xaxis: across.layout, yaxis: up.layout },
    words: `${format.counted(bySeq.length, "result")}${trials.among} over ${names}, each a point; the stronger the colour, the ${isDefault ? "better" : "higher"} the ${trials.metricName}. `
      + `Between the points it is the average of those near by, and blank where none is near.${lacking > 0 ? ` ${format.counted(lacking, "result")} without one of these parameters ${lacking === 1 ? "is" : "are"} left out.` : ""}`
      + `${outliers > 0 ? ` ${format.counted(outliers, "result")} beyond the ends of the scale ${outliers === 1 ? "has" : "have"} the colour of the end.` : ""}${some(drawn.length, bySeq.length)}`,
  };
}

/** The colours with the results that they stand for. */
function colourLegend() {
  const [from, to] = [h("span"), h("span")];
  const element = h("span", { class: "colours", "data-test": "colours" }, from, h("span", { class: "colour-bar" }), to);
  element.hidden = true;

  /**
   * @param {number} low
   * @param {number} high
   * @param {boolean} isReversed  the strongest colour is that of `low`
   */
  function show(low, high, isReversed) {
    say(from, format.number(isReversed ? high : low));
    say(to, format.number(isReversed ? low : high));
    element.hidden = false;
  }
  return { element, show };
}

/**
 * @typedef {ReturnType<typeof parameterAxis>["at"]} Place
 *
 * Lines of equal results between two numbers; cells where one of them is a choice.
 *
 * @param {Surface} found
 * @param {Place} across
 * @param {Place} up
 * @param {string | undefined} line
 */
export function surfaceTrace({ x, y, xs, ys, values }, across, up, line) {
  const common = { x: xs.map(across), y: ys.map(up), z: values, hoverinfo: "skip", opacity: 0.75 };
  if (x.valueAt === null || y.valueAt === null) return { ...common, type: "heatmap", zsmooth: false, xgap: x.valueAt === null ? 2 : 0, ygap: y.valueAt === null ? 2 : 0 };
  return { ...common, type: "contour", ncontours: 14, contours: { coloring: "fill" }, line: { width: 0.5, color: line } };
}
