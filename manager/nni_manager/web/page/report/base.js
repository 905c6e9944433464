/** As ../base.js, in a report: a page is a fragment of the file's address, such as `#/detail#trial=ab`. */

import { textOf } from "./embedded.js";

export const BASE = "";

/** @param {string} to */
export function addressOf(to) {
  return `#${to}`;
}

/** @param {{hash: string}} address @returns {string | null} */
export function pageOf({ hash }) {
  return hash.startsWith("#/") ? hash.slice(1) : "/oview";
}

/** @returns {Promise<string>} */
export async function chartLibrary() {
  return URL.createObjectURL(new Blob([await textOf("charts")], { type: "text/javascript" }));
}
