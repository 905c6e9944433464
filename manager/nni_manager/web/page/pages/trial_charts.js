/** The charts above the table of trials, one per tab, for the trials in the table. */

import { fill, h, setAttribute } from "../dom.js";
import * as format from "../format.js";
import { withMetric } from "../metrics.js";
import { flat, shown } from "../parameters.js";
import { short } from "../plain.js";
import { scalesOf } from "../scales.js";
import { axisOf, improvements, MOST_LINES, MOST_MARKS, parallel, thinned, top, valued } from "../series.js";
import { api } from "../state/api.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { arrows } from "../widgets/log.js";
import { IntermediateCurves } from "./intermediates.js";

/** @import { Row } from "../types.js" */
/** @import { Live } from "../state/live.js" */
/** @import { Scale } from "../scales.js" */
/** @import { Valued } from "../series.js" */

const TABS = [
  ["metric", "Default metric"],
  ["parallel", "Hyper-parameters"],
  ["importance", "Importance and slices"],
  ["duration", "Duration"],
  ["intermediate", "Intermediate results"],
];
const SHARES = [1, 5, 10, 20, 50, 100];
/** Up to this number of decades, the ticks of a logarithmic axis are 1, 2 and 5; above it, powers of ten. */
const MOST_DECADES = 3;
const LOADING = "Loading the search space…";
/** The least distance of two axes, in pixels: their labels fit beside each other. */
const AXIS_WIDTH = 96;
/** Maximum number of axes of parallel coordinates; more are not readable. */
const MOST_AXES = 12;
const CURVES = 10;
/** Above this number of lines, parallel coordinates show the best tenth first. */
const MANY = 500;
/** Above this number, bars are thinner than a line, and points are drawn instead. */
const MOST_BARS = 200;
/** Minimum interval between requests, since the manager computes importances from all results. */
const IMPORTANCE_EVERY_MS = 15_000;

/** The charts for the trials in the table. Only the open tab is drawn. */
export class TrialCharts {
  /** @type {readonly Row[]} */
  #rows = [];
  /** @type {string[]} */
  #names = [];
  /** @type {string[]} */
  #selected = [];
  #isFiltered = false;
  #tab = "metric";
  /** The metric of the charts; "": the default one. */
  #chosen = "";
  #hasMetrics = false;
  /** @type {ReadonlyMap<string, Scale> | null} null: not known yet */
  #scales = null;
  /** @type {{show: () => void, close: () => void} | null} */
  #shown = null;

  /**
   * @param {Live} live
   * @param {(id: string) => void} onPoint  opens the trial of a point
   */
  constructor(live, onPoint) {
    this.live = live;
    this.onPoint = onPoint;
    this.metric = h("select", { "data-test": "chart-metric", change: () => {
      this.#chosen = this.metric.value;
      this.#shown?.show();
    } });
    this.metricBox = h("label", { class: "check" }, "Metric ", this.metric);
    this.setMetrics([]);
    this.panel = h("div", { role: "tabpanel", id: "trial-charts", tabindex: 0 });
    this.tabs = TABS.map(([id = "", title]) => h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "trial-charts", "data-test": `tab-${id}`, click: () => this.#open(id) }, title));
    this.element = h("section", { class: "card charts", "aria-label": "Charts" }, h("h2", { class: "unseen" }, "Charts"),
      h("div", { role: "tablist", class: "tabs", "aria-label": "Charts", keydown: (/** @type {KeyboardEvent} */ event) => arrows(event, this.tabs) }, this.tabs),
      this.metricBox, this.panel);
    this.#open("metric");
  }

  /**
   * @param {readonly Row[]} rows
   * @param {boolean} isFiltered
   */
  setRows(rows, isFiltered) {
    this.#rows = rows;
    this.#isFiltered = isFiltered;
    this.#shown?.show();
  }

  /** @param {string[]} names of parameters */
  setNames(names) {
    this.#names = names;
  }

  /** @param {string[]} names of metrics beside the default one */
  setMetrics(names) {
    fill(this.metric, ["", ...names].map((name) => h("option", { value: name }, name === "" ? "default metric" : short(name, 60))));
    if (!names.includes(this.#chosen)) this.#chosen = "";
    this.metric.value = this.#chosen;
    this.#hasMetrics = names.length > 0;
    this.metricBox.hidden = !this.#hasMetrics;
  }

  /** The trials with the chosen metric as their value. */
  #valued() {
    return valued(withMetric(this.#rows, this.#chosen));
  }

  /** The name of the chosen metric, for titles of axes. */
  get #metricName() {
    return this.#chosen === "" ? "default metric" : label(short(this.#chosen, 40));
  }

  /** @param {string[]} ids */
  setSelected(ids) {
    this.#selected = ids;
    if (this.#tab === "intermediate") this.#shown?.show();
  }

  close() {
    this.#shown?.close();
  }

  /** @param {string} tab */
  #open(tab) {
    this.#shown?.close();
    this.#tab = tab;
    this.tabs.forEach((button, index) => {
      const isShown = TABS[index]?.[0] === tab;
      setAttribute(button, "aria-selected", String(isShown));
      setAttribute(button, "tabindex", isShown ? 0 : -1);
    });
    setAttribute(this.panel, "aria-labelledby", `tab-${tab}`);
    this.metricBox.hidden = !this.#hasMetrics || tab === "duration" || tab === "intermediate";
    fill(this.panel);
    this.#shown = tab === "parallel" ? this.#parallel() : tab === "importance" ? this.#importance() : tab === "duration" ? this.#duration() : tab === "intermediate" ? this.#intermediate() : this.#metric();
    this.#shown.show();
    if (tab === "parallel" || tab === "importance") void this.#loadScales();
  }

  /** Read the search space, which may have changed since the last time. */
  async #loadScales() {
    try {
      this.#scales = scalesOf((await api.configuration()).searchSpace);
    } catch {
      this.#scales ??= new Map(); // the bar at the top reports that the manager does not answer
    }
    this.#shown?.show();
  }

  /** The reason why there is nothing to draw. */
  #note() {
    return this.#isFiltered && this.#rows.length === 0 ? "No trial matches. Remove a filter to see more." : "No trial has reported a final result yet.";
  }

  /** "of the 12 trials that match" where the table is filtered. */
  #of() {
    return this.#isFiltered ? " among the trials that the table shows" : "";
  }

