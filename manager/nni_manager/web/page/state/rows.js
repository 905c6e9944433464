/** All trials by id and by number, updated with the manager's changes; of a large experiment, only those seen lately, by id. */

/** @import { Changes, Row } from "../types.js" */

/** Maximum number of trials that are kept of a large experiment. */
const MOST_KEPT = 20_000;

export class Rows {
  #isWindowed = false;

  constructor() {
    /** All trials in the order of their numbers; none of a large experiment. @type {Row[]} */
    this.all = [];
    /** @type {Map<string, Row>} */
    this.byId = new Map();
  }

  /**
   * Apply changes and return the changed trials.
   *
   * @param {Pick<Changes, "reset" | "windowed" | "trials">} changes
   * @returns {Row[]}
   */
  apply({ reset, windowed, trials }) {
    if (reset) {
      this.#isWindowed = windowed ?? false;
      this.byId = new Map(trials.map((row) => [row.id, row]));
      this.all = [...this.byId.values()].sort((a, b) => a.seq - b.seq);
    } else if (this.#isWindowed) this.remember(trials);
    else for (const row of trials) this.#put(row);
    return trials;
  }

  /**
   * Keep trials of a large experiment by their ids, and drop those that were seen longest ago.
   *
   * @param {readonly Row[]} trials
   */
  remember(trials) {
    for (const row of trials) {
      this.byId.delete(row.id);
      this.byId.set(row.id, row);
    }
    for (const id of this.byId.keys()) {
      if (this.byId.size <= MOST_KEPT) break;
      this.byId.delete(id);
    }
  }

  /**
   * These trials, with the object that is already here for each that is the same: a new object means that the trial has changed.
   *
   * @param {readonly Row[]} trials
   */
  known(trials) {
    return trials.map((row) => {
      const here = this.byId.get(row.id);
      return here !== undefined && JSON.stringify(here) === JSON.stringify(row) ? here : row;
    });
  }

  /** @param {Row} row */
  #put(row) {
    const at = this.#placeOf(row.seq);
    if (this.byId.has(row.id)) this.all[at] = row;
    else this.all.splice(at, 0, row);
    this.byId.set(row.id, row);
  }

  /** @param {number} seq */
  #placeOf(seq) {
    let low = 0;
    let high = this.all.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (/** @type {Row} */ (this.all[middle]).seq < seq) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}
