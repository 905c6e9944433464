/**
 * Charts, drawn by plotly. It is loaded when the first chart becomes visible, so tables do not wait for it. Only SVG traces are
 * used, since WebGL traces need `eval`, which the page's policy forbids.
 */

import { chartLibrary } from "../base.js";
import { h, say } from "../dom.js";
import { plain } from "../plain.js";

/**
 * @typedef {{[name: string]: any}} Figure  a trace or a layout of plotly
 * @typedef {object} Plotly
 * @property {(element: HTMLElement, traces: Figure[], layout: Figure, config: Figure) => Promise<unknown>} react
 * @property {(element: HTMLElement) => void} purge
 * @property {{resize: (element: HTMLElement) => Promise<unknown>}} Plots
 */

/** Minimum interval between drawings of a chart. */
const DRAW_EVERY_MS = 1500;
/** Minimum ratio of pause to drawing time, so that the page stays responsive with many trials. */
const REST_PER_DRAWING = 10;
/** Plotly's buttons that have no use here. */
const NO_BUTTONS = ["lasso2d", "select2d", "autoScale2d"];

/** @type {Promise<Plotly> | null} */
let loading = null;

/** @returns {Promise<Plotly>} */
function plotly() {
  loading ??= chartLibrary().then((source) => new Promise((resolve, reject) => {
    const script = h("script", { src: source });
    script.addEventListener("load", () => resolve(/** @type {any} */ (window).Plotly));
    script.addEventListener("error", () => {
      loading = null;
      script.remove();
      reject(new Error("cannot load charts"));
    });
    document.head.append(script);
  }));
  return loading;
}

/**
 * The current colours of style.css, in the reader's theme.
 *
 * @returns {{[name: string]: string}}
 */
export function colours() {
  const names = ["text", "muted", "line", "surface", "accent", "good", "bad", "warn", "quiet",
    ...Array.from({ length: 8 }, (_, index) => `series-${index}`), "shade-low", "shade-high"];
  const probe = h("span", { class: "unseen" });
  document.body.append(probe);
  const found = Object.fromEntries(names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  }));
  probe.remove();
  return found;
}

/**
 * Escape a text for plotly, which interprets some HTML tags in labels.
 *
 * @param {string} text
 */
