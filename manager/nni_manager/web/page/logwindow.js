/**
 * A window of a log. A log may have any size; the window holds at most MOST_BYTES of it. It moves in pieces: with the end of
 * the log while it follows, or back and forth on the reader's request.
 */

import { shownLine } from "./plain.js";

/** @import { LogPiece } from "./types.js" */
/** @typedef {{from: number, limit: number}} Range  `from` below zero counts from the end */

/** Size of one request. */
export const PIECE_BYTES = 64 * 1024;
/** Maximum size of the window. Beyond it half of the window is dropped, so that drops are rare. */
export const MOST_BYTES = 256 * 1024;

export class LogWindow {
  #isStalled;

  constructor() {
    /** @type {{from: number, next: number, text: string}[]} */
    this.pieces = [];
    /** The size of the log in the last response. */
    this.size = 0;
    /** True if the last response was empty: a partial character at the end of a log is sent once it is complete. */
    this.#isStalled = false;
  }

  /** The offset of the first byte in the window. */
  get start() {
    return this.pieces[0]?.from ?? 0;
  }

  /** The offset after the last byte in the window. */
  get end() {
    return this.pieces[this.pieces.length - 1]?.next ?? 0;
  }

  /** True if the window reaches the known end of the log. */
  get isAtEnd() {
    return this.end >= this.size;
  }

  /** True if more data is known to be available. */
  get isBehind() {
    return !this.isAtEnd && !this.#isStalled;
  }

  /**
   * The range for the end of the log, also used first.
   *
   * @returns {Range}
   */
  static last() {
    return { from: -PIECE_BYTES, limit: PIECE_BYTES };
  }

  /**
   * The range for the start of the log.
   *
   * @returns {Range}
   */
  static first() {
    return { from: 0, limit: PIECE_BYTES };
  }

  /**
   * The range after the window.
   *
   * @returns {Range}
   */
  newer() {
    return { from: this.end, limit: PIECE_BYTES };
  }

  /**
   * The range before the window; null at the start of the log.
   *
   * @returns {Range | null}
   */
  older() {
    const from = Math.max(0, this.start - PIECE_BYTES);
    return this.start === 0 ? null : { from, limit: this.start - from };
  }

  /**
   * The next range to follow a growing log: the new data, or only the end if there is too much.
   *
   * @returns {Range}
   */
  following() {
    return this.pieces.length === 0 || this.size - this.end > MOST_BYTES ? LogWindow.last() : this.newer();
  }

  /**
   * Add a response. A piece that is adjacent to neither end replaces the window. A log that has become shorter is a different
   * log, so the window is cleared.
   *
   * @param {LogPiece} piece
   */
  accept(piece) {
    if (piece.size < this.end) this.pieces = [];
    this.size = piece.size;
    this.#isStalled = piece.next <= piece.from;
    if (this.#isStalled) return;
    const held = { from: piece.from, next: piece.next, text: piece.text };
    if (this.pieces.length > 0 && piece.from === this.end) {
      this.pieces.push(held);
      if (this.end - this.start > MOST_BYTES) this.#letGo(() => this.pieces.shift());
    } else if (this.pieces.length > 0 && piece.next === this.start) {
      this.pieces.unshift(held);
      if (this.end - this.start > MOST_BYTES) this.#letGo(() => this.pieces.pop());
    } else {
      this.pieces = [held];
    }
  }

  /** @param {() => void} drop */
  #letGo(drop) {
    while (this.pieces.length > 1 && this.end - this.start > MOST_BYTES / 2) drop();
  }

  /** The text to show. A line that starts before the window gets a mark. */
  text() {
    const raw = this.pieces.map((piece) => piece.text).join("");
    const lines = raw.replace(/\r\n/g, "\n").split("\n").map((line) => shownLine(line));
    return (this.start > 0 ? "… " : "") + lines.join("\n");
  }
}
