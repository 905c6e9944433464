/** The charts above the table of trials, one per tab, for the trials in the table. */

import { fill, h, setAttribute } from "../dom.js";
import * as format from "../format.js";
import { short } from "../plain.js";
import { scalesOf } from "../scales.js";
import { improvements, MOST_MARKS, thinned, top, valued } from "../series.js";
import { api } from "../state/api.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { metricTitle } from "../widgets/facts.js";
import { arrows } from "../widgets/log.js";
import { ChartedTrials, hover, some } from "./charted_trials.js";
import { contourChart } from "./contour_chart.js";
import { importanceCharts } from "./importance_charts.js";
import { IntermediateCurves } from "./intermediates.js";
import { parallelChart } from "./parallel_chart.js";

/** @import { Row } from "../types.js" */
/** @import { Live } from "../state/live.js" */
/** @import { Mark } from "../marks.js" */
/** @import { OpenChart } from "./charted_trials.js" */

const TABS = [
  ["metric", "Default metric"],
  ["parallel", "Hyper-parameters"],
  ["importance", "Importance and slices"],
  ["contour", "Contour"],
  ["duration", "Duration"],
  ["intermediate", "Intermediate results"],
];
/** The tabs whose axes follow the search space. */
const SCALED = ["parallel", "importance", "contour"];
const CURVES = 10;
/** Above this number, bars are thinner than a line, and points are drawn instead. */
const MOST_BARS = 200;

/** The charts for the trials in the table. Only the open tab is drawn. */
export class TrialCharts {
  /** @type {string[]} */
  #selected = [];
  #tab = "metric";
  #hasMetrics = false;
  /** @type {OpenChart | null} */
  #shown = null;

  /**
   * @param {Live} live
   * @param {(id: string) => void} open  opens a trial in the table
   * @param {(marks: Mark[]) => void} narrow  adds filters to the table
   */
  constructor(live, open, narrow) {
    this.trials = new ChartedTrials(live, open, narrow);
    this.metric = h("select", { "data-test": "chart-metric", change: () => {
      this.trials.metric = this.metric.value;
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
    const title = metricTitle(this.trials.live.objectives);
    if (this.tabs[0] && this.tabs[0].textContent !== title) this.tabs[0].textContent = title;
    this.trials.rows = rows;
    this.trials.isFiltered = isFiltered;
    this.#shown?.show();
  }

  /** @param {string[]} names of parameters */
  setNames(names) {
    this.trials.names = names;
  }

  /** @param {string[]} names of metrics beside the default one */
  setMetrics(names) {
    fill(this.metric, ["", ...names].map((name) => h("option", { value: name }, name === "" ? this.trials.resultName : short(name, 60))));
    if (!names.includes(this.trials.metric)) this.trials.metric = "";
    this.metric.value = this.trials.metric;
    this.#hasMetrics = names.length > 0;
    this.metricBox.hidden = !this.#hasMetrics;
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
    this.#shown = tab === "parallel" ? parallelChart(this.trials, this.panel) : tab === "importance" ? importanceCharts(this.trials, this.panel) : tab === "contour" ? contourChart(this.trials, this.panel) : tab === "duration" ? this.#duration() : tab === "intermediate" ? this.#intermediate() : this.#metric();
    this.#shown.show();
    if (SCALED.includes(tab)) void this.#loadScales();
  }

  /** Read the search space, which may have changed since the last time. */
  async #loadScales() {
    try {
      this.trials.scales = scalesOf((await api.configuration()).searchSpace);
    } catch {
      this.trials.scales ??= new Map(); // the bar at the top reports that the manager does not answer
    }
    this.#shown?.show();
  }

  #metric() {
    const chart = new Chart(`${metricTitle(this.trials.live.objectives)} of each trial`, { onPoint: this.trials.open });
    const curve = h("input", { type: "checkbox", "data-test": "metric-curve", change: () => show() });
    curve.checked = true;
    fill(this.panel, h("label", { class: "check" }, curve, "Curve of the best so far"), chart.element);
    const show = () => chart.draw(() => {
      chart.note = this.trials.note;
      const rows = this.trials.valuedByMetric;
      if (rows.length === 0) return null;
      const colour = colours();
      const isDefault = this.trials.metric === "";
      const bySeq = [...rows].sort((a, b) => a.seq - b.seq);
      const steps = improvements(bySeq, this.trials.live.maximize);
      const drawn = thinned(bySeq, MOST_MARKS, steps);
      const lastSeq = bySeq[bySeq.length - 1]?.seq ?? 0;
      const lastBest = steps[steps.length - 1];
      const traces = [{
        type: "scatter", mode: "markers", x: drawn.map((row) => row.seq), y: drawn.map((row) => row.value), text: drawn.map((row) => hover(row, this.trials.metricName)), customdata: drawn.map((row) => row.id), hovertemplate: "%{text}<extra></extra>",
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
        layout: { xaxis: { title: "trial number" }, yaxis: { title: label(this.trials.metricName) } },
        words: `${format.counted(rows.length, "result")}${this.trials.among}${isDefault ? `; best ${format.number(lastBest?.value)}, trial ${lastBest?.seq ?? ""}` : ""}.${some(drawn.length, rows.length)}`,
      };
    });
    return { show, close: () => chart.destroy() };
  }

  #duration() {
    const chart = new Chart("Duration of each trial", { onPoint: this.trials.open });
    fill(this.panel, chart.element);
    const show = () => chart.draw(() => {
      chart.note = this.trials.isFiltered && this.trials.rows.length === 0 ? this.trials.note : format.soFar("No trial has started", this.trials.live.summary);
      const rows = this.trials.rows.filter((row) => row.start !== null).sort((a, b) => a.seq - b.seq);
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
            customdata: some.map((row) => row.id), text: some.map((row) => `${hover(row, this.trials.resultName)}<br>${format.duration(format.runSeconds(row, now))}`), hovertemplate: "%{text}<extra></extra>",
            marker: { color: colour[look === "busy" ? "accent" : look], size: 6 },
          };
        }).filter((trace) => trace.x.length > 0),
        layout: { showlegend: true, barmode: "overlay", xaxis: { title: "trial number" }, yaxis: { title: "duration, s", rangemode: "tozero" } },
        words: `${format.counted(rows.length, "trial")}${this.trials.among}${median === undefined ? "" : `; half of those that ended took ${format.duration(median)} or less`}.${some(drawn.length, rows.length)}`,
      };
    });
    return { show, close: () => chart.destroy() };
  }

  #intermediate() {
    const curves = new IntermediateCurves("Intermediate results", this.trials.live);
    fill(this.panel, curves.element);
    const show = () => {
      const chosen = this.#selected.map((id) => this.trials.live.rows.byId.get(id)).filter((row) => row !== undefined);
      curves.show(chosen.length > 0 ? chosen : bestThatReport(this.trials.rows, this.trials.live.maximize));
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
