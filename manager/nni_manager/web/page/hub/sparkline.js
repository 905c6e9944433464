/** A small line of the best result so far, without axes. */

import { setAttribute } from "../dom.js";

/** @import { Point } from "./api.js" */

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 96;
const HEIGHT = 24;
const MARGIN = 2;

/**
 * The corners of a line that steps at each improvement and goes on to the last result.
 *
 * @param {readonly Point[]} points
 * @param {number} results  the number of all results
 * @returns {string}
 */
export function pathOf(points, results) {
  const values = points.map(([, , value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (/** @type {number} */ count) => MARGIN + ((count - 1) / Math.max(results - 1, 1)) * (WIDTH - 2 * MARGIN);
  const y = (/** @type {number} */ value) => (high === low ? HEIGHT / 2 : HEIGHT - MARGIN - ((value - low) / (high - low)) * (HEIGHT - 2 * MARGIN));
  const steps = points.map(([count, , value], index) => (index === 0 ? `M${x(count).toFixed(1)} ${y(value).toFixed(1)}` : `H${x(count).toFixed(1)}V${y(value).toFixed(1)}`));
  return `${steps.join("")}H${x(results).toFixed(1)}`;
}

/**
 * @param {readonly Point[]} points
 * @param {number} results
 * @param {string} words  a description, for those who do not see it
 */
export function sparkline(points, results, words) {
  const svg = document.createElementNS(NAMESPACE, "svg");
  const attributes = { class: "sparkline", width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words };
  for (const [name, value] of Object.entries(attributes)) setAttribute(svg, name, value);
  const path = document.createElementNS(NAMESPACE, "path");
  setAttribute(path, "d", pathOf(points, Math.max(results, points[points.length - 1]?.[0] ?? 1)));
  svg.append(path);
  return svg;
}
