/** Learning curves of several trials, with a selector of the metric if results are dicts. */

import { h } from "../dom.js";
import * as format from "../format.js";
import { short } from "../plain.js";
import { learningCurve, metricNames, thinned } from "../series.js";
import { api } from "../state/api.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { choose, REST_PER_LOAD } from "./trial_detail.js";

/** @import { Metric, Row } from "../types.js" */

const MOST_CURVES = 20;
/** Maximum number of points of one curve. */
const MOST_POINTS = 400;
/** Minimum interval between loads, since each load reads all reports of a trial. */
const LOAD_EVERY_MS = 2000;

export class IntermediateCurves {
  /** The loaded metrics and the number of reports at that time. @type {Map<string, {count: number, metrics: Metric[]}>} */
  #loaded = new Map();
  /** @type {Row[]} */
  #rows = [];
  #isLoading = false;
  /** Until this time, loaded metrics are not reloaded. */
  #restsUntilMs = 0;
  /** @type {number | undefined} */
  #timer;
  #isGone = false;

  /**
   * @param {string} title
   * @param {{objectives: {metric: string}[]}} live
   */
  constructor(title, live) {
    this.live = live;
    this.chart = new Chart(title, { note: "None of these trials has reported an intermediate result." });
    this.chooser = h("select", { "data-test": "metric-chooser", "aria-label": "Metric", change: () => this.#draw() });
    this.chooser.hidden = true;
    this.element = h("div", {}, this.chooser, this.chart.element);
  }

  /** @param {readonly Row[]} rows */
  show(rows) {
    this.#rows = rows.filter((row) => row.count > 0).slice(0, MOST_CURVES);
    for (const id of this.#loaded.keys()) if (!this.#rows.some((row) => row.id === id)) this.#loaded.delete(id);
    this.#draw();
    if (!this.#isLoading) void this.#load();
  }

  close() {
    this.#isGone = true;
    clearTimeout(this.#timer);
    this.chart.destroy();
  }

  async #load() {
    this.#isLoading = true;
    const beganAtMs = performance.now();
    let isAnew = false;
    try {
      for (let row = this.#stale(); row !== undefined && !this.#isGone; row = this.#stale()) {
        isAnew = true;
        this.#loaded.set(row.id, { count: row.count, metrics: await api.intermediates(row.id) });
        this.#draw();
      }
    } catch {
      // The bar at the top reports that the manager does not answer; the next change retries.
    } finally {
      this.#isLoading = false;
    }
    if (!isAnew || this.#isGone) return;
    const restMs = Math.max(LOAD_EVERY_MS, (performance.now() - beganAtMs) * REST_PER_LOAD);
    this.#restsUntilMs = performance.now() + restMs;
    clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => {
      if (!this.#isLoading) void this.#load();
    }, restMs);
  }

  #stale() {
    const isRested = performance.now() >= this.#restsUntilMs;
    return this.#rows.find((row) => (isRested ? this.#loaded.get(row.id)?.count !== row.count : !this.#loaded.has(row.id)));
  }

  #draw() {
    const loaded = this.#rows.map((row) => ({ row, metrics: this.#loaded.get(row.id)?.metrics ?? [] })).filter(({ metrics }) => metrics.length > 0);
    choose(this.chooser, loaded.flatMap(({ metrics }) => metrics.slice(-1).flatMap((metric) => metricNames(metric.data))), this.live.objectives[0]?.metric);
    const name = this.chooser.value || "default";
    this.chart.draw(() => {
      const colour = colours();
      const traces = loaded.map(({ row, metrics }, index) => {
        const points = thinned(learningCurve(metrics, name), MOST_POINTS);
        return {
          type: "scatter", mode: points.length === 1 ? "markers" : "lines", name: `trial ${row.seq}`, x: points.map(({ x }) => x), y: points.map(({ y }) => y),
          line: { width: 1.8, color: colour[`series-${index % 8}`], dash: index < 8 ? "solid" : index < 16 ? "dash" : "dot" },
        };
      }).filter((trace) => trace.x.length > 0);
      if (traces.length === 0) return null;
      return {
        traces,
        layout: { showlegend: true, xaxis: { title: "report" }, yaxis: { title: label(name === "default" ? "default metric" : short(name, 40)) }, legend: { orientation: "v", x: 1.02, y: 1 } },
        words: `${format.counted(traces.length, "curve")}: the best trials that have reported, or those that are selected in the table.`,
      };
    });
  }
}
