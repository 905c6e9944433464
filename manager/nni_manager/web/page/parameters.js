/** Parameters of trials: nested choices are laid flat, so that each has a column, a filter and an axis. */

import { number } from "./format.js";
import { plain } from "./plain.js";

/** @import { Parameters } from "./types.js" */

/** @typedef {string | number | boolean | null} Simple */

/** @type {WeakMap<Parameters, Map<string, Simple>>} */
const known = new WeakMap();

/**
 * The simple values in parameters, by name. In a choice between kinds of a thing, the kind (`_name`) is the thing's value,
 * and what belongs to it is named `thing/part`. Lists are values, written as JSON.
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

/** @param {Parameters} parameters */
function isFlat(parameters) {
  for (const name in parameters) {
    const value = parameters[name];
    if (typeof value === "object" && value !== null) return false;
  }
  return true;
}

/**
 * A value as it is shown.
 *
 * @param {Simple | undefined} value undefined: this trial has no such parameter
 */
export function shown(value) {
  if (value === undefined) return "";
  if (typeof value === "number") return number(value);
  return value === null ? "null" : plain(String(value));
}

/**
 * All names that trials have, in the order in which they are first met.
 *
 * @param {Iterable<{parameters: Parameters}>} rows
 * @param {number} [most] names
 */
export function namesOf(rows, most = 200) {
  /** @type {Set<string>} */
  const names = new Set();
  for (const row of rows) {
    // What is not laid flat for a look at its names is laid flat when it is shown, if it ever is.
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
 * The value that a person typed for a parameter: JSON where it is JSON, and a string where it is not.
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
 * The text that `typed` reads as this value.
 *
 * @param {unknown} value
 */
export function asTyped(value) {
  return typeof value === "string" && typed(value) === value ? value : (JSON.stringify(value) ?? "");
}
