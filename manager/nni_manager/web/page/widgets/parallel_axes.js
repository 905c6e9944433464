/**
 * The controls of parallel coordinates, in front of the drawing: each axis can be marked and moved, and the line under the
 * pointer is named. What is marked and how axes are ordered belongs to the caller, who shows each change here.
 */

import { fill, h, setAttribute } from "../dom.js";
import { markedText, markOf, moved, spanOf } from "../marks.js";
import { nearestLine } from "../series.js";

/** @import { Mark } from "../marks.js" */
/** @import { Axis, Line } from "../series.js" */

/**
 * The place of the axes in the drawing: pixels around all of them, and parts of an axis' length or distance around the outermost.
 */
export const FRAME = { height: 368, margin: { l: 56, r: 64, t: 52, b: 16 }, above: 0.03, beside: 0.08 };

const INNER_PX = FRAME.height - FRAME.margin.t - FRAME.margin.b;
/** The length of an axis, in pixels. */
const LENGTH_PX = INNER_PX / (1 + 2 * FRAME.above);
const TOP_PX = FRAME.margin.t + FRAME.above * LENGTH_PX;
/** Above the names of the axes is room for plotly's buttons. */
const TITLE_TOP_PX = TOP_PX - 32;
/** Below this distance, a press and release is a click, and marks nothing. */
const LEAST_DRAG_PX = 4;
/** Within this distance, a press takes the end of a mark. */
const END_PX = 7;
/** Within this distance, a line is under the pointer. */
const NEAR_PX = 8;
/** A mark of one category or tick is as high as can be seen, in pixels beyond each end. */
const BEYOND_PX = 5;
const SVG = "http://www.w3.org/2000/svg";

/**
 * @typedef {object} Controls  those of one axis
 * @property {Axis} axis
 * @property {HTMLElement} box
 * @property {HTMLButtonElement} title
 * @property {HTMLElement} strip
 * @property {HTMLElement} marked
 *
 * @typedef {object} Answers
 * @property {(id: string, mark: Mark | null) => void} onMark  null: the axis' mark is cleared
 * @property {(ids: string[]) => void} onOrder
 * @property {(line: Line) => void} onLine  a click on a line
 * @property {(line: Line) => string[]} identityOf  what names the line's trial
 */

export class ParallelAxes {
  /** @type {Axis[]} */
  #axes = [];
  /** @type {readonly Line[]} */
  #lines = [];
  /** @type {ReadonlyMap<string, Mark>} */
  #marks = new Map();
  /** @type {Map<string, Controls>} */
  #controls = new Map();
  /** The axis on which a mark is dragged, and the end that stays. @type {{id: string, fixed: number, beganAtPx: number, isMoved: boolean} | null} */
  #drag = null;
  /** True while an axis is dragged by its title. */
  #isMoving = false;

