/**
 * Filter and order of the trials in a table. Updates are incremental: few changes among thousands of trials do not cause a sort.
 * The manager does the same for large experiments, in engine/trial_query.py: tests/page/queries.json has cases for both.
 */

import { number } from "./format.js";
import { isMarked, markText } from "./marks.js";
import { METRIC_PREFIX } from "./metrics.js";
import { flat } from "./parameters.js";
import { short } from "./plain.js";

/** @import { Row } from "./types.js" */
/** @import { Mark } from "./marks.js" */

/**
 * @typedef {"=" | "≠" | "<" | "≤" | ">" | "≥" | "contains"} Operator
 * @typedef {{name: string, operator: Operator, value: string}} Comparison
 * @typedef {Comparison | Mark} Condition
 * @typedef {{column: string, descending: boolean}} Order  a column's id; for a parameter `p:` and its name, for a metric `m:`
 *
 * @typedef {object} Filters
 * @property {ReadonlySet<string>} states  empty: all
 * @property {string} text  every word must occur in a trial; `tag:keep` is a tag that it must have, `tag:` any tag
 * @property {readonly Condition[]} conditions  on parameters, and on metrics by `value/` and the name, "" being the default one; all must hold
 *
 * @typedef {Filters & {order: Order}} Query
 */

/** @type {Query} */
export const ALL_TRIALS = { states: new Set(), text: "", conditions: [], order: { column: "seq", descending: false } };

/** @type {readonly Operator[]} */
export const OPERATORS = ["=", "≠", "<", "≤", ">", "≥", "contains"];

/** The start of a word in a search that names a tag. */
export const TAG = "tag:";

/** Above this share of changed trials, sorting all is cheaper than inserting each. */
const MOST_INSERTED = 0.05;

/** @type {WeakMap<Row, string>} */
const haystacks = new WeakMap();

/** @param {Row} row */
function haystack(row) {
  let text = haystacks.get(row);
  if (text === undefined) {
    const parts = [String(row.seq), row.id, row.status, row.reason ?? "", row.message ?? "", row.note ?? "", ...(row.tags ?? [])];
    for (const [name, value] of flat(row.parameters)) {
      parts.push(`${name}=${value}`);
      if (typeof value === "number") parts.push(number(value));
    }
    text = parts.join("\n").toLowerCase();
    haystacks.set(row, text);
  }
  return text;
}

/**
 * True if a trial matches the query.
 *
 * @param {Row} row
 * @param {Query} query
 */
export function matches(row, query) {
  if (query.states.size > 0 && !query.states.has(row.status)) return false;
  if (!query.conditions.every((condition) => holds(row, condition))) return false;
  const words = query.text.toLowerCase().split(/\s+/).filter(Boolean);
  return words.length === 0 || words.every((word) => (word.startsWith(TAG) ? hasTag(row, word.slice(TAG.length)) : haystack(row).includes(word)));
}

/**
 * @param {{tags?: readonly string[]}} tagged
 * @param {string} wanted  in lower case; empty: any
 */
export function hasTag({ tags = [] }, wanted) {
  return wanted === "" ? tags.length > 0 : tags.some((tag) => tag.toLowerCase() === wanted);
}

/**
 * The value of a trial under the name of a condition: a parameter, or a metric by `value/` and its name.
 *
 * @param {Row} row
 * @param {string} name
 */
export function named(row, name) {
  const own = flat(row.parameters).get(name);
  if (own !== undefined || !name.startsWith(METRIC_PREFIX)) return own;
  return name === METRIC_PREFIX ? (row.value ?? undefined) : row.metrics?.[name.slice(METRIC_PREFIX.length)];
}

/**
 * The display text of a condition.
 *
 * @param {Condition} condition
 * @param {string} [result]  the name of a trial's result
 */
export function conditionText(condition, result) {
  return "operator" in condition ? `${short(condition.name, 40)} ${condition.operator} ${short(condition.value, 40)}` : markText(condition, result);
}

/**
 * @param {Row} row
 * @param {Condition} condition
 */
function holds(row, condition) {
  const own = named(row, condition.name);
  if (!("operator" in condition)) return isMarked(condition, own);
  const { operator, value } = condition;
  if (own === undefined) return operator === "≠";
  const text = String(own);
  if (operator === "contains") return text.toLowerCase().includes(value.toLowerCase());
  const wanted = Number(value);
  const isNumeric = typeof own === "number" && value.trim() !== "" && !Number.isNaN(wanted);
  // null equals the text "null", but is neither less nor greater than anything.
  const sign = own === null ? NaN : isNumeric ? Math.sign(own - wanted) : compareText(text, value);
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
 * The sort value of a trial in a column. A running trial sorts as a very long one, since its duration grows.
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
    case "tags":
      return row.tags?.join(" ");
    case "note":
      return row.note;
    case "reason":
      return row.reason;
    default:
      return column.startsWith("m:") ? row.metrics?.[column.slice(2)] : flat(row.parameters).get(column.slice(2));
  }
}

/**
 * Negative if `one` sorts before `other`. Missing values sort last in both directions; equal trials sort by number.
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
 * Compare by code units: a collator takes ten times as long, and the texts are names.
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
 * Update an earlier result of `arrange`: only changed trials are filtered and inserted.
 *
 * @param {readonly Row[]} shownBefore the result of `arrange` for this query
 * @param {readonly Row[]} changed the changed trials, current
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
