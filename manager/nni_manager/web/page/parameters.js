/** Parameters of trials. Nested choices are flattened, so that each has a column, a filter and an axis. */

import { number } from "./format.js";
import { plain } from "./plain.js";

/** @import { Parameters } from "./types.js" */

/** @typedef {string | number | boolean | null} Simple */

/** @type {WeakMap<Parameters, Map<string, Simple>>} */
const known = new WeakMap();

/**
 * The scalar values in parameters, by name. In a nested choice the selected kind (`_name`) is the value of the parameter, and
 * its sub-parameters are named `parameter/part`. Lists are values, in JSON.
 *
 * @param {Parameters} parameters
 * @returns {Map<string, Simple>}
 */
export function flat(parameters) {
  let values = known.get(parameters);
  if (values === undefined) {
    values = new Map();
    lay(values, "", parameters, 0);
    known.set(parameters, values);
  }
  return values;
}

/**
 * @param {Map<string, Simple>} values
 * @param {string} prefix
 * @param {unknown} value
 * @param {number} depth
 */
function lay(values, prefix, value, depth) {
  if (value === null || typeof value === "string" || typeof value === "number" || typeof value === "boolean") {
    values.set(prefix, value);
  } else if (typeof value === "object" && !Array.isArray(value) && depth < 8) {
    for (const [name, entry] of Object.entries(/** @type {Parameters} */ (value))) {
      const path = name === "_name" && prefix ? prefix : prefix ? `${prefix}/${name}` : name;
      lay(values, path, entry, depth + 1);
    }
  } else {
    values.set(prefix, JSON.stringify(value) ?? "");
  }
}

/**
 * The name in `flat` of a parameter's path in the manager's answers: the kind in a nested choice is `net/_name` there.
 *
 * @param {string} path
 */
export function flatName(path) {
  return path.replace(/(?<=.)\/_name$/, "");
}

/** @param {Parameters} parameters */
function isFlat(parameters) {
  for (const name in parameters) {
    const value = parameters[name];
    if (typeof value === "object" && value !== null) return false;
  }
  return true;
}

/**
 * The display text of a value.
 *
 * @param {Simple | undefined} value undefined: the trial has no such parameter
 */
export function shown(value) {
  if (value === undefined) return "";
  if (typeof value === "number") return number(value);
  return value === null ? "null" : plain(String(value));
}

/**
 * All parameter names of trials, in order of first occurrence.
 *
 * @param {Iterable<{parameters: Parameters}>} rows
 * @param {number} [most] maximum number of names
 */
export function namesOf(rows, most = 200) {
  /** @type {Set<string>} */
  const names = new Set();
  for (const row of rows) {
    // Already flat parameters are not copied here, only when they are shown.
    for (const name of isFlat(row.parameters) ? Object.keys(row.parameters) : flat(row.parameters).keys()) {
      if (names.size < most) names.add(name);
    }
  }
  return [...names];
}

/**
 * Parameters on one line: "lr 0.1, net deep".
 *
 * @param {Parameters} parameters
 */
export function oneLine(parameters) {
  return [...flat(parameters)].map(([name, value]) => `${plain(name)} ${shown(value)}`).join(", ");
}

/**
 * Parse the value that a person typed for a parameter: as JSON if it is valid JSON, else as a string.
 *
 * @param {string} text
 * @returns {unknown}
 */
export function typed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/**
 * The text that `typed` parses into this value.
 *
 * @param {unknown} value
 */
export function asTyped(value) {
  return typeof value === "string" && typed(value) === value ? value : (JSON.stringify(value) ?? "");
}
