/** Which trials a table shows, and in which order. Ten thousand trials of which three have changed are not sorted anew. */

import { flat, shown } from "./parameters.js";

/** @import { Row } from "./types.js" */

/**
 * @typedef {"=" | "≠" | "<" | "≤" | ">" | "≥" | "contains"} Operator
 * @typedef {{name: string, operator: Operator, value: string}} Condition
 * @typedef {{column: string, descending: boolean}} Order  a column's id; that of a parameter is `p:` and its name
 *
 * @typedef {object} Query
 * @property {ReadonlySet<string>} states  none: all
 * @property {string} text  every word has to be found somewhere in a trial
 * @property {readonly Condition[]} conditions  on parameters; all hold
 * @property {Order} order
 */

/** @type {readonly Operator[]} */
export const OPERATORS = ["=", "≠", "<", "≤", ">", "≥", "contains"];

/** Beyond this share of changed trials, sorting all is cheaper than finding a place for each. */
const MOST_INSERTED = 0.05;

/** @type {WeakMap<Row, string>} */
const haystacks = new WeakMap();

/** @param {Row} row */
function haystack(row) {
  let text = haystacks.get(row);
  if (text === undefined) {
    const parts = [String(row.seq), row.id, row.status, row.reason ?? "", row.message ?? ""];
    for (const [name, value] of flat(row.parameters)) parts.push(`${name}=${value}`, shown(value));
    text = parts.join("\n").toLowerCase();
    haystacks.set(row, text);
  }
  return text;
}

/**
 * Whether a trial is shown.
 *
 * @param {Row} row
 * @param {Query} query
 */
export function matches(row, query) {
  if (query.states.size > 0 && !query.states.has(row.status)) return false;
  if (!query.conditions.every((condition) => holds(row, condition))) return false;
  const words = query.text.toLowerCase().split(/\s+/).filter(Boolean);
  return words.length === 0 || words.every((word) => haystack(row).includes(word));
}

/**
 * @param {Row} row
 * @param {Condition} condition
 */
function holds(row, { name, operator, value }) {
  const own = flat(row.parameters).get(name);
  if (own === undefined) return operator === "≠";
  const text = String(own);
  if (operator === "contains") return text.toLowerCase().includes(value.toLowerCase());
  const wanted = Number(value);
  const isNumeric = typeof own === "number" && value.trim() !== "" && !Number.isNaN(wanted);
  const sign = isNumeric ? Math.sign(own - wanted) : Math.sign(text.localeCompare(value));
  switch (operator) {
    case "=":
      return isNumeric ? own === wanted : text === value;
    case "≠":
      return isNumeric ? own !== wanted : text !== value;
    case "<":
      return sign < 0;
    case "≤":
      return sign <= 0;
    case ">":
      return sign > 0;
    case "≥":
      return sign >= 0;
  }
}

/**
 * What a column holds of a trial. A trial that still runs has the duration of a very long one: it goes on growing.
 *
 * @param {Row} row
 * @param {string} column
 * @returns {string | number | boolean | null | undefined}
 */
export function valueIn(row, column) {
  switch (column) {
    case "seq":
      return row.seq;
    case "id":
      return row.id;
    case "state":
      return row.status;
    case "value":
      return row.value;
    case "latest":
      return row.latest;
    case "count":
      return row.count;
    case "start":
      return row.start;
    case "duration":
      if (row.start === null || row.start === undefined) return null;
      return row.end ? row.end - row.start : 1e15 - row.start;
    case "reason":
      return row.reason;
    default:
      return flat(row.parameters).get(column.slice(2));
  }
}

/**
 * Less than nothing when `one` stands before `other`. What a trial does not have stands last in both directions, and
 * trials that are alike stand by number.
 *
 * @param {Row} one
 * @param {Row} other
 * @param {Order} order
 */
export function compare(one, other, { column, descending }) {
  const a = valueIn(one, column) ?? null;
  const b = valueIn(other, column) ?? null;
  if (a === null || b === null) {
    if (a !== b) return a === null ? 1 : -1;
    return one.seq - other.seq;
  }
  const sign =
    typeof a === "number" && typeof b === "number"
      ? a - b
      : typeof a === typeof b
        ? compareText(String(a), String(b))
        : compareText(typeof a, typeof b);
  if (sign !== 0) return descending ? -sign : sign;
  return one.seq - other.seq;
}

/**
 * By code units: a collator would take ten times as long, and what is compared are names.
 *
 * @param {string} a
 * @param {string} b
 */
function compareText(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

/**
 * The trials to show, in order.
 *
 * @param {readonly Row[]} rows
 * @param {Query} query
 */
export function arrange(rows, query) {
  const isAll = query.states.size === 0 && query.conditions.length === 0 && query.text.trim() === "";
  const shownRows = isAll ? [...rows] : rows.filter((row) => matches(row, query));
  return shownRows.sort((a, b) => compare(a, b, query.order));
}

/**
 * The same from what was shown before: only trials that have changed are looked at and put in their places.
 *
 * @param {readonly Row[]} shownBefore as `arrange` gave it for this query
 * @param {readonly Row[]} changed as they are now
 * @param {Query} query
 */
export function rearrange(shownBefore, changed, query) {
  const ids = new Set(changed.map((row) => row.id));
  const kept = shownBefore.filter((row) => !ids.has(row.id));
  const added = changed.filter((row) => matches(row, query));
  if (added.length > kept.length * MOST_INSERTED) {
    return kept.concat(added).sort((a, b) => compare(a, b, query.order));
  }
  for (const row of added) kept.splice(placeOf(row, kept, query.order), 0, row);
  return kept;
}

/**
 * @param {Row} row
 * @param {readonly Row[]} rows
 * @param {Order} order
 */
function placeOf(row, rows, order) {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (compare(/** @type {Row} */ (rows[middle]), row, order) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}
