/** The scale of a parameter's axis: it follows the type in the search space, never the values that trials happened to have. */

/** @typedef {"linear" | "log" | "category"} Scale */

const LOGARITHMIC = ["loguniform", "qloguniform", "lognormal", "qlognormal"];
const MAX_DEPTH = 8;
/** At most this number of ticks at powers of ten. */
const MOST_POWERS = 6;
/** Up to this number of decades, the ticks of a logarithmic axis are 1, 2 and 5; above it, powers of ten. */
const MOST_DECADES = 3;
/** Below this number of decades, 1, 2 and 5 would give too few ticks. */
const FEW_DECADES = 0.8;
/** Number of equal steps in a narrow range, about: a step may be 0.7 to 1.75 times as long. */
const LINEAR_STEPS = 3.5;
const SHORTEST_STEP = 0.7;

/**
 * The scale of each parameter, with the names of `flat`. Parameters of other forms have none.
 *
 * @param {unknown} space a search space of NNI
 * @returns {Map<string, Scale>}
 */
export function scalesOf(space) {
  /** @type {Map<string, Scale>} */
  const scales = new Map();
  add(scales, "", space, 0);
  return scales;
}

/**
 * @param {Map<string, Scale>} scales
 * @param {string} prefix
 * @param {unknown} space
 * @param {number} depth
 */
function add(scales, prefix, space, depth) {
  if (typeof space !== "object" || space === null || Array.isArray(space) || depth > MAX_DEPTH) return;
  for (const [name, spec] of Object.entries(space)) {
    if (typeof spec !== "object" || spec === null) continue;
    const path = `${prefix}${name}`;
    const { _type: type, _value: value } = spec;
    if (typeof type !== "string") continue;
    scales.set(path, type === "choice" ? "category" : LOGARITHMIC.includes(type) ? "log" : "linear");
    // Each option of a nested choice has parameters of its own.
    if (Array.isArray(value)) for (const option of value) add(scales, `${path}/`, option, depth + 1);
  }
}

/**
 * The distance of the ticks of a logarithmic axis, as plotly's `dtick`: powers of ten, 1, 2 and 5 in each, or in a narrow range
 * equal steps.
 *
 * @param {number} low above 0
 * @param {number} high
 * @returns {number | string}
 */
export function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades > MOST_DECADES) return Math.ceil(decades / MOST_POWERS);
  if (decades >= FEW_DECADES || decades <= 0) return "D2";
  const least = ((high - low) / LINEAR_STEPS) * SHORTEST_STEP;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= least) ?? 10;
  return `L${Number((step * power).toPrecision(1))}`;
}
