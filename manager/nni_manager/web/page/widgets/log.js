/** The logs of a trial: a window of one stream of one task of one attempt, which can follow the stream's end. */

import { api } from "../state/api.js";
import { fill, h, say, setAttribute } from "../dom.js";
import { bytes } from "../format.js";
import { LogWindow } from "../logwindow.js";
import { plain } from "../plain.js";

/** @import { Attempt } from "../types.js" */
/** @import { Range } from "../logwindow.js" */

const STREAMS = ["stdout", "stderr", "keeper"];
const FOLLOW_EVERY_MS = 1000;
/** Poll interval for a terminal trial, whose last bytes may still be in transit. */
const LOOK_AGAIN_EVERY_MS = 10_000;

export class LogView {
  #window = new LogWindow();
  #stream = "stdout";
  /** @type {{attempt: number, task: string} | null} */
  #place = null;
  #isFollowing = true;
  #isGone = false;
  /** Number of the newest request, to discard responses to earlier ones. */
  #turn = 0;
  /** @type {number | undefined} */
  #timer;

  /**
   * @param {string} trialId
   * @param {() => boolean} isRunning
   */
  constructor(trialId, isRunning) {
    this.trialId = trialId;
    this.isRunning = isRunning;
    this.text = document.createTextNode("");
    this.pre = h("pre", { class: "log", tabindex: 0, "data-test": "log", role: "region", "aria-label": "Log" }, this.text);
    this.where = h("span", { class: "muted" });
    this.attempts = h("select", { "aria-label": "Attempt and task", "data-test": "attempts", change: () => this.#choose() });
    this.tabs = STREAMS.map((stream) =>
      h("button", { type: "button", role: "tab", "data-test": `log-${stream}`, "aria-selected": "false", click: () => this.#show(stream) }, stream));
    const tabList = h("div", { role: "tablist", class: "tabs small", "aria-label": "Stream", keydown: (/** @type {KeyboardEvent} */ event) => arrows(event, this.tabs) }, this.tabs);
    this.follow = h("input", { type: "checkbox", "data-test": "log-follow", change: () => this.#setFollowing(this.follow.checked) });
    this.follow.checked = true;
    this.older = this.#button("Older", "log-older", () => this.#window.older());
    this.newer = this.#button("Newer", "log-newer", () => this.#window.newer());
    this.first = this.#button("Start", "log-start", () => LogWindow.first());
    this.last = this.#button("End", "log-end", () => LogWindow.last());
    this.element = h("div", { class: "logs" },
      h("div", { class: "bar" }, tabList, this.attempts, h("span", { class: "grow" }), this.where,
        h("span", { class: "group" }, this.first, this.older, this.newer, this.last),
        h("label", { class: "check" }, this.follow, "Follow")),
      this.pre);
    this.pre.addEventListener("scroll", () => {
      if (this.#isFollowing && !this.#isScrolledDown()) this.#setFollowing(false);
    }, { passive: true });
    this.attempts.hidden = true;
    say(this.where, "nothing has been written so far");
    for (const button of [this.first, this.older, this.newer, this.last]) button.disabled = true;
    this.#markTabs();
  }

  /**
   * Set the available streams; the newest attempt is shown first.
   *
   * @param {Attempt[]} attempts
   */
  setAttempts(attempts) {
    const places = attempts.flatMap(({ attempt, tasks }) => tasks.map(({ task }) => ({ attempt, task })));
    const keys = places.map((place) => JSON.stringify(place));
    if (keys.join() === [...this.attempts.options].map((option) => option.value).join()) return;
    const chosen = this.attempts.value;
    const wasLast = this.attempts.selectedIndex === this.attempts.options.length - 1;
    fill(this.attempts, places.map(({ attempt, task }, index) =>
      h("option", { value: keys[index] ?? "" }, `attempt ${attempt}, ${plain(task)}`)));
    this.attempts.hidden = places.length === 0;
    const newest = attempts[attempts.length - 1];
    const first = places.findIndex(({ attempt }) => attempt === newest?.attempt);
    this.attempts.value = keys.includes(chosen) && !wasLast ? chosen : (keys[first] ?? "");
    this.#choose();
  }

  /** Stop the timer, which outlives the elements. */
  close() {
    this.#isGone = true;
    clearTimeout(this.#timer);
  }

  /**
   * @param {string} text
   * @param {string} test
   * @param {() => Range | null} range
   */
  #button(text, test, range) {
    return h("button", { type: "button", class: "small", "data-test": test, click: () => {
      this.#setFollowing(false);
      const wanted = range();
      if (wanted !== null) void this.#ask(wanted, test === "log-older" || test === "log-start" ? "top" : "bottom");
    } }, text);
  }

  #isScrolledDown() {
    return this.pre.scrollHeight - this.pre.scrollTop - this.pre.clientHeight < 40;
  }

  /** @param {boolean} isFollowing */
  #setFollowing(isFollowing) {
    this.#isFollowing = isFollowing;
    this.follow.checked = isFollowing;
    if (isFollowing) void this.#ask(this.#window.isAtEnd ? this.#window.following() : LogWindow.last(), "bottom");
  }

  #choose() {
    const { value } = this.attempts;
    this.#place = value === "" ? null : JSON.parse(value);
    this.#begin();
  }

  /** @param {string} stream */
  #show(stream) {
    this.#stream = stream;
    this.#markTabs();
    this.#begin();
  }

  #markTabs() {
    this.tabs.forEach((tab, index) => {
      const isShown = STREAMS[index] === this.#stream;
      setAttribute(tab, "aria-selected", String(isShown));
      setAttribute(tab, "tabindex", isShown ? 0 : -1);
    });
  }

  #begin() {
    this.#window = new LogWindow();
    this.text.data = "";
    this.#setFollowing(true);
  }

  /**
   * @param {Range} range
   * @param {"top" | "bottom"} edge  the scroll position afterwards
   */
  async #ask(range, edge) {
    clearTimeout(this.#timer);
    const place = this.#place;
    if (place === null) return;
    const turn = ++this.#turn;
    let trouble = "";
    try {
      const piece = await api.log(this.trialId, this.#stream, { ...place, ...range });
      if (turn !== this.#turn || this.#isGone) return;
      this.#window.accept(piece);
    } catch (error) {
      if (turn !== this.#turn || this.#isGone) return;
      trouble = error instanceof Error ? error.message : String(error);
    }
    this.#draw(edge, trouble);
    if (this.#isFollowing) {
      // A window that is far behind catches up without a pause.
      const wait = trouble || !this.#window.isBehind ? (this.isRunning() ? FOLLOW_EVERY_MS : LOOK_AGAIN_EVERY_MS) : 0;
      this.#timer = window.setTimeout(() => {
        if (document.hidden) this.#wake();
        else void this.#ask(this.#window.following(), "bottom");
      }, wait);
    }
  }

  /** Polling pauses while the page is hidden; resume it when visible. */
  #wake() {
    document.addEventListener("visibilitychange", () => {
      if (!this.#isGone && this.#isFollowing) void this.#ask(this.#window.following(), "bottom");
    }, { once: true });
  }

  /**
   * @param {"top" | "bottom"} edge
   * @param {string} trouble
   */
  #draw(edge, trouble) {
    const text = this.#window.text();
    const old = this.text.data;
    const wasDown = this.#isScrolledDown();
    if (text !== old) {
      // Appending to a text node keeps the reader's selection.
      if (text.startsWith(old)) this.text.appendData(text.slice(old.length));
      else this.text.data = text;
      if (edge === "top") this.pre.scrollTop = 0;
      else if (wasDown || this.#isFollowing) this.pre.scrollTop = this.pre.scrollHeight;
    }
    const { start, end, size } = this.#window;
    say(this.where, trouble || (size === 0 ? "empty so far" : start === 0 && end >= size ? bytes(size) : `${bytes(start)} to ${bytes(end)} of ${bytes(size)}`));
    this.first.disabled = this.older.disabled = start === 0;
    this.last.disabled = this.newer.disabled = this.#window.isAtEnd;
  }
}

/**
 * Handle arrow keys in a list of tabs, as screen-reader users expect.
 *
 * @param {KeyboardEvent} event
 * @param {readonly HTMLElement[]} tabs
 */
export function arrows(event, tabs) {
  const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  const at = tabs.indexOf(/** @type {HTMLElement} */ (event.target));
  if (step === 0 || at < 0) return;
  event.preventDefault();
  const tab = tabs[(at + step + tabs.length) % tabs.length];
  tab?.focus();
  tab?.click();
}
