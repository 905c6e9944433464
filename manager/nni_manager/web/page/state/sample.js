/** A sample of the trials of a large experiment, chosen by the manager for charts. */

import { ALL_TRIALS } from "../query.js";
import { api } from "./api.js";

/** @import { Row } from "../types.js" */
/** @import { Filters } from "../query.js" */

/** Minimum interval between loads after changes. */
const LOAD_EVERY_MS = 15_000;
/** Minimum ratio of pause to load time. */
const REST_PER_LOAD = 10;

export class Sample {
  /** @type {Row[]} */
  rows = [];
  /** Number of matching trials that have ended with a result. */
  results = 0;
  matching = 0;
  /** @type {string[]} */
  names = [];
  /** @type {string[]} */
  metrics = [];
  hasTags = false;
  /** @type {Filters} */
  #filters = ALL_TRIALS;
  #isBusy = false;
  #isStale = false;
  #isClosed = false;
  #restsUntilMs = 0;
  /** @type {number | undefined} */
  #timer;

  /**
   * @param {number} limit
   * @param {() => void} onChange
   */
  constructor(limit, onChange) {
    this.limit = limit;
    this.onChange = onChange;
  }

  /** @param {Filters} filters */
  ask({ states, text, conditions }) {
    const now = { states, text, conditions };
    const isSame = JSON.stringify([[...states], text, conditions]) === JSON.stringify([[...this.#filters.states], this.#filters.text, this.#filters.conditions]);
    this.#filters = now;
    if (isSame && this.rows.length > 0) return;
    this.#restsUntilMs = 0;
    this.refresh();
  }

  /** Load again, now or when the interval is over. */
  refresh() {
    this.#isStale = true;
    if (this.#isBusy || this.#isClosed) return;
    clearTimeout(this.#timer);
    const wait = this.#restsUntilMs - performance.now();
    if (wait > 0) this.#timer = window.setTimeout(() => void this.#load(), wait);
    else void this.#load();
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#timer);
  }

  async #load() {
    this.#isBusy = true;
    this.#isStale = false;
    const beganAtMs = performance.now();
    const filters = this.#filters;
    try {
      const found = await api.trialSample(filters, this.limit);
      if (!this.#isClosed && filters === this.#filters) {
        this.rows = found.trials;
        this.results = found.results;
        this.matching = found.matching;
        this.names = found.parameters;
        this.metrics = found.metrics;
        this.hasTags = found.hasTags;
        this.onChange();
      }
    } catch {
      // The bar at the top reports that the manager does not answer; the next change retries.
    } finally {
      this.#isBusy = false;
    }
    const isOther = filters !== this.#filters;
    if (!isOther) this.#restsUntilMs = performance.now() + Math.max(LOAD_EVERY_MS, (performance.now() - beganAtMs) * REST_PER_LOAD);
    if (isOther || this.#isStale) this.refresh();
  }
}
