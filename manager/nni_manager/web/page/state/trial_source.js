/**
 * The trials of the table and its charts. A page holds all trials of a small experiment. Of a large one it loads what it shows:
 * windows of the table, sorted and filtered by the manager, and a sample for the charts.
 */

import { metricNamesOf } from "../metrics.js";
import { flat, namesOf } from "../parameters.js";
import { arrange, rearrange } from "../query.js";
import { api } from "./api.js";
import { Sample } from "./sample.js";

/** @import { Row } from "../types.js" */
/** @import { Query } from "../query.js" */
/** @import { Live, News } from "./live.js" */

/** Number of trials of one chunk of the table. */
const CHUNK = 50;
/** Maximum number of chunks that are kept. */
const MOST_CHUNKS = 200;
/** Minimum interval between reloads of the shown trials after changes. */
const RELOAD_EVERY_MS = 1000;
/** Number of trials for the charts, besides the best and the improvements. */
const SAMPLE = 3000;

/**
 * @typedef {object} TrialSource
 * @property {readonly (Row | undefined)[]} rows  the matching trials in order; undefined or absent: not loaded
 * @property {readonly Row[]} charted  those that the charts show
 * @property {number} total  number of all trials
 * @property {string[]} names  of the parameters
 * @property {string[]} metrics
 * @property {boolean} hasTags  true once a trial has had a tag
 * @property {boolean} isLoading  true if the rows are of an earlier query
 * @property {(query: Query) => void} ask
 * @property {(news: News) => boolean} update  true if anything may have changed
 * @property {(first: number, last: number) => void} need  these places are shown
 * @property {(id: string) => Promise<number>} place  the index of a trial, loaded; -1: it does not match
 * @property {(id: string) => Promise<boolean>} has  true if the experiment has the trial
 * @property {() => void} close
 */

/**
 * @param {Live} live
 * @param {Query} query
 * @param {() => void} onChange
 * @returns {TrialSource}
 */
export function trialSource(live, query, onChange) {
  return live.isWindowed ? new TrialWindows(live, query, onChange) : new AllTrials(live, query, onChange);
}

/**
 * All trials that match, in order, with all values in full, for a download.
 *
 * @param {Live} live
 * @param {Query} query
 * @param {readonly (Row | undefined)[]} rows  those in the page
 */
export function wholeTrials(live, query, rows) {
  const here = rows.filter((row) => row !== undefined);
  return live.isWindowed || here.some((row) => row.cut) ? api.wholeTrials(query, here) : Promise.resolve(here);
}

/** @implements {TrialSource} */
class AllTrials {
  /** @type {readonly Row[]} */
  rows = [];
  /** @type {string[]} */
  names = [];
  /** @type {string[]} */
  metrics = [];
  hasTags = false;
  isLoading = false;

  /**
   * @param {Live} live
   * @param {Query} query
   * @param {() => void} onChange
   */
  constructor(live, query, onChange) {
    this.live = live;
    this.query = query;
    this.onChange = onChange;
  }

  get charted() {
    return this.rows;
  }

  get total() {
    return this.live.rows.all.length;
  }

  /** @param {Query} query */
  ask(query) {
    this.query = query;
    this.rows = arrange(this.live.rows.all, query);
    this.onChange();
  }

  /** @param {News} news */
  update({ reset, rows: changed }) {
    const { all } = this.live.rows;
    if (reset) this.names = namesOf(all);
    else if (changed.some((row) => [...flat(row.parameters).keys()].some((name) => !this.names.includes(name)))) {
      this.names = [...new Set([...this.names, ...namesOf(changed)])];
    }
    if (reset) this.metrics = metricNamesOf(all);
    else if (changed.some((row) => Object.keys(row.metrics ?? {}).some((name) => !this.metrics.includes(name)))) {
      this.metrics = [...new Set([...this.metrics, ...metricNamesOf(changed)])];
    }
    if (reset || changed.some((row) => row.tags)) this.hasTags ||= all.some((row) => row.tags);
    this.rows = reset ? arrange(all, this.query) : changed.length > 0 ? rearrange(this.rows, changed, this.query) : this.rows;
    return reset || changed.length > 0;
  }

  need() {
    // All rows are here.
  }

  /** @param {string} id */
  place(id) {
    return Promise.resolve(this.rows.findIndex((row) => row.id === id));
  }

  /** @param {string} id */
  has(id) {
    return Promise.resolve(this.live.rows.byId.has(id));
  }

  close() {
    // Nothing is pending.
  }
}

/** @implements {TrialSource} */
class TrialWindows {
  /** Sparse: only loaded places. @type {(Row | undefined)[]} */
  rows = [];
  isLoading = true;
  /** The generation of each loaded chunk, the newest last. @type {Map<number, number>} */
  #chunks = new Map();
  /** Chunks of an earlier generation are out of date. */
  #generation = 0;
  /** The query of `rows`. @type {Query | null} */
  #loaded = null;
  #hasTags = false;
  #first = 0;
  #last = 0;
  #isBusy = false;
  #isBusyBeside = false;
  #isClosed = false;
  /** @type {number | undefined} */
  #timer;

  /**
   * @param {Live} live
   * @param {Query} query
   * @param {() => void} onChange
   */
  constructor(live, query, onChange) {
    this.live = live;
    this.query = query;
    this.onChange = onChange;
    this.sample = new Sample(SAMPLE, onChange);
  }

  get charted() {
    return this.sample.rows;
  }

  get total() {
    return this.live.summary?.trialCount ?? 0;
  }

  get names() {
    return this.sample.names;
  }

  get metrics() {
    return this.sample.metrics;
  }

