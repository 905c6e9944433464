/** Data series of charts, computed from trials: best so far, axes of parallel coordinates, downsampling. */

import { METRIC_PREFIX } from "./metrics.js";
import { flat, shown } from "./parameters.js";

/** @import { Metric, Row } from "./types.js" */
/** @import { Simple } from "./parameters.js" */
/** @import { Scale } from "./scales.js" */

/** Maximum number of marks: each is an element, and more are not distinguishable. */
export const MOST_MARKS = 1500;
/** Maximum number of lines of parallel coordinates. */
export const MOST_LINES = 1000;
/** Number of shades of lines, by result. */
export const SHADES = 10;
/** Maximum number of distinct texts on a categorical axis. */
const MOST_WORDS = 40;
/** The part of an axis below its values, down to the tick "not chosen". */
const NOT_CHOSEN_SHARE = 0.16;

/**
 * Matches Python's tokens for non-JSON numbers, and strings, which may contain the same text. One NaN must not hide the other
 * numbers of a result.
 */
const NO_JSON = /"(?:[^"\\]|\\.)*"|-?\bInfinity\b|\bNaN\b/g;

/** @typedef {Row & {value: number}} Valued */

/**
 * Trials with a finite result, in the order of their numbers.
 *
 * @param {Iterable<Row>} rows
 * @returns {Valued[]}
 */
export function valued(rows) {
  /** @type {Valued[]} */
  const found = [];
  for (const row of rows) if (row.value !== null && Number.isFinite(row.value)) found.push(/** @type {Valued} */ (row));
  return found;
}

/**
 * Trials with a finite result that have ended: a running trial may report another final result.
 *
 * @param {Iterable<Row>} rows
 */
export function endedWithResult(rows) {
  return valued(rows).filter((row) => row.end !== null);
}

/**
 * The steps of the best-so-far curve: each trial that was better than all that ended before it.
 *
 * @param {readonly Valued[]} rows
 * @param {boolean} maximize
 */
export function bestSoFar(rows, maximize) {
  const byEnd = endedWithResult(rows).sort((a, b) => Number(a.end) - Number(b.end) || a.seq - b.seq);
  return improvements(byEnd, maximize);
}

/**
 * The trials that are better than all before them; none that violates a constraint.
 *
 * @param {readonly Valued[]} rows
 * @param {boolean} maximize
 */
export function improvements(rows, maximize) {
  /** @type {Valued[]} */
  const better = [];
  for (const row of rows) {
    if (row.infeasible) continue;
    const best = better[better.length - 1];
    if (best === undefined || (maximize ? row.value > best.value : row.value < best.value)) better.push(row);
  }
  return better;
}

/**
 * The best trials by percentage, best first; those that violate a constraint are the last.
 *
 * @param {readonly Valued[]} rows
 * @param {boolean} maximize
 * @param {number} percent above 0, at most 100
 */
export function top(rows, maximize, percent) {
  const sorted = [...rows].sort((a, b) => Number(a.infeasible ?? false) - Number(b.infeasible ?? false) || (maximize ? b.value - a.value : a.value - b.value) || a.seq - b.seq);
  return sorted.slice(0, Math.max(1, Math.ceil((sorted.length * percent) / 100)));
}

/**
 * At most `most` of the items, in order, always including the first and the last; and all that are in `kept`.
 *
 * @template Item
 * @param {readonly Item[]} items
 * @param {number} [most]
 * @param {readonly Item[]} [kept]
 * @returns {readonly Item[]}
 */
export function thinned(items, most = MOST_MARKS, kept = []) {
  if (items.length <= most) return items;
  if (kept.length > 0) {
    const drawn = new Set([...thinned(items, most), ...kept]);
    return items.filter((item) => drawn.has(item));
  }
  return Array.from({ length: most }, (_, i) => /** @type {Item} */ (items[Math.round((i * (items.length - 1)) / Math.max(1, most - 1))]));
}

/**
 * @typedef {object} Axis
 * @property {string} id  as in conditions: a parameter's name, or `value/` and a metric's
 * @property {string} name
 * @property {{at: number, label: string, word?: string}[]} ticks  positions from 0 (bottom) to 1; `word` is the value of a category
 * @property {number} bottom  the position of the lowest value; above 0 if the tick "not chosen" is below it
 * @property {(value: Simple | undefined) => number | null} place  null: the value is not on the axis
 * @property {((at: number) => number) | null} valueAt  the number at a position from `bottom` to 1; null: an axis of categories
 */

