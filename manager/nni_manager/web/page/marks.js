/**
 * Marked parts of the axes of parallel coordinates. A mark consists of values, not of positions, so that it keeps its meaning
 * while results extend the axis, and as a filter of the table.
 */

import { number } from "./format.js";
import { METRIC_PREFIX } from "./metrics.js";
import { short } from "./plain.js";

/** @import { Simple } from "./parameters.js" */
/** @import { Axis } from "./series.js" */

/**
 * @typedef {object} Mark  a range of numbers, or some categories
 * @property {string} name  of a parameter, or `value/` and the name of a metric
 * @property {number} low
 * @property {number} high  below `low`: no number is marked
 * @property {readonly string[]} words  the categories
 * @property {boolean} notChosen  trials without the parameter are marked as well
 */

/** Number of steps with which keys move an end along an axis of numbers. */
const STEPS = 20;
/** The precision of an end, as a part of the axis: finer than a pixel. */
const FINEST = 1 / 1000;
const EXACT = 1e-9;

/**
 * The mark between two positions of an axis. Of categories, those are marked that are nearest to the ends, and all between.
 *
 * @param {Axis} axis
 * @param {number} one from 0 to 1
 * @param {number} other
 * @returns {Mark}
 */
export function markOf(axis, one, other) {
  const from = Math.max(0, Math.min(one, other));
  const to = Math.min(1, Math.max(one, other));
  const hasNotChosen = axis.bottom > 0;
  if (axis.valueAt === null) {
    const [low, high] = [nearestTick(axis, from), nearestTick(axis, to)];
    const marked = axis.ticks.slice(low, high + 1);
    return { name: axis.id, low: 0, high: -1, words: marked.flatMap(({ word }) => (word === undefined ? [] : [word])), notChosen: hasNotChosen && low === 0 };
  }
  const notChosen = hasNotChosen && from < axis.bottom / 2;
  if (to < axis.bottom) return { name: axis.id, low: 0, high: -1, words: [], notChosen: hasNotChosen };
  return { name: axis.id, low: rounded(axis.valueAt, Math.max(from, axis.bottom), axis.bottom), high: rounded(axis.valueAt, to, axis.bottom), words: [], notChosen };
}

/**
 * @param {Axis} axis
 * @param {number} at
 */
function nearestTick({ ticks }, at) {
  let nearest = 0;
  ticks.forEach((tick, index) => {
    if (Math.abs(tick.at - at) < Math.abs((ticks[nearest]?.at ?? 0) - at)) nearest = index;
  });
  return nearest;
}

/**
 * The number at a position, with as few digits as show it. The ends of the axis stay exact, so that they hold the outermost trials.
 *
 * @param {(at: number) => number} valueAt
 * @param {number} at
 * @param {number} bottom
 */
function rounded(valueAt, at, bottom) {
  const value = valueAt(at);
  if (at <= bottom || at >= 1 || value === 0) return value;
  const step = Math.abs(valueAt(Math.min(1, at + FINEST)) - value) || Math.abs(value);
  return Number(value.toPrecision(Math.max(1, Math.min(15, Math.ceil(Math.log10(Math.abs(value) / step)) + 1))));
}

/**
 * True if a trial with this value is marked.
 *
 * @param {Mark} mark
 * @param {Simple | undefined} value
 */
export function isMarked({ low, high, words, notChosen }, value) {
  if (value === undefined) return notChosen;
  return (typeof value === "number" && low <= value && value <= high) || words.includes(String(value));
}

/**
 * The lower and the upper end of a mark on its axis; null: nothing of it is there.
 *
 * @param {Axis} axis
 * @param {Mark} mark
 * @returns {[number, number] | null}
 */
export function spanOf(axis, mark) {
  const marked = axis.valueAt === null ? axis.ticks.filter(({ word }) => word !== undefined && mark.words.includes(word)).map(({ at }) => at) : [];
  if (axis.valueAt !== null && mark.low <= mark.high) {
    for (const end of [mark.low, mark.high]) {
      const at = axis.place(end) ?? NaN; // a logarithmic axis has no place for 0
      marked.push(Math.max(axis.bottom, Math.min(1, Number.isNaN(at) ? axis.bottom : at)));
    }
  }
  if (mark.notChosen && axis.bottom > 0) marked.push(0);
  return marked.length === 0 ? null : [Math.min(...marked), Math.max(...marked)];
}

/**
 * A mark with one end moved by a step, as a key does it. Null: the whole axis, which needs no mark.
 *
 * @param {Axis} axis
 * @param {Mark | undefined} mark  undefined: the whole axis
 * @param {"low" | "high"} end
 * @param {1 | -1} direction  up or down
 * @returns {Mark | null}
 */
export function moved(axis, mark, end, direction) {
  const stops = axis.valueAt === null ? axis.ticks.map(({ at }) => at) : [
    ...(axis.bottom > 0 ? [0] : []),
    ...Array.from({ length: STEPS + 1 }, (_, step) => axis.bottom + ((1 - axis.bottom) * step) / STEPS),
  ];
  const span = (mark && spanOf(axis, mark)) ?? [0, 1];
  const at = span[end === "low" ? 0 : 1];
  // An end that a drag left between two stops goes to the next one; rounding is no step.
  const next = (direction > 0 ? stops.find((stop) => stop > at + FINEST) : stops.findLast((stop) => stop < at - FINEST)) ?? at;
  const [from, to] = end === "low" ? [Math.min(next, span[1]), span[1]] : [span[0], Math.max(next, span[0])];
  return from <= EXACT && to >= 1 - EXACT ? null : markOf(axis, from, to);
}

/**
 * The display text of a mark: "lr 0.01 to 0.1", "optimizer adam, not chosen".
 *
 * @param {Mark} mark
 * @param {string} [result]  the name of a trial's result
 */
export function markText(mark, result = "default metric") {
  const name = mark.name === METRIC_PREFIX ? result : short(mark.name, 40);
  return `${name} ${markedText(mark)}`;
}

/**
 * The values of a mark, for people.
 *
 * @param {Mark} mark
 */
export function markedText({ low, high, words, notChosen }) {
  const numbers = low === -Infinity && high === Infinity ? ["any number"] : low <= high ? [`${number(low)} to ${number(high)}`] : [];
  return [...numbers, ...(words.length > 0 ? [short(words.join(", "), 60)] : []), ...(notChosen ? ["not chosen"] : [])].join(", ");
}
