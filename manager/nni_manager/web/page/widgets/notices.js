/** Notices: the connection, a read-only view, and every current problem. Each can be dismissed, until it occurs again. */

import { fill, h } from "../dom.js";
import * as format from "../format.js";
import { plain, short } from "../plain.js";
import { report } from "../state/api.js";
import { Dismissals, keyOf } from "../state/dismissals.js";
import { prose } from "./facts.js";

/** @import { Live } from "../state/live.js" */
/** @import { Summary } from "../types.js" */

/** @typedef {{kind: "connection" | "readonly" | "problem", key: string, title: string, text: string}} Notice */

/** A cluster may take this long to start the first container before the page shows a warning. */
const NO_KEEPER_AFTER_S = 60;

/**
 * Every current notice.
 *
 * @param {Live} live
 * @returns {Notice[]}
 */
function noticesOf(live) {
  /** @type {Notice[]} */
  const found = [];
  /** @type {(kind: Notice["kind"], title: string, text: string, key?: string) => void} */
  const note = (kind, title, text, key = keyOf(title, text)) => void found.push({ kind, key, title, text });
  const { summary } = live;
  if (live.connection === "silent" && live.heardAtMs !== 0) {
    note("connection", "Not connected",
      `The manager has not answered since ${format.clock(live.heardAtMs)}; this page shows the data of that time. Trials continue. This page reconnects automatically; if the manager died, \`nnictl resume\` starts another.`,
      `Not connected\n${live.heardAtMs}`);
  }
  if (summary === null) return found; // before the first response
  if (summary.readOnly && report === null) note("readonly", "Read-only", "This is a read-only view of stored data. `nnictl resume` resumes the experiment.");
  for (const text of summary.errors.filter(Boolean)) note("problem", titleOf(text), text);
  for (const text of summary.problems) note("problem", "Needs attention", text);
  if (hasNoKeeper(summary, live.elapsedS)) {
    note("problem", "No keeper is connected",
      "There are unfinished trials, but no trial keeper is connected to the manager. If this lasts, see the transport of each job on the jobs page, and the log of a job on its cluster.");
  }
  const silent = summary.latestWithoutResult;
  if (silent !== null) {
    const title = "A trial succeeded without a result";
    note("problem", title, `Trial ${silent.sequenceId} (${silent.id}): ${silent.message}`, `${title}\n${silent.id}`);
  }
  return found.filter(({ key }, index) => found.findIndex((each) => each.key === key) === index);
}

/**
 * @param {Summary} summary
 * @param {number} elapsedS
 */
function hasNoKeeper(summary, elapsedS) {
  const isBusy = !format.isTerminal(summary.status) && (summary.counts["WAITING"] ?? 0) + (summary.counts["RUNNING"] ?? 0) > 0;
  return isBusy && summary.keepers === 0 && elapsedS >= NO_KEEPER_AFTER_S && summary.problems.length === 0 && !summary.readOnly;
}

/** @param {string} error */
function titleOf(error) {
  if (error.includes("Traceback")) return "The tuner or assessor failed";
  return /manager is version .* keeper is version /.test(error) ? "Versions do not agree" : "The experiment was stopped by an error";
}

/** The notices that this viewer has not dismissed. */
export class Notices {
  /** @type {Dismissals | null} null until the experiment is known */
  #dismissals = null;
  /** @type {Notice[]} */
  shown = [];

  /**
   * @param {Live} live
   * @param {() => void} onDismiss
   */
  constructor(live, onDismiss) {
    this.live = live;
    this.onDismiss = onDismiss;
  }

  /** Compute the notices anew. */
  update() {
    const id = this.live.summary?.id;
    if (this.#dismissals === null && id !== undefined) {
      const key = `trial-keeper-dismissed-${id}`;
      this.#dismissals = new Dismissals({ load: () => localStorage.getItem(key), save: (text) => localStorage.setItem(key, text) });
    }
    const all = noticesOf(this.live);
    this.#dismissals?.keepOnly(all.map(({ key }) => key));
    this.shown = all.filter(({ key }) => !this.#dismissals?.has(key));
  }

  /** @param {Notice} notice */
  dismiss(notice) {
    this.#dismissals?.add(notice.key);
    this.update();
    this.onDismiss();
  }
}

/** A box with an element for each notice. An element stays as long as its notice, so its button keeps the focus. */
export class NoticeBox {
  /** @type {Map<string, {element: HTMLElement, text: string}>} */
  #drawn = new Map();

  /**
   * @param {Notices} notices
   * @param {HTMLElement} element
   * @param {(notice: Notice) => HTMLElement} make
   */
  constructor(notices, element, make) {
    this.notices = notices;
    this.element = element;
    this.make = make;
  }

  /** @param {readonly Notice[]} shown */
  draw(shown) {
    const keys = new Set(shown.map(({ key }) => key));
    for (const [key, { element }] of this.#drawn) {
      if (keys.has(key)) continue;
      element.remove();
      this.#drawn.delete(key);
    }
    shown.forEach((notice, index) => {
      const { key, text } = notice;
      let drawn = this.#drawn.get(key);
      if (drawn === undefined) {
        drawn = { element: h("div", { role: "alert" }), text: "" };
        this.#drawn.set(key, drawn);
      }
      if (this.element.children[index] !== drawn.element) this.element.insertBefore(drawn.element, this.element.children[index] ?? null);
      // A screen reader announces each change of an alert.
      if (drawn.text === text) return;
      const hadFocus = drawn.element.contains(document.activeElement);
      drawn.text = text;
      fill(drawn.element, this.make(notice));
      const button = this.#button(notice);
      drawn.element.firstElementChild?.append(button);
      if (hadFocus) button.focus();
    });
  }

  /** @param {Notice} notice */
  #button(notice) {
    const name = `Dismiss: ${notice.title}: ${short(notice.text, 80)}`;
    return h("button", { type: "button", class: "small dismiss", "data-test": "dismiss", "aria-label": name, click: () => {
      const at = [...this.element.querySelectorAll(".dismiss")].indexOf(/** @type {Element} */ (document.activeElement));
      this.notices.dismiss(notice);
      // The focus goes to the next notice, or to the page.
      const left = /** @type {NodeListOf<HTMLElement>} */ (this.element.querySelectorAll(".dismiss"));
      (left[Math.min(Math.max(at, 0), left.length - 1)] ?? document.getElementById("main"))?.focus({ preventScroll: true });
    } }, "Dismiss");
  }
}

/**
 * A notice in one line, for the bar at the top.
 *
 * @param {Notice} notice
 */
export function banner({ kind, title, text }) {
  const isProblem = kind === "problem";
  const element = h("div", { class: `banner ${kind === "readonly" ? "" : isProblem ? "bad" : "warn"}`, "data-test": `banner-${kind}` });
  const line = short(plain(text).trim().split("\n")[0] ?? "", 400);
  element.append(h("p", {}, isProblem ? h("strong", {}, `${title}: `) : "", prose(isProblem ? line : text)));
  return element;
}