/**
 * The axis of a parameter: of numbers in the given scale, else categorical. If some values are undefined, the axis has the tick
 * "not chosen" for them. Null: only one value, or too many categories.
 *
 * @param {string} name
 * @param {readonly (Simple | undefined)[]} values
 * @param {Scale} [scale]
 * @returns {Axis | null}
 */
export function axisOf(name, values, scale = "linear") {
  const present = values.filter((value) => value !== undefined);
  const areNumbers = present.length > 0 && present.every((value) => typeof value === "number");
  const axis = areNumbers && scale !== "category" ? numericAxis(name, /** @type {number[]} */ (present), scale === "log") : categoricalAxis(name, present, areNumbers);
  return axis !== null && present.length < values.length ? withNotChosen(axis) : axis;
}

/**
 * @param {Axis} axis
 * @returns {Axis}
 */
function withNotChosen({ ticks, place, valueAt, ...same }) {
  /** @param {number} at */
  const raised = (at) => NOT_CHOSEN_SHARE + (1 - NOT_CHOSEN_SHARE) * at;
  return {
    ...same,
    bottom: NOT_CHOSEN_SHARE,
    ticks: [{ at: 0, label: "not chosen" }, ...ticks.map((tick) => ({ ...tick, at: raised(tick.at) }))],
    valueAt: valueAt && ((at) => valueAt((at - NOT_CHOSEN_SHARE) / (1 - NOT_CHOSEN_SHARE))),
    place: (value) => {
      if (value === undefined) return 0;
      const at = place(value);
      return at === null ? null : raised(at);
    },
  };
}

/**
 * @param {string} name
 * @param {readonly Simple[]} present
 * @param {boolean} areNumbers
 * @returns {Axis | null}
 */
function categoricalAxis(name, present, areNumbers) {
  const words = [...new Set(present.map(String))];
  if (areNumbers) words.sort((a, b) => Number(a) - Number(b));
  else words.sort();
  if (words.length < 2 || words.length > MOST_WORDS) return null;
  const at = new Map(words.map((word, index) => [word, index / (words.length - 1)]));
  return {
    id: name,
    name,
    bottom: 0,
    ticks: words.map((word) => ({ at: at.get(word) ?? 0, label: areNumbers ? shown(Number(word)) : word, word })),
    place: (value) => (value === undefined ? null : (at.get(String(value)) ?? null)),
    valueAt: null,
  };
}

/**
 * @param {string} name
 * @param {number[]} values
 * @param {boolean} isLog
 * @returns {Axis | null}
 */
function numericAxis(name, values, isLog) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low < high) || !Number.isFinite(high - low)) return null;
  const usesLog = isLog && low > 0;
  const scale = usesLog ? Math.log : (/** @type {number} */ value) => value;
  const back = usesLog ? Math.exp : scale;
  const from = scale(low);
  const span = scale(high) - from;
  // With three digits, all ticks between 0.9712 and 0.9714 would be 0.971, which is below the axis.
  const digits = Math.min(17, 3 + Math.max(0, Math.floor(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low)))));
  /** @param {number} at */
  const valueAt = (at) => (at <= 0 ? low : at >= 1 ? high : back(from + at * span));
  return {
    id: name,
    name,
    bottom: 0,
    ticks: [0, 0.25, 0.5, 0.75, 1].map((at) => ({ at, label: shown(at === 0 || at === 1 ? valueAt(at) : Number(valueAt(at).toPrecision(digits))) })),
    place: (value) => (typeof value === "number" ? (scale(value) - from) / span : null),
    valueAt,
  };
}

/**
 * @typedef {object} Line  the line of a trial
 * @property {Valued} row
 * @property {(number | null)[]} heights  its places on the axes, from 0 to 1; null: it has none
 * @property {number} shade  from 0, for the lowest default metrics, to SHADES - 1
 */

/**
 * Parallel coordinates: one line per trial, through its parameters to its result.
 *
 * @param {readonly Valued[]} ranked  the trials among which each line has its shade
 * @param {readonly Valued[]} all  the trials that define the ranges of the axes
 * @param {readonly string[]} names
 * @param {ReadonlyMap<string, Scale>} [scales]
 * @param {string} [metric]  the name of the metric on the last axis; the default one gives each line its shade
 * @param {readonly string[]} [order]  ids of axes that the reader has put in order; others follow
 * @param {string} [result]  the name of the default metric
 * @returns {{axes: Axis[], lineOf: (row: Valued) => Line}}
 */
