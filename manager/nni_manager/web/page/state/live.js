/** The live state of the experiment: an initial response, then a stream of changes, or polling as fallback. */

import { api, Refused, report } from "./api.js";
import { next } from "./connection.js";
import { EventReader } from "./events.js";
import { Rows } from "./rows.js";

/** @import { Changes, Row, Summary } from "../types.js" */
/** @import { Connection, Happening } from "./connection.js" */

/** @typedef {{reset: boolean, rows: readonly Row[]}} News  the changed trials */

const POLL_EVERY_MS = 2000;
/** Retry interval while the manager does not answer; short, to detect a resumed manager soon. */
const KNOCK_EVERY_MS = 2000;
const STREAM_AGAIN_AFTER_MS = 30_000;
/** Stream timeout: the manager sends a keep-alive every 15 seconds, so a silent stream is dead or buffered by a proxy. */
const LONGEST_SILENCE_MS = 40_000;
/** States in which an experiment's elapsed time advances. */
const COUNTING = ["RUNNING", "NO_MORE_TRIAL", "TUNER_NO_MORE_TRIAL"];

export class Live {
  /** @type {Connection} */
  #connection = "loading";
  /** @type {AbortController | null} */
  #stream = null;
  /** @type {string | null} */
  #version = null;
  /** @type {number | undefined} */
  #timer;
  /** @type {number | undefined} */
  #watchdog;
  #streamTriedAtMs = 0;
  #hasBegun = false;
  #isLoading = false;
  #isWindowed = false;
  /** @type {Set<(news: News) => void>} */
  #listeners = new Set();
  /** @type {Set<() => void>} */
  #connectionListeners = new Set();

  constructor() {
    this.rows = new Rows();
    /** @type {Summary | null} */
    this.summary = null;
    /** Time of the last message; 0: never. */
    this.heardAtMs = 0;
    /** The manager's message when it rejected the session. */
    this.refusal = "";
  }

  /** The current state of the connection. */
  get connection() {
    return this.#connection;
  }

  /** True if changes are not possible, since the server only views a stored experiment. */
  get isReadOnly() {
    return this.summary?.readOnly ?? false;
  }

  /** True if the experiment has too many trials for the page to hold them all. */
  get isWindowed() {
    return this.#isWindowed;
  }

  /** The objectives; while nothing is known, the one of NNI. */
  get objectives() {
    return this.summary?.objectives ?? [{ metric: "default", mode: "maximize" }];
  }

  /** True if higher results of the first objective are better. */
  get maximize() {
    return this.summary?.optimizeMode !== "minimize";
  }

  /** The elapsed time of the experiment in seconds, extrapolated between two messages. */
  get elapsedS() {
    if (this.summary === null) return 0;
    const goesOn = COUNTING.includes(this.summary.status) && this.#connection !== "silent" && report === null;
    return this.summary.elapsedS + (goesOn ? (Date.now() - this.heardAtMs) / 1000 : 0);
  }

  /** Start the connection; idempotent. */
  start() {
    if (this.#hasBegun) return this.knock();
    this.#hasBegun = true;
    if (report === null) document.addEventListener("visibilitychange", () => this.#look());
    void this.#load();
  }

  /** Poll now: the user has returned to the page, or has just signed in. */
  knock() {
    if (this.#connection === "silent" || this.#connection === "locked" || this.#connection === "polling") {
      clearTimeout(this.#timer);
      void this.#load();
    }
  }

  /**
   * Subscribe to changes. The returned function unsubscribes.
   *
   * @param {(news: News) => void} listener
   */
  onNews(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /**
   * Subscribe to changes of the connection.
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
    // A request is already pending; a second one could return an older state.
    if (this.#isLoading) return;
    this.#isLoading = true;
    let changes;
    try {
      changes = await api.changes(this.#version);
    } catch (error) {
      const isLocked = error instanceof Refused && (error.status === 401 || error.status === 403);
      if (isLocked) this.refusal = error.message;
      this.#happened(isLocked ? "refused" : "failed");
      this.#again(KNOCK_EVERY_MS);
      return;
    } finally {
      this.#isLoading = false;
    }
    this.#take(changes);
    if (report !== null) return this.#happened("embedded");
    this.#happened("answered");
    if (this.#connection === "polling" && Date.now() - this.#streamTriedAtMs > STREAM_AGAIN_AFTER_MS) {
      this.#happened("stream wanted");
    }
    if (this.#connection === "connecting") void this.#openStream();
    else this.#again(POLL_EVERY_MS);
  }

  /** @param {number} afterMs */
  #again(afterMs) {
    clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => void this.#load(), afterMs);
  }

  async #openStream() {
    const stream = new AbortController();
    this.#stream = stream;
    this.#streamTriedAtMs = Date.now();
    this.#watch();
    try {
      const body = await api.events(this.#version, stream.signal);
      if (body !== null && stream === this.#stream) {
        this.#happened("stream opened");
        await this.#follow(body, stream);
      }
    } catch {
      // The stream failed or was aborted; the request below checks the manager.
    }
    // Whatever replaced the stream handles the next step.
    if (stream !== this.#stream) return;
    this.#closeStream();
    this.#happened("stream lost");
    void this.#load();
  }

  /**
   * @param {ReadableStream<Uint8Array<ArrayBuffer>>} body
   * @param {AbortController} stream
   */
  async #follow(body, stream) {
    const events = new EventReader();
    const texts = body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await texts.read(); !piece.done && stream === this.#stream; piece = await texts.read()) {
      this.#watch();
      for (const { event, data } of events.push(piece.value)) if (event === "changes") this.#take(JSON.parse(data));
    }
  }

  #watch() {
    clearTimeout(this.#watchdog);
    this.#watchdog = window.setTimeout(() => this.#stream?.abort(), LONGEST_SILENCE_MS);
  }

  #closeStream() {
    clearTimeout(this.#watchdog);
    const stream = this.#stream;
    this.#stream = null;
    stream?.abort();
  }

  /** Handle a change of the page's visibility. */
  #look() {
    if (document.hidden && this.#stream !== null) {
      this.#closeStream();
      this.#happened("hidden");
    } else if (!document.hidden && this.#connection === "resting") {
      this.#happened("seen");
      void this.#openStream();
    } else if (!document.hidden) this.knock();
  }

  /** @param {Changes} changes */
  #take(changes) {
    // Any response counts as contact, even one without changes.
    this.heardAtMs = Date.now();
    // Another experiment's manager listens on this address now, so all shown data is obsolete.
    if (this.summary !== null && changes.summary.id !== this.summary.id) location.reload();
    this.#version = changes.version;
    this.summary = changes.summary ?? this.summary;
    if (changes.reset) this.#isWindowed = changes.windowed ?? false;
    const rows = this.rows.apply(changes);
    for (const listener of this.#listeners) listener({ reset: changes.reset, rows });
  }
}
