/** The experiment as it goes on: an initial answer, then a stream of changes, or polling where there is none. */

import { api, Refused } from "./api.js";
import { next } from "./connection.js";
import { EventReader } from "./events.js";
import { Rows } from "./rows.js";

/** @import { Changes, Row, Summary } from "../types.js" */
/** @import { Connection, Happening } from "./connection.js" */

/** @typedef {{reset: boolean, rows: readonly Row[]}} News  the trials that changed */

const POLL_EVERY_MS = 2000;
/** While nobody answers: often enough that a resumed manager is found at once. */
const KNOCK_EVERY_MS = 2000;
const STREAM_AGAIN_AFTER_MS = 30_000;
/** A manager says every 15 seconds that it is there; a stream without it is dead, or held back on the way. */
const LONGEST_SILENCE_MS = 40_000;
/** While these last, the time that an experiment has run goes on. */
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

  /** How long the experiment has run by now, in seconds: between two answers the clock goes on here. */
  get elapsedS() {
    if (this.summary === null) return 0;
    const goesOn = COUNTING.includes(this.summary.status) && this.#connection !== "silent";
    return this.summary.elapsedS + (goesOn ? (Date.now() - this.heardAtMs) / 1000 : 0);
  }

  /** Begin to listen, unless that has begun. */
  start() {
    if (this.#hasBegun) return this.knock();
    this.#hasBegun = true;
    document.addEventListener("visibilitychange", () => this.#look());
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
    // Who is asked already answers that; two answers would be of two times.
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
      // It broke, or was ended: whether anybody is there is asked below.
    }
    // Who ended it has seen to what comes next.
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

  /** The page is looked at, or no more. */
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
    // An answer that says nothing is no news; that it came is.
    this.heardAtMs = Date.now();
    // The manager of another experiment listens there now: nothing that is shown is of it.
    if (this.summary !== null && changes.summary.id !== this.summary.id) location.reload();
    this.#version = changes.version;
    this.summary = changes.summary ?? this.summary;
    const rows = this.rows.apply(changes);
    for (const listener of this.#listeners) listener({ reset: changes.reset, rows });
  }
}
