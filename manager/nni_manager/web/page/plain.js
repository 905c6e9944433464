/** Sanitizes untrusted text for display. It goes into text nodes in any case; this removes characters that mislead a reader. */

/** Maximum number of shown characters of one line. */
export const LONGEST_LINE = 2000;

// Terminal escape sequences: CSI (colours, cursor), OSC (titles, links; terminated by BEL or ST), and two-character ones.
const ESCAPES =
  // eslint-disable-next-line no-control-regex
  /\u001b\[[0-?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|\u001b[PX^_][^\u001b]*(?:\u001b\\)?|\u001b[ -/]*[0-~]|\u009b[0-?]*[ -/]*[@-~]/g;
// Control characters except tab and line feed, and bidirectional marks, which can disguise a line's content.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

const SUSPICIOUS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/;

/**
 * Remove escape sequences and control characters; tabs and line feeds stay.
 *
 * @param {string} text
 */
export function plain(text) {
  // Fast path: most text has nothing to remove.
  if (text.search(SUSPICIOUS) < 0) return text;
  return text.replace(/\r\n/g, "\n").replace(ESCAPES, "").replace(CONTROLS, "");
}

/**
 * The display text of a line of a log: the last state of a progress bar, without control sequences. The middle of a very long
 * line is replaced by a mark with its length.
 *
 * @param {string} line without its line feed
 * @param {number} [most] maximum number of characters
 */
export function shownLine(line, most = LONGEST_LINE) {
  // Process only the two ends, so that escapes are not searched in a hidden megabyte.
  const full = line.length;
  const isCut = full > most * 8;
  const head = isCut ? line.slice(0, most * 4) : line;
  const text = plain(lastState(head));
  if (!isCut && text.length <= most) return text;
  const hidden = (isCut ? full : text.length) - most;
  return `${whole(text.slice(0, most))} … ${hidden.toLocaleString("en-US")} more characters in this line`;
}

/**
 * The last state of a line with carriage returns, as a terminal shows it.
 *
 * @param {string} line
 */
function lastState(line) {
  const states = line.split("\r").filter(Boolean);
  return states[states.length - 1] ?? "";
}

/**
 * Remove a lone surrogate at the end of a text.
 *
 * @param {string} text
 */
function whole(text) {
  const last = text.charCodeAt(text.length - 1);
  return last >= 0xd800 && last <= 0xdbff ? text.slice(0, -1) : text;
}

/**
 * Shorten text for a cell or a label.
 *
 * @param {string} text
 * @param {number} most maximum number of characters
 */
export function short(text, most) {
  const one = plain(text.length > most * 8 ? text.slice(0, most * 8) : text).replace(/\s+/g, " ");
  return one.length <= most ? one : `${whole(one.slice(0, most - 1))}…`;
}
