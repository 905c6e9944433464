/** The experiment as it goes on: an initial answer, then a stream of changes, or polling where there is none. */

import { isOver } from "../format.js";
import { api, Refused } from "./api.js";
import { next } from "./connection.js";
import { Rows } from "./rows.js";

/** @import { Changes, Row, Summary } from "../types.js" */
/** @import { Connection, Happening } from "./connection.js" */

/** @typedef {{reset: boolean, rows: readonly Row[]}} News  the trials that changed */

const POLL_EVERY_MS = 2000;
/** While nobody answers: often enough that a resumed manager is found at once. */
const KNOCK_EVERY_MS = 2000;
const STREAM_AGAIN_AFTER_MS = 20_000;
/** A manager whose experiment runs says something every few seconds; a stream without it is held back on the way. */
const LONGEST_SILENCE_MS = 20_000;

export class Live {
  /** @type {Connection} */
  #connection = "loading";
  /** @type {EventSource | null} */
  #stream = null;
  /** @type {string | null} */
  #version = null;
  /** @type {number | undefined} */
  #timer;
  /** @type {number | undefined} */
  #watchdog;
  #streamTriedAtMs = 0;
  /** @type {Set<(news: News) => void>} */
  #listeners = new Set();
  /** @type {Set<() => void>} */
  #connectionListeners = new Set();

  constructor() {
    this.rows = new Rows();
    /** @type {Summary | null} */
    this.summary = null;
    /** When something was last heard; 0: never. */
    this.heardAtMs = 0;
    /** What the manager said when it let nobody in. */
    this.refusal = "";
  }

  /** How the manager is heard now. */
  get connection() {
    return this.#connection;
  }

  /** Whether nothing can be changed: what is served is a view. */
  get isReadOnly() {
    return this.summary?.readOnly ?? false;
  }

  /** Whether higher results are better. */
  get maximize() {
    return this.summary?.optimizeMode !== "minimize";
  }

  /** Begin to listen. */
  start() {
    void this.#load();
  }

  /** Ask again now, rather than when it is time to: somebody has come back to the page, or has just been let in. */
  knock() {
    if (this.#connection === "silent" || this.#connection === "locked" || this.#connection === "polling") {
      clearTimeout(this.#timer);
      void this.#load();
    }
  }

  /**
   * Hear of changes, until the function that this returns is called.
   *
   * @param {(news: News) => void} listener
   */
  onNews(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /**
   * Hear of changes to the way in which the manager is heard.
   *
   * @param {() => void} listener
   */
  onConnection(listener) {
    this.#connectionListeners.add(listener);
  }

  /** @param {Happening} happening */
  #happened(happening) {
    this.#connection = next(this.#connection, happening);
    for (const listener of this.#connectionListeners) listener();
  }

  async #load() {
    let changes;
    try {
      changes = await api.changes(this.#version);
    } catch (error) {
      const isLocked = error instanceof Refused && (error.status === 401 || error.status === 403);
      if (isLocked) this.refusal = error.message;
      this.#happened(isLocked ? "refused" : "failed");
      this.#again(KNOCK_EVERY_MS);
      return;
    }
    this.#take(changes);
    this.#happened("answered");
    if (this.#connection === "polling" && Date.now() - this.#streamTriedAtMs > STREAM_AGAIN_AFTER_MS) {
      this.#happened("stream wanted");
    }
    if (this.#connection === "connecting") this.#openStream();
    else this.#again(POLL_EVERY_MS);
  }

  /** @param {number} afterMs */
  #again(afterMs) {
    clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => void this.#load(), afterMs);
  }

  #openStream() {
    this.#streamTriedAtMs = Date.now();
    const stream = new EventSource(api.eventsUrl(this.#version));
    this.#stream = stream;
    this.#watch();
    stream.addEventListener("open", () => this.#happened("stream opened"));
    stream.addEventListener("error", () => this.#loseStream());
    stream.addEventListener("changes", (event) => {
      this.#watch();
      this.#take(JSON.parse(/** @type {MessageEvent} */ (event).data));
    });
  }

  #watch() {
    clearTimeout(this.#watchdog);
    this.#watchdog = window.setTimeout(() => {
      if (this.summary !== null && isOver(this.summary.status) && this.#connection === "streaming") this.#watch();
      else this.#loseStream();
    }, LONGEST_SILENCE_MS);
  }

  /** The browser would open it again by itself, but would not say whether nobody is there or nobody is let in. */
  #loseStream() {
    if (this.#stream === null) return;
    clearTimeout(this.#watchdog);
    this.#stream.close();
    this.#stream = null;
    this.#happened("stream lost");
    void this.#load();
  }

  /** @param {Changes} changes */
  #take(changes) {
    // An answer that says nothing is no news; that it came is.
    this.heardAtMs = Date.now();
    this.#version = changes.version;
    this.summary = changes.summary ?? this.summary;
    const rows = this.rows.apply(changes);
    for (const listener of this.#listeners) listener({ reset: changes.reset, rows });
  }
}
