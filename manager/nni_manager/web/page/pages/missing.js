/** An address that is no page. */

import { h, link } from "../dom.js";
import { card } from "../widgets/facts.js";

/** @import { Page } from "./page.js" */

/** @returns {Page} */
export function missing() {
  return {
    title: "No such page",
    element: h("div", { class: "page narrow", "data-test": "missing" },
      card("There is no such page", {}, h("p", {}, "Check the address, or go to the ", link("/oview", {}, "overview of the experiment"), "."))),
    close() {},
  };
}