export function label(text) {
  return plain(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/**
 * One chart in the page, redrawn when the theme changes.
 *
 * Each drawing calls `build` for the traces, the layout and a text description.
 *
 * @typedef {{traces: Figure[], layout?: Figure, words: string, minWidth?: number}} Drawing  `minWidth` in pixels: a narrower
 *   screen scrolls
 */
export class Chart {
  /** @type {(() => Drawing | null) | null} */
  #build = null;
  #isGone = false;
  #isVisible = false;
  #isStale = false;
  #drawnAtMs = 0;
  #drawingMs = 0;
  #isListening = false;
  /** The width in pixels for which the chart is drawn; 0: not drawn yet. */
  #widthPx = 0;
  /** @type {number | undefined} */
  #timer;
  /** @type {number | undefined} */
  #frame;

  /**
   * @param {string} title
   * @param {{test?: string, note?: string, height?: number, onPoint?: (id: string) => void, overlay?: HTMLElement}} [options]
   *   `note`: the text while there is nothing to draw; `onPoint` receives the `customdata` of a point that is clicked; `overlay`
   *   is as wide and as high as the drawing, in front of it
   */
  constructor(title, { test = "chart", note = "Nothing to draw yet.", height = 300, onPoint, overlay } = {}) {
    this.note = note;
    this.onPoint = onPoint;
    this.title = title;
    this.plot = h("div", { class: "plot" });
    this.plot.style.height = `${height}px`;
    this.words = h("figcaption");
    this.box = h("div", { class: "plot-box" }, this.plot, overlay);
    this.element = h("figure", { class: "chart", "data-test": test, "aria-label": title }, this.box, this.words);
    this.box.hidden = true;
    this.seen = new IntersectionObserver((entries) => {
      this.#isVisible = entries.some((entry) => entry.isIntersecting);
      if (this.#isVisible && this.#isStale) this.#soon();
    }, { rootMargin: "200px" });
    this.seen.observe(this.element);
    this.resized = new ResizeObserver(() => void this.#fit());
    this.resized.observe(this.box);
    this.redraw = () => this.#later();
    addEventListener("themechange", this.redraw);
  }

  /**
   * Draw the chart, now or when it becomes visible.
   *
   * @param {() => Drawing | null} build  null: nothing to draw
   */
  draw(build) {
    this.#build = build;
    this.#later();
  }

  /** Draw again without a pause, in the next frame: the reader waits for the answer to a gesture. */
  drawAtOnce() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = undefined;
      void this.#drawNow();
    });
  }

  #later() {
    this.#isStale = true;
    if (this.#isVisible) this.#soon();
  }

  #soon() {
    if (this.#timer !== undefined) return;
    const rest = Math.max(DRAW_EVERY_MS, this.#drawingMs * REST_PER_DRAWING);
    const wait = Math.max(0, this.#drawnAtMs + rest - performance.now());
    this.#timer = window.setTimeout(() => {
      this.#timer = undefined;
      void this.#drawNow();
    }, this.#drawnAtMs === 0 ? 0 : wait);
  }

  async #drawNow() {
    if (this.#isGone || this.#build === null) return;
    this.#isStale = false;
    const drawing = this.#build();
    say(this.words, drawing === null ? this.note : drawing.words);
    this.box.hidden = drawing === null;
    if (drawing === null) return;
    let library;
    try {
      library = await plotly();
    } catch {
      this.box.hidden = true;
      say(this.words, `${drawing.words} The chart itself cannot be drawn: the library for charts did not load. If this lasts, `
        + "install it where the manager runs: pip install plotly.");
      return;
    }
    if (this.#isGone) return;
    const beganAtMs = performance.now();
    this.box.style.minWidth = `${drawing.minWidth ?? 0}px`;
    const widthPx = this.box.clientWidth;
    await library.react(this.plot, drawing.traces, layoutOf(drawing.layout ?? {}), {
      // Results are private: disable plotly's button that uploads them to its vendor's server.
      showSendToCloud: false, plotlyServerURL: "", displaylogo: false, modeBarButtonsToRemove: NO_BUTTONS, doubleClick: "reset",
    });
    if (this.#widthPx === 0) this.#widthPx = widthPx;
    void this.#fit();
    this.#listen();
    this.#drawnAtMs = performance.now();
    this.#drawingMs = this.#drawnAtMs - beganAtMs;
  }

  /**
   * Give the drawing the width of its box. Plotly itself follows the window only, whose width stays the same when a scroll bar
   * appears.
   */
  async #fit() {
    const widthPx = this.box.clientWidth;
    if (this.#isGone || this.#widthPx === 0 || widthPx === 0 || widthPx === this.#widthPx) return;
    this.#widthPx = widthPx;
    await (await plotly()).Plots.resize(this.plot);
  }

  /** Listen for clicks, once: plotly adds `on` to the element with the first drawing. */
  #listen() {
    if (this.onPoint === undefined || this.#isListening) return;
    this.#isListening = true;
    /** @type {any} */ (this.plot).on("plotly_click", (/** @type {{points: {customdata?: string}[]}} */ { points }) => {
      const id = points[0]?.customdata;
      if (id !== undefined) this.onPoint?.(id);
    });
  }

  /** Release the chart; plotly keeps its drawing until it is purged. */
  destroy() {
    this.#isGone = true;
    clearTimeout(this.#timer);
    this.seen.disconnect();
    this.resized.disconnect();
    removeEventListener("themechange", this.redraw);
    if (loading !== null) void loading.then((library) => library.purge(this.plot), () => undefined);
    this.element.remove();
  }
}

/** @param {Figure} own */
function layoutOf(own) {
  const colour = colours();
  const axis = {
    gridcolor: colour["line"], linecolor: colour["line"], zerolinecolor: colour["line"], automargin: true,
    tickfont: { size: 11 }, title: { font: { size: 12 }, standoff: 8 },
  };
  return {
    autosize: true,
    margin: { l: 56, r: 16, t: 12, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour["text"] },
    hoverlabel: { align: "left", font: { size: 12 } },
    showlegend: false,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    // Keep the reader's zoom when new results arrive.
    uirevision: "same",
    modebar: { color: colour["muted"], activecolor: colour["accent"], bgcolor: "rgba(0,0,0,0)" },
    ...own,
    xaxis: merge(axis, own["xaxis"]),
    yaxis: merge(axis, own["yaxis"]),
  };
}

/**
 * @param {Figure} base
 * @param {Figure | undefined} own
 */
function merge(base, own = {}) {
  const title = typeof own["title"] === "string" ? { ...base["title"], text: own["title"] } : base["title"];
  // 2,000 and 1e-7; dates have a format of their own.
  const format = own["type"] === "date" ? {} : { tickformat: ",~g" };
  return { ...base, ...format, ...own, title };
}