  get hasTags() {
    return this.#hasTags || this.sample.hasTags;
  }

  /** @param {Query} query */
  ask(query) {
    this.query = query;
    this.isLoading = true;
    this.#generation++;
    this.sample.ask(query);
    this.onChange();
    void this.#load();
  }

  /** @param {News} news */
  update({ reset, rows: changed }) {
    // The sample follows later.
    this.#hasTags ||= changed.some((row) => row.tags);
    if (changed.length > 0) {
      const fresh = new Map(changed.map((row) => [row.id, row]));
      for (const chunk of this.#chunks.keys()) {
        for (let at = chunk * CHUNK; at < (chunk + 1) * CHUNK; at++) {
          const row = fresh.get(this.rows[at]?.id ?? "");
          if (row !== undefined) this.rows[at] = row;
        }
      }
    }
    if (reset || changed.length > 0) this.sample.refresh();
    // The order may have changed, also of trials that are not here.
    if ((reset || changed.length > 0) && this.#loaded !== null) {
      this.#timer ??= window.setTimeout(() => {
        this.#timer = undefined;
        this.#generation++;
        void this.#load();
      }, RELOAD_EVERY_MS);
    }
    return reset || changed.length > 0;
  }

  /**
   * @param {number} first
   * @param {number} last
   */
  need(first, last) {
    this.#first = first;
    this.#last = last;
    void this.#load();
  }

  /** @param {string} id */
  async place(id) {
    const { query } = this;
    const { place } = await api.trialWindow(query, { around: id, limit: 1 });
    if (place === null || place === undefined || query !== this.query) return -1;
    const chunk = Math.floor(place / CHUNK);
    this.#take(query, await api.trialWindow(query, { offset: chunk * CHUNK, limit: CHUNK }), this.#generation);
    this.onChange();
    return this.rows.findIndex((row) => row?.id === id);
  }

  /** @param {string} id */
  async has(id) {
    return (await api.trialWindow({ ...this.query, states: new Set(), text: "", conditions: [] }, { around: id, limit: 1 })).place !== null;
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.sample.close();
  }

  /** Load the shown chunks, one request at a time, then those beside them. */
  async #load() {
    if (this.#isBusy) return;
    this.#isBusy = true;
    try {
      for (let chunks = this.#missing(this.#shown()); chunks.length > 0 && !this.#isClosed; chunks = this.#missing(this.#shown())) {
        await this.#loadChunks(chunks[0] ?? 0, chunks[chunks.length - 1] ?? 0);
      }
    } catch {
      // The bar at the top reports that the manager does not answer; the next change or scroll step retries.
    } finally {
      this.#isBusy = false;
    }
    void this.#loadBeside();
  }

  /** Load the next chunks in both directions. A scroll step does not wait for them. */
  async #loadBeside() {
    if (this.#isBusyBeside || this.#loaded !== this.query) return;
    this.#isBusyBeside = true;
    try {
      for (let chunks = this.#missing(this.#beside()); chunks.length > 0 && !this.#isClosed && this.#loaded === this.query; chunks = this.#missing(this.#beside())) {
        await this.#loadChunks(chunks[0] ?? 0, chunks[0] ?? 0);
      }
    } catch {
      // As above.
    } finally {
      this.#isBusyBeside = false;
    }
  }

  /**
   * @param {number} first
   * @param {number} last
   */
  async #loadChunks(first, last) {
    const { query } = this;
    const generation = this.#generation;
    const found = await api.trialWindow(query, { offset: first * CHUNK, limit: (last - first + 1) * CHUNK });
    if (this.#isClosed || query !== this.query) return;
    const isShown = this.isLoading || found.matching !== this.rows.length || this.#shown().some((chunk) => chunk >= first && chunk <= last);
    this.#take(query, found, generation);
    if (isShown) this.onChange();
  }

  #shown() {
    const first = Math.floor(this.#first / CHUNK);
    return Array.from({ length: Math.floor(this.#last / CHUNK) - first + 1 }, (_, at) => first + at);
  }

  #beside() {
    return [Math.floor(this.#last / CHUNK) + 1, Math.floor(this.#first / CHUNK) - 1];
  }

  /** @param {number[]} chunks */
  #missing(chunks) {
    if (this.#loaded !== this.query) return chunks;
    const most = Math.max(0, Math.ceil(this.rows.length / CHUNK) - 1);
    return chunks.filter((chunk) => chunk >= 0 && chunk <= most && this.#chunks.get(chunk) !== this.#generation);
  }

  /**
   * @param {Query} query
   * @param {import("../types.js").TrialWindow} found
   * @param {number} generation
   */
  #take(query, { matching, offset, trials }, generation) {
    if (this.#loaded !== query) {
      this.rows = [];
      this.#chunks.clear();
      this.#loaded = query;
    }
    this.isLoading = false;
    const rows = this.live.rows.known(trials);
    this.live.rows.remember(rows);
    this.rows.length = matching;
    rows.forEach((row, index) => (this.rows[offset + index] = row));
    const count = Math.max(1, Math.ceil(trials.length / CHUNK));
    for (let chunk = offset / CHUNK; chunk < offset / CHUNK + count; chunk++) {
      this.#chunks.delete(chunk);
      this.#chunks.set(chunk, generation);
    }
    for (const chunk of this.#chunks.keys()) {
      if (this.#chunks.size <= MOST_CHUNKS) break;
      this.#chunks.delete(chunk);
      for (let at = chunk * CHUNK; at < Math.min((chunk + 1) * CHUNK, matching); at++) delete this.rows[at];
    }
  }
}
