/** `/enter#CODE`: exchanges the code that nnictl printed for a session. The code is removed from the address first. */

import { BASE, LOGIN_COMMAND } from "../base.js";
import { fill, h } from "../dom.js";
import { Refused, session } from "../state/requests.js";
import { prose } from "../widgets/facts.js";

/** @import { Context, Page } from "./page.js" */

/**
 * @param {Context} context
 * @returns {Page}
 */
export function enter({ live, go }) {
  const code = location.hash.slice(1);
  history.replaceState(null, "", `${BASE}/enter`);
  const message = h("div", { "data-test": "enter-message", role: "status" }, h("p", {}, "Logging in…"));
  const element = h("div", { class: "page narrow" }, h("section", { class: "card" }, h("h2", {}, "Welcome"), message));

  /** @param {string} text */
  function refuse(text) {
    fill(message, h("p", { class: "bad-text" }, prose(text)),
      h("p", {}, "Run ", h("code", {}, LOGIN_COMMAND), " where the experiment was created, and open the link that it prints. Each link lets in once, for ten minutes."));
  }

  async function come() {
    try {
      await session.enter(code);
      live.start();
      go("/oview");
    } catch (error) {
      if (error instanceof Refused) refuse(error.message);
      else {
        fill(message, h("p", { class: "bad-text" }, "The manager does not answer."), h("button", { type: "button", class: "primary", click: come }, "Try again"));
      }
    }
  }
  if (code === "") refuse("This link has no code in it.");
  else void come();
  return { title: "Enter", element, close: () => undefined };
}
