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

/**
 * Short texts of several values, each different from the others: charts identify a category by its text. Where short texts would
 * be equal, the middle is left out instead of the end, and then a number follows.
 *
 * @param {ReadonlyMap<string, string>} texts  the text of each value, by the value as text
 * @param {number} most maximum number of characters, without the number
 * @returns {Map<string, string>} by the value as text
 */
export function distinctShort(texts, most) {
  /** @type {Map<string, string[]>} */
  const alike = new Map();
  for (const [value, text] of texts) {
    const shortened = short(text, most);
    const values = alike.get(shortened);
    if (values === undefined) alike.set(shortened, [value]);
    else values.push(value);
  }
  /** @type {Map<string, string>} */
  const found = new Map();
  const taken = new Set([...alike].filter(([, values]) => values.length === 1).map(([shortened]) => shortened));
  for (const [shortened, [value = "", ...others]] of alike) {
    if (others.length === 0) {
      found.set(value, shortened);
      continue;
    }
    for (const each of [value, ...others]) {
      const base = withoutMiddle(each, most);
      let candidate = base;
      for (let number = 2; taken.has(candidate); number += 1) candidate = `${base} (${number})`;
      taken.add(candidate);
      found.set(each, candidate);
    }
  }
  return found;
}

/**
 * Shorten text in its middle, with more of its end than of its start.
 *
 * @param {string} text
 * @param {number} most maximum number of characters
 */
function withoutMiddle(text, most) {
  const one = plain(text).replace(/\s+/g, " ");
  if (one.length <= most) return one;
  const head = Math.floor(most / 3);
  return `${whole(one.slice(0, head))}…${one.slice(head + 1 - most).replace(/^[\udc00-\udfff]/, "")}`;
}