  /** @param {Answers} answers */
  constructor(answers) {
    this.answers = answers;
    this.line = document.createElementNS(SVG, "polyline");
    const drawing = document.createElementNS(SVG, "svg");
    drawing.setAttribute("aria-hidden", "true");
    drawing.append(this.line);
    this.tip = h("div", { class: "tip", "data-test": "line-tip" });
    this.tip.hidden = true;
    this.all = h("div", { role: "group", "aria-label": "Axes" });
    const area = h("div", { class: "area" });
    area.style.top = `${TITLE_TOP_PX}px`;
    this.element = h("div", { class: "axes", pointermove: (/** @type {PointerEvent} */ event) => this.#point(event), pointerleave: () => this.#leave(),
      click: (/** @type {PointerEvent} */ event) => this.#click(event) }, area, drawing, this.all, this.tip);
  }

  /**
   * @param {Axis[]} axes
   * @param {readonly Line[]} lines  those that can be pointed at
   * @param {ReadonlyMap<string, Mark>} marks
   */
  show(axes, lines, marks) {
    this.#axes = axes;
    this.#lines = lines;
    this.#marks = marks;
    this.#leave();
    for (const axis of axes) {
      const known = this.#controls.get(axis.id);
      if (known === undefined) this.#controls.set(axis.id, this.#controlsOf(axis));
      else known.axis = axis;
    }
    axes.forEach((axis, index) => this.#place(axis, index));
    if (!this.#isMoving) this.#arrange();
  }

  /** Put the elements in the order of the axes, for the keyboard. One that is moved in the document loses pointer and focus. */
  #arrange() {
    const boxes = this.#axes.map((axis) => this.#controls.get(axis.id)?.box);
    if (boxes.length === this.all.childElementCount && boxes.every((box, index) => box === this.all.children[index])) return;
    const focused = document.activeElement;
    fill(this.all, boxes);
    if (focused instanceof HTMLElement && this.all.contains(focused)) focused.focus({ preventScroll: true });
  }

  /** @param {Axis} axis */
  #controlsOf(axis) {
    const { id } = axis;
    const marked = h("div", { class: "marked" });
    const strip = h("div", { class: "strip", "data-test": `strip-${axis.name}`, pointerdown: (/** @type {PointerEvent} */ event) => this.#press(id, event),
      pointermove: (/** @type {PointerEvent} */ event) => this.#dragMark(event), pointerup: () => this.#release(), pointercancel: () => this.#release() }, marked);
    strip.style.top = `${TOP_PX - BEYOND_PX}px`;
    strip.style.height = `${LENGTH_PX + 2 * BEYOND_PX}px`;
    const title = h("button", { type: "button", class: "title", "data-test": `axis-${axis.name}`, "aria-keyshortcuts": "ArrowLeft ArrowRight ArrowUp ArrowDown Delete",
      keydown: (/** @type {KeyboardEvent} */ event) => this.#key(id, event),
      pointerdown: (/** @type {PointerEvent} */ event) => {
        if (event.button !== 0) return;
        this.#isMoving = true;
        title.setPointerCapture(event.pointerId);
      },
      pointermove: (/** @type {PointerEvent} */ event) => {
        if (this.#isMoving) this.#move(id, this.#indexAt(event.clientX));
      },
      lostpointercapture: () => {
        this.#isMoving = false;
        this.#arrange();
      } });
    title.style.top = `${TITLE_TOP_PX}px`;
    return { axis, box: h("div", { class: "axis" }, title, strip), title, strip, marked };
  }

  /**
   * @param {Axis} axis
   * @param {number} index
   */
  #place(axis, index) {
    const controls = this.#controls.get(axis.id);
    if (controls === undefined) return;
    const { l, r } = FRAME.margin;
    const share = (index + FRAME.beside) / (this.#axes.length - 1 + 2 * FRAME.beside);
    controls.box.style.left = `calc(${l}px + (100% - ${l + r}px) * ${share})`;
    const mark = this.#marks.get(axis.id);
    const span = mark && spanOf(axis, mark);
    controls.marked.hidden = !span;
    if (span) {
      controls.marked.style.top = `${(1 - span[1]) * LENGTH_PX}px`;
      controls.marked.style.height = `${(span[1] - span[0]) * LENGTH_PX + 2 * BEYOND_PX}px`;
    }
    setAttribute(controls.title, "title", axis.name);
    setAttribute(controls.title, "aria-label", `${axis.name}, axis ${index + 1} of ${this.#axes.length}${mark ? `, marked ${markedText(mark)}` : ""}`);
  }

  /**
   * The position of the pointer on an axis, from 0 at its lower end to 1.
   *
   * @param {PointerEvent} event
   */
  #heightAt(event) {
    return 1 - (event.clientY - this.element.getBoundingClientRect().top - TOP_PX) / LENGTH_PX;
  }

  /** The distance of two axes and the place of the first, in pixels of the window. */
  #columns() {
    const { left, width } = this.element.getBoundingClientRect();
    const gap = (width - FRAME.margin.l - FRAME.margin.r) / (this.#axes.length - 1 + 2 * FRAME.beside);
    return { gap, first: left + FRAME.margin.l + FRAME.beside * gap };
  }

  /** @param {number} x in pixels of the window */
  #indexAt(x) {
    const { gap, first } = this.#columns();
    return Math.max(0, Math.min(this.#axes.length - 1, Math.round((x - first) / gap)));
  }

  /**
   * @param {string} id
   * @param {number} to
   */
  #move(id, to) {
    const ids = this.#axes.map((axis) => axis.id);
    const from = ids.indexOf(id);
    if (from === to || to < 0 || to >= ids.length) return;
    ids.splice(from, 1);
    ids.splice(to, 0, id);
    this.answers.onOrder(ids);
  }

  /**
   * @param {string} id
   * @param {KeyboardEvent} event
   */
  #key(id, event) {
    const axis = this.#controls.get(id)?.axis;
    const { key } = event;
    if (axis === undefined) return;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      this.#move(id, this.#axes.findIndex((each) => each.id === id) + (key === "ArrowLeft" ? -1 : 1));
    } else if (key === "ArrowUp" || key === "ArrowDown") {
      this.answers.onMark(id, moved(axis, this.#marks.get(id), event.shiftKey ? "high" : "low", key === "ArrowUp" ? 1 : -1));
    } else if (key === "Delete" || key === "Backspace") {
      this.answers.onMark(id, null);
    } else return;
    event.preventDefault();
  }

  /**
   * @param {string} id
   * @param {PointerEvent} event
   */
  #press(id, event) {
    const controls = this.#controls.get(id);
    if (controls === undefined || event.button !== 0) return;
    controls.strip.setPointerCapture(event.pointerId);
    const at = this.#heightAt(event);
    const mark = this.#marks.get(id);
    const span = mark && spanOf(controls.axis, mark);
    const near = END_PX / LENGTH_PX;
    const fixed = span && Math.abs(at - span[0]) < near ? span[1] : span && Math.abs(at - span[1]) < near ? span[0] : at;
    this.#drag = { id, fixed, beganAtPx: event.clientY, isMoved: false };
    this.#leave();
  }

  /** @param {PointerEvent} event */
  #dragMark(event) {
    const drag = this.#drag;
    const axis = drag && this.#controls.get(drag.id)?.axis;
    if (!drag || !axis) return;
    drag.isMoved ||= Math.abs(event.clientY - drag.beganAtPx) >= LEAST_DRAG_PX;
    if (drag.isMoved) this.answers.onMark(drag.id, markOf(axis, drag.fixed, this.#heightAt(event)));
  }

  #release() {
    // The click that follows is part of the drag.
    setTimeout(() => (this.#drag = null));
  }

  /**
   * The line under the pointer.
   *
   * @param {PointerEvent} event
   */
  #lineAt(event) {
    const { gap, first } = this.#columns();
    return nearestLine(this.#lines, { x: event.clientX - first, y: this.#heightAt(event) * LENGTH_PX }, { gap, height: LENGTH_PX, slack: NEAR_PX });
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const line = this.#drag === null ? this.#lineAt(event) : null;
    this.element.classList.toggle("on-line", line !== null);
    if (line === null) {
      this.#leave();
      return;
    }
    const { gap, first } = this.#columns();
    const box = this.element.getBoundingClientRect();
    this.line.setAttribute("points", line.heights.flatMap((height, index) =>
      (height === null ? [] : [`${first - box.left + index * gap},${TOP_PX + (1 - height) * LENGTH_PX}`])).join(" "));
    fill(this.tip, this.answers.identityOf(line).map((text) => h("div", {}, text)));
    this.tip.hidden = false;
    // On the side of the pointer that has more room in what can be seen of a chart that scrolls.
    const seen = (this.element.closest(".chart") ?? this.element).getBoundingClientRect();
    const isRight = event.clientX > (seen.left + seen.right) / 2;
    const beside = isRight ? event.clientX - this.tip.offsetWidth - 14 : event.clientX + 14;
    this.tip.style.left = `${Math.max(seen.left, Math.min(beside, seen.right - this.tip.offsetWidth)) - box.left}px`;
    this.tip.style.top = `${Math.max(0, Math.min(event.clientY - box.top + 14, FRAME.height - this.tip.offsetHeight))}px`;
  }

  #leave() {
    this.tip.hidden = true;
    this.line.removeAttribute("points");
  }

  /** @param {PointerEvent} event */
  #click(event) {
    const drag = this.#drag;
    if (drag?.isMoved || !(event.target instanceof Element) || event.target.closest(".title")) return;
    if (drag && this.#marks.has(drag.id)) {
      this.answers.onMark(drag.id, null);
      return;
    }
    const line = this.#lineAt(event);
    if (line !== null) this.answers.onLine(line);
  }
}
