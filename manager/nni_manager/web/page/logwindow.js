/**
 * The part of a log that is on the screen. A log may have any size; the window never holds more than MOST_BYTES of it, and
 * moves by pieces: at its end while it follows, or back and forth as the reader asks.
 */

import { shownLine } from "./plain.js";

/** @import { LogPiece } from "./types.js" */
/** @typedef {{from: number, limit: number}} Range  `from` below zero counts from the end */

/** One request. */
export const PIECE_BYTES = 64 * 1024;
/** The most that is held; then half of it is let go, so that this happens seldom. */
export const MOST_BYTES = 256 * 1024;

export class LogWindow {
  #isStalled;

  constructor() {
    /** @type {{from: number, next: number, text: string}[]} */
    this.pieces = [];
    /** What the log had when last asked. */
    this.size = 0;
    /** Whether the last answer brought nothing: a log may end with half a character, which is told when it is whole. */
    this.#isStalled = false;
  }

  /** The place of the first byte that is held. */
  get start() {
    return this.pieces[0]?.from ?? 0;
  }

  /** The place behind the last byte that is held. */
  get end() {
    return this.pieces[this.pieces.length - 1]?.next ?? 0;
  }

  /** Whether nothing comes after what is held, as far as is known. */
  get isAtEnd() {
    return this.end >= this.size;
  }

  /** Whether there is more to be had at once, as far as is known. */
  get isBehind() {
    return !this.isAtEnd && !this.#isStalled;
  }

  /**
   * What to ask for first, and to see the end again.
   *
   * @returns {Range}
   */
  static last() {
    return { from: -PIECE_BYTES, limit: PIECE_BYTES };
  }

  /**
   * What to ask for to see the beginning.
   *
   * @returns {Range}
   */
  static first() {
    return { from: 0, limit: PIECE_BYTES };
  }

  /**
   * What comes after what is held.
   *
   * @returns {Range}
   */
  newer() {
    return { from: this.end, limit: PIECE_BYTES };
  }

  /**
   * What comes before what is held; null at the beginning.
   *
   * @returns {Range | null}
   */
  older() {
    const from = Math.max(0, this.start - PIECE_BYTES);
    return this.start === 0 ? null : { from, limit: this.start - from };
  }

  /**
   * What to ask for to keep up with a log that grows: what is new, or its end alone when too much is.
   *
   * @returns {Range}
   */
  following() {
    return this.pieces.length === 0 || this.size - this.end > MOST_BYTES ? LogWindow.last() : this.newer();
  }

  /**
   * Take in an answer. A piece that joins neither end of what is held takes its place; a log that has become shorter is
   * another log, and nothing is held of it.
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

  /** What is held as it is shown: a line that begins before the window starts with a mark. */
  text() {
    const raw = this.pieces.map((piece) => piece.text).join("");
    const lines = raw.replace(/\r\n/g, "\n").split("\n").map((line) => shownLine(line));
    return (this.start > 0 ? "… " : "") + lines.join("\n");
  }
}
