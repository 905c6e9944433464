/** `/experiment`: all experiments of this user, running and terminal. */

import { fill, h, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { plain, short } from "../plain.js";
import { hasTag, TAG } from "../query.js";
import { api } from "../state/api.js";
import { copy } from "../widgets/dialog.js";
import { card, experimentBadge, time } from "../widgets/facts.js";
import { tagList } from "../widgets/remarks.js";
import { listPage } from "./list_page.js";

/** @import { KnownExperiment } from "../types.js" */
/** @import { Context, Page } from "./page.js" */

const NUMBERS = ["Best", "Trials"];

/**
 * @param {Context} _
 * @returns {Page}
 */
export function experiments(_) {
  let shown = "all";
  let text = "";
  /** @type {KnownExperiment[]} */
  let known = [];
  const body = h("tbody");
  const note = h("p", { class: "empty" });
  const search = h("input", { type: "search", "aria-label": "Search experiments", placeholder: "Search id, name, tag:baseline", input: () => {
    text = search.value.toLowerCase();
    draw();
  } });
  const which = h("select", { "aria-label": "Which experiments", change: () => {
    shown = which.value;
    draw();
  } }, h("option", { value: "all" }, "All"), h("option", { value: "served" }, "With a page"), h("option", { value: "ended" }, "Not running"));
  const titles = ["Id", "Name", "Tags", "State", "Best", "Trials", "Platform", "Started", "Ended", "How to open"];
  const box = card("Experiments", {}, h("div", { class: "bar" }, search, which),
    h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Table of experiments" },
      h("table", { class: "plain lines experiments", "data-test": "experiments" }, h("caption", { class: "unseen" }, "Experiments"),
        h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col", class: NUMBERS.includes(title) ? "number" : null }, title)))), body)), note);

  const drawLines = whenChanged((/** @type {KnownExperiment[]} */ found) => fill(body, found.map(line)));

  function draw() {
    const found = known
      .filter((each) => shown === "all" || (shown === "served") === isServed(each))
      .filter(matches(text))
      .sort((a, b) => (b.startTime ?? 0) - (a.startTime ?? 0));
    // A redraw loses the focus and the selection.
    drawLines(found);
    fill(note, found.length === 0 ? (known.length === 0 ? "There is no experiment yet." : "No experiment matches.") : null);
  }
  return listPage("Experiments", box, async () => {
    known = await api.experiments();
    draw();
  });
}

/**
 * True for the experiments with every `tag:` of the search, and with the rest of the text in them.
 *
 * @param {string} text  in lower case
 * @returns {(each: KnownExperiment) => boolean}
 */
export function matches(text) {
  const words = text.split(/\s+/).filter(Boolean);
  const tags = words.filter((word) => word.startsWith(TAG)).map((word) => word.slice(TAG.length));
  const rest = words.filter((word) => !word.startsWith(TAG)).join(" ");
  return (each) => tags.every((tag) => hasTag(each, tag))
    && [each.id, each.experimentName ?? "", each.platform ?? "", each.status, each.note ?? "", ...(each.tags ?? [])].join(" ").toLowerCase().includes(rest);
}

/** @param {KnownExperiment} each */
function isServed(each) {
  return Boolean(each.here || each.url || each.port || each.viewPort);
}

/** @param {KnownExperiment} each */
function line(each) {
  return h("tr", { class: each.here ? "chosen" : null },
    h("td", {}, h("code", {}, plain(each.id))),
    h("td", { class: "named" }, short(each.experimentName ?? "", 80), each.problem ? h("p", { class: "bad-text" }, short(each.problem, 300)) : null),
    h("td", { class: "tags" }, tagList(each.tags ?? [])),
    h("td", {}, experimentBadge(format.listedOutcome(each))),
    h("td", { class: "number", "data-title": "Best" }, each.frontCount ? `front of ${format.count(each.frontCount)}` : format.number(each.bestValue ?? null)),
    h("td", { class: "number", "data-title": "Trials" }, trialsOf(each)),
    h("td", {}, plain(each.platform ?? "")),
    h("td", { "data-title": "Started" }, time(each.startTime) ?? format.NOTHING),
    h("td", { "data-title": "Ended" }, time(each.endTime) ?? format.NOTHING),
    h("td", { class: "last" }, howToOpen(each)));
}

/**
 * The number of trials, and how many of them failed.
 *
 * @param {KnownExperiment} each
 */
export function trialsOf({ trialCount = 0, failedCount = 0 }) {
  return failedCount > 0 ? `${format.count(trialCount)}, ${format.count(failedCount)} failed` : format.count(trialCount);
}

/** @param {KnownExperiment} each */
function howToOpen(each) {
  if (each.here) return "this page";
  // Each experiment's page requires its own link, which only its owner's nnictl can create.
  return isServed(each) ? command(`nnictl webui url ${each.id}`, "prints the link to its page") : command(`nnictl view ${each.id}`, "serves it read-only");
}

/**
 * @param {string} text
 * @param {string} does
 */
function command(text, does) {
  const safe = plain(text);
  return h("span", { class: "command" }, h("code", {}, safe), h("button", { type: "button", class: "small", "aria-label": `Copy: ${safe}`, click: () => copy(safe, "The command is on the clipboard.") }, "Copy"), h("small", { class: "muted" }, does));
}
