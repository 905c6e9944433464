/** A page that polls a list every few seconds, since no event stream covers it. */

import { h, say } from "../dom.js";

/** @import { Page } from "./page.js" */

const LOOK_EVERY_MS = 5000;

/**
 * @param {string} title
 * @param {HTMLElement | HTMLElement[]} content
 * @param {() => Promise<void>} load  requests and draws the list
 * @returns {Page}
 */
export function listPage(title, content, load) {
  const trouble = h("p", { class: "bad-text", role: "status" });
  /** @type {number | undefined} */
  let timer;
  let isGone = false;

  async function look() {
    if (!document.hidden) {
      try {
        await load();
        say(trouble, "");
      } catch (error) {
        say(trouble, `Could not be loaded: ${error instanceof Error ? error.message : error}`);
      }
    }
    if (!isGone) timer = window.setTimeout(look, LOOK_EVERY_MS);
  }
  void look();
  return {
    title,
    element: h("div", { class: "page" }, trouble, content),
    close() {
      isGone = true;
      clearTimeout(timer);
    },
  };
}
