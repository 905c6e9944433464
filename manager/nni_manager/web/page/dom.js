/**
 * DOM elements. All text becomes text nodes, so content from trials, parameters and logs is never parsed as HTML.
 *
 * @typedef {Node | string | number | null | undefined | false} Child
 * @typedef {{[name: string]: string | number | boolean | null | undefined | ((event: any) => void)}} Properties
 */

import { addressOf } from "./base.js";

/**
 * Create an element. A function property becomes a listener of the event of that name; every other property becomes an
 * attribute. true is an attribute without a value; null, undefined and false are omitted.
 *
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Properties} [properties]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[Name]}
 */
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else setAttribute(element, key, value);
  }
  append(element, children);
  return element;
}

/**
 * @param {Element} element
 * @param {string} name
 * @param {string | number | boolean | null | undefined} value
 */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/**
 * @param {Element} parent
 * @param {(Child | Child[])[]} children
 */
export function append(parent, children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      parent.append(child instanceof Node ? child : String(child));
    }
  }
}

/**
 * Replace all children.
 *
 * @param {Element} parent
 * @param {...(Child | Child[])} children
 */
export function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/**
 * Set an element's text if it differs. Unchanged text is not announced and keeps its selection.
 *
 * @param {Element} element
 * @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Wrap `build` so that it runs only when its value has changed.
 *
 * @template Value
 * @param {(value: Value) => void} build
 * @returns {(value: Value) => void}
 */
export function whenChanged(build) {
  /** @type {string | undefined} */
  let shown;
  return (value) => {
    const key = JSON.stringify(value) ?? "";
    if (key === shown) return;
    shown = key;
    build(value);
  };
}

/**
 * A link within the page, which the router follows without a reload.
 *
 * @param {string} href  without the base
 * @param {Properties} properties
 * @param {...(Child | Child[])} children
 */
export function link(href, properties, ...children) {
  return h("a", { href: addressOf(href), ...properties }, ...children);
}