export function parallel(ranked, all, names, scales = new Map(), metric = "", order = [], result = "default metric") {
  /** @param {Valued} row */
  const resultOf = (row) => (metric === "" ? row.value : row.metrics?.[metric]);
  const axes = names
    .map((name) => axisOf(name, all.map((row) => flat(row.parameters).get(name)), scales.get(name)))
    .filter((axis) => axis !== null);
  const found = axisOf(metric || result, all.map(resultOf).filter((value) => value !== undefined));
  const last = found && { ...found, id: METRIC_PREFIX + metric };
  if (last !== null) axes.push(last);
  const rankOf = new Map(order.map((id, index) => [id, index]));
  axes.sort((a, b) => (rankOf.get(a.id) ?? order.length) - (rankOf.get(b.id) ?? order.length));
  const values = ranked.map((row) => row.value).sort((a, b) => a - b);
  return {
    axes,
    lineOf: (row) => {
      const parameters = flat(row.parameters);
      return {
        row,
        heights: axes.map((axis) => axis.place(axis === last ? resultOf(row) : parameters.get(axis.name))),
        shade: Math.min(SHADES - 1, Math.floor((rank(values, row.value) / values.length) * SHADES)),
      };
    },
  };
}

/**
 * The line nearest to a point, at most `slack` pixels away.
 *
 * @param {readonly Line[]} lines
 * @param {{x: number, y: number}} point  in pixels, right of the first axis and above the lower ends of the axes
 * @param {{gap: number, height: number, slack: number}} size  `gap` is the distance of two axes; in pixels
 * @returns {Line | null}
 */
export function nearestLine(lines, { x, y }, { gap, height, slack }) {
  let least = slack;
  let nearest = null;
  for (const line of lines) {
    const left = Math.max(0, Math.min(line.heights.length - 2, Math.floor(x / gap)));
    const from = line.heights[left] ?? null;
    const to = line.heights[left + 1] ?? null;
    if (from === null || to === null) continue;
    const slope = ((to - from) * height) / gap;
    const distance = Math.abs(from * height + slope * (x - left * gap) - y) / Math.hypot(1, slope);
    if (distance <= least) {
      least = distance;
      nearest = line;
    }
  }
  return nearest;
}

/**
 * The number of sorted values below `value`.
 *
 * @param {readonly number[]} sorted
 * @param {number} value
 */
function rank(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (/** @type {number} */ (sorted[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The number of a reported metric under a name: an entry of a dict, or the metric itself for "default". Null: none.
 *
 * @param {string} data JSON text, or JSON text inside JSON, as in the API
 * @param {string} name
 */
export function metricIn(data, name) {
  const metric = read(data);
  const given = isDict(metric) ? metric[name] : name === "default" ? metric : null;
  const value = typeof given === "boolean" ? Number(given) : given;
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/**
 * The names of the numbers in a reported metric, including NaN.
 *
 * @param {string} data
 */
export function metricNames(data) {
  const metric = read(data);
  if (!isDict(metric)) return ["default"];
  return Object.keys(metric).filter((name) => ["number", "boolean"].includes(typeof metric[name]) || metric[name] === null);
}

/**
 * The names of the numbers in a final result that are shown beside the trial's value.
 *
 * @param {string} data
 * @param {readonly {metric: string}[]} objectives  the first one's number is the trial's value
 */
export function otherMetricNames(data, objectives) {
  const first = objectives[0]?.metric ?? "default";
  return metricNames(data).filter((name) => name !== first);
}

/**
 * The points of a learning curve: the number of each report, from 1, with its number under a name.
 *
 * @param {readonly Metric[]} metrics
 * @param {string} name
 */
export function learningCurve(metrics, name) {
  return metrics.map((metric, index) => ({ x: (metric.place ?? index) + 1, y: metricIn(metric.data, name) })).filter(({ y }) => y !== null);
}

/**
 * The number of reports of a trial. The HTML report of an experiment may have fewer records, but always has the last one.
 *
 * @param {readonly Metric[]} metrics
 */
export function reportCount(metrics) {
  return (metrics.at(-1)?.place ?? metrics.length - 1) + 1;
}

/**
 * @param {unknown} value
 * @returns {value is {[name: string]: unknown}}
 */
function isDict(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * A metric from JSON text, or from JSON text inside JSON: the API has both.
 *
 * @param {string} data
 * @returns {unknown}
 */
function read(data) {
  try {
    const metric = parsed(data);
    return typeof metric === "string" ? parsed(metric) : metric;
  } catch {
    return null; // not JSON
  }
}

/**
 * @param {string} text
 * @returns {unknown}
 */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return JSON.parse(text.replace(NO_JSON, (word) => (word.startsWith('"') ? word : "null")));
  }
}
