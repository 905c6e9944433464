/** The trials that the charts show, what their axes need to know, and the words that several charts share. */

import * as format from "../format.js";
import { withMetric } from "../metrics.js";
import { flat, shown } from "../parameters.js";
import { short } from "../plain.js";
import { valued } from "../series.js";
import { label } from "../widgets/charts.js";

/** @import { Row } from "../types.js" */
/** @import { Live } from "../state/live.js" */
/** @import { Scale } from "../scales.js" */

export const LOADING = "Loading the search space…";

/** @typedef {{show: () => void, close: () => void}} OpenChart  `show` draws it again, from the current trials */

/** What the charts draw from: the trials in the table, and the reader's choices for all charts. */
export class ChartedTrials {
  /**
   * @param {Live} live
   * @param {(id: string) => void} open  opens a trial in the table
   */
  constructor(live, open) {
    this.live = live;
    this.open = open;
    /** @type {readonly Row[]} */
    this.rows = [];
    this.isFiltered = false;
    /** Names of parameters. @type {string[]} */
    this.names = [];
    /** The metric of the charts; "": the default one. */
    this.metric = "";
    /** null: not known yet. @type {ReadonlyMap<string, Scale> | null} */
    this.scales = null;
  }

  /** The trials with a default metric. */
  get valued() {
    return valued(this.rows);
  }

  /** The trials with the chosen metric as their value. */
  get valuedByMetric() {
    return valued(withMetric(this.rows, this.metric));
  }

  /** The name of the chosen metric, for titles of axes. */
  get metricName() {
    return this.metric === "" ? "default metric" : label(short(this.metric, 40));
  }

  /** The reason why there is nothing to draw. */
  get note() {
    return this.isFiltered && this.rows.length === 0 ? "No trial matches. Remove a filter to see more." : "No trial has reported a final result yet.";
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
 * The text of a trial under the pointer: number, id, result and parameters, for plotly.
 *
 * @param {Row} row
 */
export function hover(row) {
  const lines = [...flat(row.parameters)].slice(0, 12).map(([name, value]) => label(`${short(name, 40)}: ${short(shown(value), 60)}`));
  return [label(`trial ${row.seq} · ${row.id}`), `default metric ${format.number(row.value)}`, ...lines].join("<br>");
}