  #metric() {
    const chart = new Chart("Default metric of each trial", { onPoint: this.onPoint });
    const curve = h("input", { type: "checkbox", "data-test": "metric-curve", change: () => show() });
    curve.checked = true;
    fill(this.panel, h("label", { class: "check" }, curve, "Curve of the best so far"), chart.element);
    const show = () => chart.draw(() => {
      chart.note = this.#note();
      const rows = this.#valued();
      if (rows.length === 0) return null;
      const colour = colours();
      const isDefault = this.#chosen === "";
      const bySeq = [...rows].sort((a, b) => a.seq - b.seq);
      const steps = improvements(bySeq, this.live.maximize);
      const drawn = thinned(bySeq, MOST_MARKS, steps);
      const lastSeq = bySeq[bySeq.length - 1]?.seq ?? 0;
      const lastBest = steps[steps.length - 1];
      const traces = [{
        type: "scatter", mode: "markers", x: drawn.map((row) => row.seq), y: drawn.map((row) => row.value), text: drawn.map(hover), customdata: drawn.map((row) => row.id), hovertemplate: "%{text}<extra></extra>",
        marker: { color: colour["accent"], size: 6, opacity: 0.65 },
      }];
      // The tuner improves the default metric only; nothing says which values of another one are good.
      if (curve.checked && isDefault) {
        traces.push(/** @type {any} */ ({
          type: "scatter", mode: "lines", x: [...steps.map((row) => row.seq), lastSeq], y: [...steps.map((row) => row.value), lastBest?.value],
          line: { shape: "hv", color: colour["series-1"], width: 2 }, hoverinfo: "skip",
        }));
      }
      return {
        traces,
        layout: { xaxis: { title: "trial number" }, yaxis: { title: this.#metricName } },
        words: `${format.counted(rows.length, "result")}${this.#of()}${isDefault ? `; best ${format.number(lastBest?.value)}, trial ${lastBest?.seq ?? ""}` : ""}.${some(drawn.length, rows.length)}`,
      };
    });
    return { show, close: () => chart.destroy() };
  }

  #parallel() {
    const chart = new Chart("Parameters and result of each trial", { height: 360 });
    const share = h("select", { "data-test": "top-percent", change: () => show() }, SHARES.map((percent) => h("option", { value: percent }, `best ${percent} %`)));
    share.value = valued(this.#rows).length > MANY ? "10" : "100";
    fill(this.panel, h("label", { class: "check" }, "Trials ", share), chart.element);
    const show = () => chart.draw(() => {
      chart.note = this.#scales === null ? LOADING : this.#note();
      const all = valued(this.#rows);
      if (this.#scales === null || all.length === 0) return null;
      const best = top(all, this.live.maximize, Number(share.value));
      const rows = thinned(best, MOST_LINES);
      const names = this.#names.slice(0, MOST_AXES);
      const { axes, shades } = parallel(rows, all, names, this.#scales, this.#chosen);
      if (axes.length === 0) {
        chart.note = `${format.counted(all.length, "result")}: all parameters and results are the same, so there is nothing to compare.`;
        return null;
      }
      const left = this.#names.length > names.length ? ` The first ${MOST_AXES} of ${this.#names.length} parameters have an axis.` : "";
      return {
        ...parallelFigure(axes, shades, this.live.maximize),
        minWidth: axes.length * AXIS_WIDTH,
        words: `${format.counted(best.length, "trial")} of ${format.counted(all.length, "result")}${this.#of()}, each a line; the stronger its colour, the better its result.${some(rows.length, best.length)} Parameters with only one value have no axis.${left}`,
      };
    });
    return { show, close: () => chart.destroy() };
  }

  #importance() {
    const bars = new Chart("Importance of each parameter", { height: 280, test: "importance-chart", note: "Computing…" });
    const slice = new Chart("Result against one parameter", { height: 280, onPoint: this.onPoint });
    const parameter = h("select", { "aria-label": "Parameter", "data-test": "slice-parameter", change: () => show() });
    fill(parameter, this.#names.map((name) => h("option", { value: name }, short(name, 60))));
    fill(this.panel, h("div", { class: "columns" },
      h("section", { "aria-label": "Importance" }, h("h3", {}, "Importance"), bars.element),
      h("section", { "aria-label": "Slice" }, h("h3", {}, "Slice by ", parameter), slice.element)));
    let askedAtMs = -Infinity;
    let results = -1;
    let isGone = false;
    const load = async () => {
      const count = Object.values(this.live.summary?.counts ?? {}).reduce((sum, each) => sum + each, 0) + valued(this.live.rows.all).length;
      if (count === results || performance.now() - askedAtMs < IMPORTANCE_EVERY_MS) return;
      if (askedAtMs === -Infinity) bars.draw(() => null);
      askedAtMs = performance.now();
      results = count;
      try {
        const found = await api.importance();
        if (isGone) return;
        bars.note = found.why || "There is nothing to compare yet.";
        bars.draw(() => importanceDrawing(found.importances, found.trials));
      } catch (error) {
        results = -1;
        bars.note = error instanceof Error ? error.message : String(error);
        bars.draw(() => null);
      }
    };
    const show = () => {
      void load();
      slice.draw(() => {
        slice.note = this.#scales === null ? LOADING : this.#note();
        return this.#scales === null ? null : sliceDrawing(this.#valued(), this.#metricName, parameter.value, this.#scales.get(parameter.value), this.live.maximize, this.#of());
      });
    };
    return { show, close: () => {
      isGone = true;
      bars.destroy();
      slice.destroy();
    } };
  }

  #duration() {
    const chart = new Chart("Duration of each trial", { onPoint: this.onPoint });
    fill(this.panel, chart.element);
    const show = () => chart.draw(() => {
      chart.note = this.#isFiltered && this.#rows.length === 0 ? this.#note() : "No trial has started yet.";
      const rows = this.#rows.filter((row) => row.start !== null).sort((a, b) => a.seq - b.seq);
      if (rows.length === 0) return null;
      const colour = colours();
      const now = Date.now();
      const drawn = thinned(rows);
      const over = rows.filter((row) => row.end !== null).map((row) => format.runSeconds(row, now) ?? 0).sort((a, b) => a - b);
      const median = over[over.length >> 1];
      return {
        traces: ["good", "bad", "busy", "quiet"].map((look) => {
          const some = drawn.filter((row) => format.stateLook(row.state) === look);
          /** @type {{[look: string]: string}} */
          const names = { good: "succeeded", bad: "failed", busy: "running", quiet: "stopped" };
          return {
            // An explicit width: plotly would derive the width of each kind from the distance of its bars.
            ...(drawn.length > MOST_BARS ? { type: "scatter", mode: "markers" } : { type: "bar", width: 0.85, textposition: "none" }), name: names[look], x: some.map((row) => row.seq), y: some.map((row) => format.runSeconds(row, now)),
            customdata: some.map((row) => row.id), text: some.map((row) => `${hover(row)}<br>${format.duration(format.runSeconds(row, now))}`), hovertemplate: "%{text}<extra></extra>",
            marker: { color: colour[look === "busy" ? "accent" : look], size: 6 },
          };
        }).filter((trace) => trace.x.length > 0),
        layout: { showlegend: true, barmode: "overlay", xaxis: { title: "trial number" }, yaxis: { title: "duration, s", rangemode: "tozero" } },
        words: `${format.counted(rows.length, "trial")}${this.#of()}${median === undefined ? "" : `; half of those that ended took ${format.duration(median)} or less`}.${some(drawn.length, rows.length)}`,
      };
    });
    return { show, close: () => chart.destroy() };
  }

  #intermediate() {
    const curves = new IntermediateCurves("Intermediate results");
    fill(this.panel, curves.element);
    const show = () => {
      const chosen = this.#selected.map((id) => this.live.rows.byId.get(id)).filter((row) => row !== undefined);
      curves.show(chosen.length > 0 ? chosen : bestThatReport(this.#rows, this.live.maximize));
    };
    return { show, close: () => curves.close() };
  }
}

/**
 * @param {readonly Row[]} rows
 * @param {boolean} maximize
 */
function bestThatReport(rows, maximize) {
  const reporting = rows.filter((row) => row.count > 0);
  const best = top(valued(reporting), maximize, 100).slice(0, CURVES);
  return best.length > 0 ? best : reporting.slice(0, CURVES);
}

/**
 * @param {number} drawn
 * @param {number} all
 */
function some(drawn, all) {
  return drawn < all ? ` ${format.count(drawn)} of ${format.count(all)} are drawn.` : "";
}

/** @param {Row} row */
function hover(row) {
  const lines = [...flat(row.parameters)].slice(0, 12).map(([name, value]) => label(`${short(name, 40)}: ${short(shown(value), 60)}`));
  return [label(`trial ${row.seq} · ${row.id}`), `default metric ${format.number(row.value)}`, ...lines].join("<br>");
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

/**
 * @param {{name: string, value: number}[]} importances
 * @param {number} trials
 */
function importanceDrawing(importances, trials) {
  if (importances.length === 0) return null;
  const sorted = [...importances].sort((a, b) => a.value - b.value).slice(-20);
  const best = sorted[sorted.length - 1];
  return {
    traces: [{ type: "bar", orientation: "h", x: sorted.map(({ value }) => value), y: sorted.map(({ name }) => label(short(name, 30))), text: sorted.map(({ value }) => format.percent(value * 100)), textposition: "auto", textangle: 0, hoverinfo: "skip", marker: { color: colours()["accent"] } }],
    layout: { xaxis: { title: "share of the differences between results", tickformat: ".0%", rangemode: "tozero" }, yaxis: { type: "category" }, margin: { l: 90, r: 16, t: 8, b: 44 } },
    words: `The most important parameter is ${short(best?.name ?? "", 60)}, ${format.percent((best?.value ?? 0) * 100)}; computed from ${format.counted(trials, "trial")}. It measures how far the best tenth of them differs from all in that parameter (PED-ANOVA).`,
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
  const values = rows.map((row) => flat(row.parameters).get(name));
  const axis = axisOf(name, values, scale);
  const isNumeric = scale !== "category" && values.every((value) => typeof value === "number");
  const isLog = scale === "log" && values.every((value) => Number(value) > 0);
  const numbers = isNumeric ? values.map(Number).sort((a, b) => a - b) : [];
  const decades = Math.log10(Number(numbers[numbers.length - 1]) / Number(numbers[0]));
  const bySeq = [...rows].sort((a, b) => a.seq - b.seq);
  const drawn = thinned(bySeq, MOST_MARKS, improvements(bySeq, maximize));
  const colour = colours();
  return {
    traces: [{
      type: "scatter", mode: "markers", y: drawn.map((row) => row.value), text: drawn.map(hover), customdata: drawn.map((row) => row.id), hovertemplate: "%{text}<extra></extra>",
      x: drawn.map((row) => flat(row.parameters).get(name)).map((value) => (isNumeric ? value : label(short(shown(value), 30)))),
      marker: { size: 6, opacity: 0.75, color: drawn.map((row) => row.seq), colorscale: [[0, colour["shade-low"]], [1, colour["shade-high"]]] },
    }],
    layout: { xaxis: { title: label(short(name, 40)), ...(isLog ? { type: "log", dtick: decades > MOST_DECADES ? 1 : "D2" } : isNumeric ? { type: "linear" } : { type: "category", categoryorder: "array", categoryarray: axis?.ticks.map((tick) => label(short(tick.label, 30))) }) }, yaxis: { title: metric } },
    words: `${format.counted(rows.length, "result")}${of} against ${short(name, 60)}${axis === null ? ", which has only one value" : ""}; the stronger the colour, the later the trial.${some(drawn.length, rows.length)}`,
  };
}
