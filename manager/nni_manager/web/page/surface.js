/** A surface through the results of trials over two parameters: between them, the average of the trials near by. */

import { axisOf } from "./series.js";

/** @import { Axis } from "./series.js" */
/** @import { Scale } from "./scales.js" */
/** @import { Simple } from "./parameters.js" */

/** Minimum number of trials for a surface; fewer leave most of it to chance. */
export const LEAST_TRIALS = 10;
/** Number of steps of the grid along an axis of numbers. */
const STEPS = 40;
/** As far as this from a trial, as a part of the axes, its own result counts half. It keeps noise from making a peak of each trial. */
const NEAR = 0.04;
/** A place is left blank if no trial is within this part of the axes, or so many times the mean distance of trials. */
const REACH = 0.1;
const REACH_PER_DISTANCE = 1.5;
/** Results farther than this many times the middle half's width from it count as outliers. */
const FENCE = 3;
const EXACT = 1e-9;

/** @typedef {{x: Simple, y: Simple, value: number}} Sample  a trial: its two parameters and its result */

/**
 * @typedef {object} Surface
 * @property {Axis} x
 * @property {Axis} y
 * @property {(number | string)[]} xs  the columns: numbers, or the categories
 * @property {(number | string)[]} ys  the rows
 * @property {(number | null)[][]} values  row by row; null: no trial is near
 * @property {[number, number]} range  the least and the greatest result that is no outlier
 */

/**
 * The surface through at least one sample. Along categories nothing is averaged, since they have no distance.
 *
 * @param {readonly Sample[]} samples
 * @param {{name: string, scale: Scale | undefined}} x
 * @param {{name: string, scale: Scale | undefined}} y
 * @returns {Surface | string} the name of the parameter that has no axis
 */
export function surface(samples, x, y) {
  const across = axisOf(x.name, samples.map((sample) => sample.x), x.scale);
  const up = axisOf(y.name, samples.map((sample) => sample.y), y.scale);
  if (across === null) return x.name;
  if (up === null) return y.name;
  const range = withoutOutliers(samples.map(({ value }) => value));
  const points = samples.map((sample) => ({ x: across.place(sample.x) ?? 0, y: up.place(sample.y) ?? 0, value: Math.max(range[0], Math.min(range[1], sample.value)) }));
  const reach = Math.max(REACH, REACH_PER_DISTANCE / Math.sqrt(points.length));
  const columns = stops(across);
  const rows = stops(up);
  return {
    x: across,
    y: up,
    xs: columns.map(({ value }) => value),
    ys: rows.map(({ value }) => value),
    values: rows.map((row) => {
      const inRow = up.valueAt === null ? points.filter((point) => Math.abs(point.y - row.at) < EXACT) : points;
      return columns.map((column) => valueNear(across.valueAt === null ? inRow.filter((point) => Math.abs(point.x - column.at) < EXACT) : inRow, column.at, row.at, reach));
    }),
    range,
  };
}

/**
 * The grid along an axis.
 *
 * @param {Axis} axis
 * @returns {{at: number, value: number | string}[]}
 */
function stops({ ticks, valueAt }) {
  if (valueAt === null) return ticks.map(({ at, label, word }) => ({ at, value: word ?? label }));
  return Array.from({ length: STEPS + 1 }, (_, step) => ({ at: step / STEPS, value: valueAt(step / STEPS) }));
}

/**
 * The average of the points, weighted by the inverse of their distance to the fourth power.
 *
 * @param {readonly {x: number, y: number, value: number}[]} points
 * @param {number} x
 * @param {number} y
 * @param {number} reach
 */
function valueNear(points, x, y, reach) {
  let nearest = Infinity;
  let weights = 0;
  let sum = 0;
  for (const point of points) {
    const square = (point.x - x) ** 2 + (point.y - y) ** 2;
    if (square < nearest) nearest = square;
    const weight = 1 / (square + NEAR * NEAR) ** 2;
    weights += weight;
    sum += weight * point.value;
  }
  return nearest <= reach * reach ? sum / weights : null;
}

/**
 * The range of values without those that are far off, such as the losses of trials that diverged.
 *
 * @param {readonly number[]} values
 * @returns {[number, number]}
 */
function withoutOutliers(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (/** @type {number} */ share) => sorted[Math.floor(share * (sorted.length - 1))] ?? 0;
  const width = FENCE * (at(0.75) - at(0.25));
  const inside = width > 0 ? sorted.filter((value) => value >= at(0.25) - width && value <= at(0.75) + width) : sorted;
  return [inside[0] ?? 0, inside[inside.length - 1] ?? 0];
}

/**
 * The two parameters to show first: the most important ones, or if the importance is not known numbers before choices.
 *
 * @param {readonly string[]} names  of all parameters
 * @param {ReadonlyMap<string, Scale>} scales
 * @param {readonly string[]} important  names by importance
 * @returns {[string, string]} empty texts if there are no two
 */
export function twoParameters(names, scales, important) {
  const known = important.filter((name) => names.includes(name));
  const isChoice = (/** @type {string} */ name) => scales.get(name) === "category";
  const [first = "", second = ""] = new Set([...known, ...names.filter((name) => !isChoice(name)), ...names]);
  return [first, second];
}
