/** All trials by id and by number, updated with the manager's changes. */

/** @import { Changes, Row } from "../types.js" */

export class Rows {
  constructor() {
    /** All trials in the order of their numbers. @type {Row[]} */
    this.all = [];
    /** @type {Map<string, Row>} */
    this.byId = new Map();
  }

  /**
   * Apply changes and return the changed trials.
   *
   * @param {Pick<Changes, "reset" | "trials">} changes
   * @returns {Row[]}
   */
  apply({ reset, trials }) {
    if (reset) {
      this.byId = new Map(trials.map((row) => [row.id, row]));
      this.all = [...this.byId.values()].sort((a, b) => a.seq - b.seq);
    } else {
      for (const row of trials) this.#put(row);
    }
    return trials;
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
