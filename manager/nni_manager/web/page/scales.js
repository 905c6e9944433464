/** The scale of a parameter's axis: it follows the type in the search space, never the values that trials happened to have. */

/** @typedef {"linear" | "log" | "category"} Scale */

const LOGARITHMIC = ["loguniform", "qloguniform", "lognormal", "qlognormal"];
const MAX_DEPTH = 8;

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
