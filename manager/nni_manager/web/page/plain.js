/** Foreign text made harmless to look at. It goes into text nodes in any case; this is against what confuses the eye. */

/** So many characters of one line are shown. */
export const LONGEST_LINE = 2000;

// Escape sequences of terminals: CSI (colours, cursor), OSC (titles, links; they end with BEL or ST), and two-letter ones.
const ESCAPES =
  // eslint-disable-next-line no-control-regex
  /\u001b\[[0-?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|\u001b[PX^_][^\u001b]*(?:\u001b\\)?|\u001b[ -/]*[0-~]|\u009b[0-?]*[ -/]*[@-~]/g;
// Controls but tab and line feed; and marks that turn the direction of text around, which hide what a line says.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

const SUSPICIOUS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/;

/**
 * Text without escape sequences and control characters; tabs and line feeds stay.
 *
 * @param {string} text
 */
export function plain(text) {
  // Most text has nothing to take out.
  if (text.search(SUSPICIOUS) < 0) return text;
  return text.replace(/\r\n/g, "\n").replace(ESCAPES, "").replace(CONTROLS, "");
}

/**
 * A line of a log as it is shown: of a progress bar its last state, nothing that a terminal would obey, and the middle of a
 * very long line left out with a mark that says how much.
 *
 * @param {string} line without its line feed
 * @param {number} [most] characters
 */
export function shownLine(line, most = LONGEST_LINE) {
  // The ends are enough: a megabyte is not searched for escapes that are not shown.
  const full = line.length;
  const isCut = full > most * 8;
  const head = isCut ? line.slice(0, most * 4) : line;
  const text = plain(lastState(head));
  if (!isCut && text.length <= most) return text;
  const hidden = (isCut ? full : text.length) - most;
  return `${whole(text.slice(0, most))} … ${hidden.toLocaleString("en-US")} more characters in this line`;
}

/**
 * What a terminal would show last of a line that returns to its beginning.
 *
 * @param {string} line
 */
function lastState(line) {
  const states = line.split("\r").filter(Boolean);
  return states[states.length - 1] ?? "";
}

/**
 * Text without half a character at its end.
 *
 * @param {string} text
 */
function whole(text) {
  const last = text.charCodeAt(text.length - 1);
  return last >= 0xd800 && last <= 0xdbff ? text.slice(0, -1) : text;
}

/**
 * Short text for a cell or a label.
 *
 * @param {string} text
 * @param {number} most characters
 */
export function short(text, most) {
  const one = plain(text.length > most * 8 ? text.slice(0, most * 8) : text).replace(/\s+/g, " ");
  return one.length <= most ? one : `${whole(one.slice(0, most - 1))}…`;
}
