/** The comparison of experiments: the best result so far of each, over the number of results or over the time. */

import { fill, h } from "../dom.js";
import * as format from "../format.js";
import { plain } from "../plain.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { card } from "../widgets/facts.js";
import { api } from "./api.js";

/** @import { Curve } from "./api.js" */

const SERIES = 8;
const LEAST = 2;

export class Comparison {
  /** @type {string[]} */
  #ids = [];
  /** @type {Curve[]} */
  #curves = [];

  constructor() {
    this.#chart = new Chart("Best result so far", { test: "compare-chart", height: 380, note: "Select experiments in the table to compare them." });
    this.#over = h("select", { "aria-label": "Over", change: () => this.#draw() }, h("option", { value: "results" }, "over results"), h("option", { value: "time" }, "over time"));
    this.#table = h("div", {});
    this.element = card("Comparison", { class: "wide" }, h("div", { class: "bar" }, this.#over), this.#chart.element, this.#table);
    this.element.hidden = true;
  }

  /** @type {Chart} */
  #chart;
  /** @type {HTMLSelectElement} */
  #over;
  /** @type {HTMLElement} */
  #table;

  /**
   * Compare these experiments; fewer than two are no comparison.
   *
   * @param {string[]} ids
   */
  async show(ids) {
    this.#ids = ids;
    this.element.hidden = ids.length < LEAST;
    if (this.element.hidden) return;
    const found = await api.curves(ids);
    if (ids !== this.#ids) return; // others were selected meanwhile
    this.#curves = found;
    this.#draw();
  }

  #draw() {
    const curves = this.#curves;
    const isOverTime = this.#over.value === "time";
    this.#chart.draw(() => (curves.length === 0 ? null : drawing(curves, isOverTime)));
    fill(this.#table, h("table", { class: "plain lines", "data-test": "compared" }, h("caption", { class: "unseen" }, "Compared experiments"),
      h("thead", {}, h("tr", {}, ["Experiment", "Best", "Found after", "Results", "Time"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, curves.map(row))));
  }
}

/** @param {Curve} curve */
function row({ id, name, points, results, seconds }) {
  const last = points[points.length - 1];
  return h("tr", {}, h("td", {}, plain(name || id), " ", h("code", {}, plain(id))),
    h("td", {}, format.number(last?.[2] ?? null)),
    h("td", {}, last === undefined ? format.NOTHING : `${format.counted(last[0], "result")}, ${format.duration(last[1])}`),
    h("td", {}, format.count(results)), h("td", {}, format.duration(seconds)));
}

/**
 * @param {Curve[]} curves
 * @param {boolean} isOverTime
 */
function drawing(curves, isOverTime) {
  const colour = colours();
  const place = isOverTime ? 1 : 0;
  const metrics = [...new Set(curves.map(({ metric }) => metric))];
  return {
    traces: curves.map(({ id, name, points, results, seconds }, index) => ({
      type: "scatter",
      mode: "lines",
      name: label(`${name || id} · ${id}`),
      x: [...points.map((point) => point[place]), ...(points.length > 0 ? [isOverTime ? seconds : results] : [])],
      y: [...points.map((point) => point[2]), ...points.slice(-1).map((point) => point[2])],
      line: { shape: "hv", width: 2, color: colour[`series-${index % SERIES}`], dash: index < SERIES ? "solid" : "dot" },
      hovertemplate: `${label(name || id)}<br>%{y}<extra></extra>`,
    })),
    layout: {
      xaxis: { title: isOverTime ? "seconds since the start" : "results" },
      yaxis: { title: metrics.length === 1 ? label(metrics[0] === "default" ? "best so far" : `best ${metrics[0]} so far`) : "best so far" },
      showlegend: true,
    },
    words: curves.map(({ id, name, points }) => `${plain(name || id)}: ${format.number(points[points.length - 1]?.[2] ?? null)}`).join("; ") + ".",
  };
}
