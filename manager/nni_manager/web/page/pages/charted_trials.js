/** The trials that the charts show, what their axes need to know, and the words that several charts share. */

import * as format from "../format.js";
import { withMetric } from "../metrics.js";
import { flat, flatName, shown } from "../parameters.js";
import { distinctShort, short } from "../plain.js";
import { logTicks } from "../scales.js";
import { axisOf, valued } from "../series.js";
import { api } from "../state/api.js";
import { label } from "../widgets/charts.js";
import { resultName, whyNoResult } from "../widgets/facts.js";

/** @import { Row } from "../types.js" */
/** @import { Live } from "../state/live.js" */
/** @import { Mark } from "../marks.js" */
/** @import { Simple } from "../parameters.js" */
/** @import { Scale } from "../scales.js" */

/** Maximum number of parameters under the pointer. */
const MOST_PARAMETERS = 12;
export const LOADING = "Loading the search space…";

/** @typedef {{show: () => void, close: () => void}} OpenChart  `show` draws it again, from the current trials */

/** What the charts draw from: the trials in the table, and the reader's choices for all charts. */
export class ChartedTrials {
  /**
   * @param {Live} live
   * @param {(id: string) => void} open  opens a trial in the table
   * @param {(marks: Mark[]) => void} narrow  adds filters to the table
   */
  constructor(live, open, narrow) {
    this.live = live;
    this.open = open;
    this.narrow = narrow;
    /** @type {readonly Row[]} */
    this.rows = [];
    this.isFiltered = false;
    /** Names of parameters. @type {string[]} */
    this.names = [];
    /** The metric of the charts; "": the default one. */
    this.metric = "";
    /** null: not known yet. @type {ReadonlyMap<string, Scale> | null} */
    this.scales = null;
    /** Parameters by importance, as far as it is known; null: nobody has asked. @type {string[] | null} */
    this.important = null;
    /** Marked parts of axes, by the axis' id. @type {Map<string, Mark>} */
    this.marks = new Map();
    /** Ids of axes in the reader's order; empty: that of the search space. @type {string[]} */
    this.order = [];
  }

  /** The importance of each parameter for the chosen metric, by its name in the table; the most important first. */
  async importance() {
    const { metric } = this;
    const found = await api.importance(metric);
    const importances = found.importances.map(({ name, value }) => ({ name: flatName(name), value }));
    // The reader may have chosen another metric since the request.
    if (metric === this.metric || this.important === null) this.important = importances.map(({ name }) => name);
    return { ...found, importances };
  }

  /** The trials with a default metric. */
  get valued() {
    return valued(this.rows);
  }

  /** The trials with the chosen metric as their value. */
  get valuedByMetric() {
    return valued(withMetric(this.rows, this.metric));
  }

  /** The name of the chosen metric, for titles of axes after `label`. */
  get metricName() {
    return this.metric === "" ? this.resultName : short(this.metric, 40);
  }

  /** The name of a trial's result: the metric of the first objective. */
  get resultName() {
    return resultName(this.live.objectives);
  }

  /** The reason why there is nothing to draw. */
  get note() {
    if (this.isFiltered && this.rows.length === 0) return "No trial matches. Remove a filter to see more.";
    const others = this.metric === "" && this.rows.some((row) => row.metrics !== undefined) ? " Choose another metric above." : "";
    return whyNoResult(this.live.summary) + others;
  }

  /** Completes "12 results" where the table is filtered. */
  get among() {
    return this.isFiltered ? " among the trials that the table shows" : "";
  }
}

/**
 * The part of a description that names how many are drawn, if not all are.
 *
 * @param {number} drawn
 * @param {number} all
 */
export function some(drawn, all) {
  return drawn < all ? ` ${format.count(drawn)} of ${format.count(all)} are drawn.` : "";
}

/**
 * What names a trial under the pointer, in lines: number and id, result, parameters.
 *
 * @param {Row} row
 * @param {string} metric  the name of the metric that is its value
 */
export function identity(row, metric) {
  const parameters = [...flat(row.parameters)].slice(0, MOST_PARAMETERS).map(([name, value]) => `${short(name, 40)}: ${short(shown(value), 60)}`);
  return [`trial ${row.seq} · ${row.id}`, `${metric} ${format.number(row.value)}`, ...parameters];
}

/**
 * The same, as a text for plotly.
 *
 * @param {Row} row
 * @param {string} metric
 */
export function hover(row, metric) {
  return identity(row, metric).map(label).join("<br>");
}

/**
 * A parameter's axis for plotly: `layout`, and `at`, which gives the place of a value on it. Numbers are on the scale of the search
 * space, and all else are categories. `at` also takes a category as text.
 *
 * @param {string} name
 * @param {readonly (Simple | undefined)[]} values
 * @param {Scale | undefined} scale
 */
export function parameterAxis(name, values, scale) {
  const title = label(short(name, 40));
  const isNumeric = scale !== "category" && values.every((value) => typeof value === "number");
  if (!isNumeric) {
    const words = distinctShort(new Map(values.map((value) => [String(value), shown(value)])), 30);
    const at = (/** @type {Simple | undefined} */ value) => label(words.get(String(value)) ?? "");
    const order = axisOf(name, values, scale)?.ticks.flatMap(({ word }) => (word === undefined ? [] : [at(word)]));
    return { isNumeric, layout: { title, type: "category", categoryorder: "array", categoryarray: order }, at };
  }
  const [low, high] = values.reduce((/** @type {[number, number]} */ [least, most], value) => [Math.min(least, Number(value)), Math.max(most, Number(value))], [Infinity, -Infinity]);
  return { isNumeric, layout: { title, ...(scale === "log" && low > 0 ? { type: "log", dtick: logTicks(low, high) } : { type: "linear" }) }, at: (/** @type {Simple | undefined} */ value) => value };
}
