/**
 * A virtualised table: only the visible rows and the open one are in the document. It is a real table element;
 * `aria-rowcount` and `aria-rowindex` inform screen readers of the other rows.
 *
 * Keys on a row's button: up, down, page up, page down, home and end move; enter opens and closes; x selects.
 */

import { h, say, setAttribute } from "../dom.js";

/** @import { Row } from "../types.js" */
/** @import { Order } from "../query.js" */

/** As in style.css. */
const ROW_HEIGHT = 36;
/** Extra rows beyond the edges, for smooth scrolling. */
const MARGIN_ROWS = 8;

/**
 * @typedef {object} Column
 * @property {string} id
 * @property {string} title
 * @property {number} width  in pixels
 * @property {boolean} [isNumber]
 * @property {boolean} [isFixed]  true if the column is not sortable
 * @property {(row: Row) => string} text
 * @property {(row: Row) => string} [look]  the style of a state's badge
 *
 * @typedef {object} Detail  the content below an open row
 * @property {HTMLElement} element
 * @property {(row: Row) => void} update
 * @property {() => void} close
 *
 * @typedef {object} Options
 * @property {string} label
 * @property {Order} order
 * @property {(order: Order) => void} onOrder
 * @property {(first: number, last: number) => void} onRange  the shown places
 * @property {(row: Row) => Detail} detail
 * @property {(selected: ReadonlySet<string>) => void} onSelect
 *
 * @typedef {{row: Row, element: HTMLTableRowElement, button: HTMLButtonElement, box: HTMLInputElement, cells: HTMLElement[]}} Line
 *
 * @typedef {{row: Row, toBox: boolean}} Focus  a row that has the focus, in its box or its button
 */

export class TrialTable {
  /** @type {Column[]} */
  #columns = [];
  /** Undefined or absent: not loaded yet. @type {readonly (Row | undefined)[]} */
  #rows = [];
  /** A row that gets the focus when it is loaded. @type {{index: number, toBox: boolean} | null} */
  #next = null;
  /** @type {Map<string, Line>} */
  #lines = new Map();
  /** @type {{id: string, row: HTMLTableRowElement, detail: Detail, height: number} | null} */
  #open = null;
  /** The row that the tab key focuses. */
  #active = 0;
  #isDue = false;
  /** True if a shown row is not loaded. */
  #isWaiting = false;

  /** @param {Options} options */
  constructor(options) {
    this.options = options;
    /** @type {Set<string>} */
    this.selected = new Set();
    this.head = h("tr", { "aria-rowindex": 1 });
    this.body = h("tbody");
    this.columnGroup = h("colgroup");
    this.table = h("table", { class: "trials", "data-test": "table" },
      h("caption", { class: "unseen" }, options.label), this.columnGroup, h("thead", {}, this.head), this.body);
    this.empty = h("p", { class: "empty" });
    this.element = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": options.label }, this.table, this.empty);
    this.element.addEventListener("scroll", () => this.#later(), { passive: true });
    this.body.addEventListener("keydown", (event) => this.#key(event));
    this.body.addEventListener("focusin", () => {
      this.#follow(this.#focus());
      this.#later();
    });
    this.resized = new ResizeObserver(() => this.#later());
    this.resized.observe(this.element);
    this.measured = new ResizeObserver(() => this.#measure());
  }

  /** Disconnect the observers, which outlive the elements. */
  destroy() {
    this.resized.disconnect();
    this.measured.disconnect();
    this.#open?.detail.close();
  }

  /** @param {Column[]} columns */
  setColumns(columns) {
    this.#columns = columns;
    this.columnGroup.replaceChildren(...[{ width: 76 }, ...columns].map(({ width }) => {
      const column = h("col");
      column.style.width = `${width}px`;
      return column;
    }));
    // The table is at least as wide as its columns, and fills a wider screen.
    this.table.style.minWidth = `${76 + columns.reduce((sum, { width }) => sum + width, 0)}px`;
    this.#drawHead();
    const focus = this.#focus();
    for (const { element } of this.#lines.values()) element.remove();
    this.#lines.clear();
    this.draw(focus);
  }

  #drawHead() {
    const { order } = this.options;
    const heads = this.#columns.map(({ id, title, isNumber, isFixed }) => {
      const isSorted = order.column === id;
      const sort = isSorted ? (order.descending ? "descending" : "ascending") : null;
      const button = h("button", { type: "button", "data-test": `sort-${id}`, title: `Sort by ${title}`, click: () => this.#sortBy(id) },
        h("span", {}, title), h("span", { class: "arrow", "aria-hidden": true }, isSorted ? (order.descending ? "▼" : "▲") : ""));
      return h("th", { scope: "col", class: isNumber ? "number" : null, "aria-sort": sort }, isFixed ? title : button);
    });
    this.head.replaceChildren(h("th", { scope: "col" }, h("span", { class: "unseen" }, "Open and select")), ...heads);
  }

  /** @param {string} column */
  #sortBy(column) {
    const { order, onOrder } = this.options;
    const descending = order.column === column ? !order.descending : column === "value";
    this.options.order = { column, descending };
    this.#drawHead();
    /** @type {HTMLElement | null} */ (this.head.querySelector(`[data-test="sort-${CSS.escape(column)}"]`))?.focus();
    onOrder(this.options.order);
  }

  /**
   * Set the rows, in order; those that are not loaded have an empty place. `note` is shown if there are none.
   *
   * @param {readonly (Row | undefined)[]} rows
   * @param {string} note
   */
  setRows(rows, note) {
    this.#rows = rows;
    this.#active = Math.min(this.#active, Math.max(0, rows.length - 1));
    this.#follow(this.#focus());
    setAttribute(this.table, "aria-rowcount", rows.length + 1);
    say(this.empty, rows.length === 0 ? note : "");
    // Rows that a reader waits for are not delayed by a frame.
    if (this.#isWaiting) this.draw();
    else this.#later();
  }

  /**
   * Open one row and scroll to it.
   *
   * @param {string} id
   */
  show(id) {
    const index = this.#indexOf(id);
    if (index < 0) return false;
    if (this.#open?.id !== id) this.#toggle(id);
    this.#active = index;
    this.element.scrollTop = index * ROW_HEIGHT;
    this.draw();
    return true;
  }

  /** @param {string} id */
  #indexOf(id) {
    return this.#rows.findIndex((row) => row?.id === id);
  }

  /** @returns {Focus | null} */
  #focus() {
    const { activeElement } = document;
    const id = this.body.contains(activeElement) ? activeElement?.closest("tr.line")?.getAttribute("data-id") : null;
    const line = this.#lines.get(id ?? "");
    return line === undefined ? null : { row: line.row, toBox: activeElement === line.box };
  }

  /**
   * Let the keys move from the row that has the focus, also after the order has changed.
   *
   * @param {Focus | null} focus
   */
  #follow(focus) {
    if (focus === null || this.#rows[this.#active]?.id === focus.row.id) return;
    const index = this.#indexOf(focus.row.id);
    if (index >= 0) this.#active = index;
  }

  #later() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.draw();
    });
  }

  /**
   * Put the visible rows into the document.
   *
   * @param {Focus | null} focus
   */
  draw(focus = this.#focus()) {
    const height = this.element.clientHeight || 600;
    const open = this.#open;
    const openAt = open === null ? -1 : this.#indexOf(open.id);
    const detailHeight = openAt < 0 ? 0 : (open?.height ?? 0);
    /** @param {number} offset */
    const rowAt = (offset) => {
      const above = openAt < 0 ? Infinity : (openAt + 1) * ROW_HEIGHT;
      return Math.floor((offset <= above ? offset : Math.max(above, offset - detailHeight)) / ROW_HEIGHT);
    };
    const top = this.element.scrollTop;
    const first = Math.max(0, rowAt(top) - MARGIN_ROWS);
    const last = Math.min(this.#rows.length - 1, rowAt(top + height) + MARGIN_ROWS);
    this.options.onRange(first, Math.max(first, last));
    const wanted = [];
    for (let index = first; index <= last; index++) wanted.push(index);
    // The open row and the focused row stay in the document at any scroll position.
    const isFocused = focus !== null || this.body.contains(document.activeElement);
    const focused = isFocused && this.#active < this.#rows.length ? this.#active : -1;
    for (const index of [openAt, focused]) if (index >= 0 && (index < first || index > last)) wanted.push(index);
    wanted.sort((a, b) => a - b);
    this.#isWaiting = wanted.some((index) => this.#rows[index] === undefined);

    /** @type {HTMLElement[]} */
    const elements = [];
    const seen = new Set();
    let at = 0;
    let spaces = 0;
    for (const index of wanted) {
      // Without its row, the focus would leave the table until the row is loaded again.
      const row = this.#rows[index] ?? (index === focused ? focus?.row : undefined);
      if (row === undefined || seen.has(row.id)) continue;
      if (index > at) elements.push(this.#space((index - at) * ROW_HEIGHT, spaces++));
      at = index + 1;
      seen.add(row.id);
      elements.push(this.#line(row, index).element);
      if (open !== null && index === openAt) {
        open.detail.update(row);
        elements.push(open.row);
      }
    }
    if (at < this.#rows.length) elements.push(this.#space((this.#rows.length - at) * ROW_HEIGHT, spaces));
    for (const [id, { element }] of this.#lines) {
      if (!seen.has(id)) {
        element.remove();
        this.#lines.delete(id);
      }
    }
    place(this.body, elements);
    if (focus !== null && !this.body.contains(document.activeElement)) this.#focusOn(this.#rows[this.#active] ?? focus.row, focus.toBox);
    if (this.#next !== null && this.#rows[this.#next.index] !== undefined) this.#moveTo(this.#next.index, this.#next.toBox);
  }

  /** @type {HTMLTableRowElement[]} */
  #spaces = [];

  /**
   * A placeholder for rows outside the document.
   *
   * @param {number} height
   * @param {number} which  index of the placeholder in this drawing
   */
  #space(height, which) {
    const space = (this.#spaces[which] ??= h("tr", { class: "space", "aria-hidden": true }, h("td")));
    space.style.height = `${height}px`;
    return space;
  }

  /**
   * @param {Row} row
   * @param {number} index
   */
  #line(row, index) {
    let line = this.#lines.get(row.id);
    if (line === undefined) {
      line = this.#newLine(row);
      this.#lines.set(row.id, line);
    }
    line.row = row;
    const isOpen = this.#open?.id === row.id;
    const isActive = index === this.#active;
    setAttribute(line.element, "aria-rowindex", index + 2);
    line.element.classList.toggle("open", isOpen);
    line.element.classList.toggle("chosen", this.selected.has(row.id));
    setAttribute(line.button, "aria-expanded", String(isOpen));
    setAttribute(line.button, "tabindex", isActive ? 0 : -1);
    setAttribute(line.box, "tabindex", isActive ? 0 : -1);
    line.box.checked = this.selected.has(row.id);
    this.#columns.forEach((column, place) => {
      const cell = /** @type {HTMLElement} */ (/** @type {Line} */ (line).cells[place]);
      const text = column.text(row);
      say(cell, text);
      if (column.look) setAttribute(cell, "data-look", column.look(row));
      else setAttribute(cell, "title", text);
    });
    return line;
  }

  /**
   * @param {Row} row
   * @returns {Line}
   */
  #newLine(row) {
    const { id, seq } = row;
    const button = h("button", { type: "button", class: "expand", "data-test": `expand-${id}`, "aria-label": `Trial ${seq}, ${id}: details`, click: () => this.#toggle(id) });
    const box = h("input", { type: "checkbox", "data-test": `select-${id}`, "aria-label": `Select trial ${seq} to compare`, change: () => this.#select(id) });
    const cells = this.#columns.map((column) => h("span", { class: column.look ? "badge" : "cell" }));
    const tableCells = cells.map((cell, place) => h("td", { class: this.#columns[place]?.isNumber ? "number" : null }, cell));
    const element = h("tr", { class: "line", "data-test": `row-${id}`, "data-id": id, click: (/** @type {MouseEvent} */ event) => this.#click(event, id) },
      h("td", {}, button, box), ...tableCells);
    return { row, element, button, box, cells };
  }

  /**
   * @param {MouseEvent} event
   * @param {string} id
   */
  #click(event, id) {
    const target = /** @type {Element} */ (event.target);
    const isMarking = (window.getSelection()?.toString() ?? "") !== "";
    if (target.closest("button, input, a") === null && !isMarking) this.#toggle(id);
  }

  /** @param {string} id */
  #select(id) {
    if (!this.selected.delete(id)) this.selected.add(id);
    this.options.onSelect(this.selected);
    this.#later();
  }

  /** Clear the selection. */
  clearSelection() {
    this.selected.clear();
    this.options.onSelect(this.selected);
    this.#later();
  }

  /** @param {string} id */
  #toggle(id) {
    const open = this.#open;
    if (open !== null) {
      this.measured.unobserve(open.detail.element);
      open.detail.close();
      open.row.remove();
      this.#open = null;
    }
    const index = this.#indexOf(id);
    if (index >= 0) this.#active = index;
    const row = this.#rows[index];
    if (open?.id !== id && row !== undefined) {
      const detail = this.options.detail(row);
      const cell = h("td", { colspan: this.#columns.length + 1 }, detail.element);
      this.#open = { id, row: h("tr", { class: "detail" }, cell), detail, height: 600 };
      this.measured.observe(detail.element);
    }
    this.draw();
  }

  #measure() {
    const open = this.#open;
    if (open === null || !open.row.isConnected) return;
    const height = open.row.offsetHeight;
    if (height === open.height) return;
    open.height = height;
    this.#later();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const line = target.closest("tr.line");
    if (line === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW_HEIGHT) - 2);
    /** @type {{[key: string]: number}} */
    const moves = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move !== undefined) {
      event.preventDefault();
      this.#moveTo(Math.min(this.#rows.length - 1, Math.max(0, this.#active + move)), target instanceof HTMLInputElement);
    } else if (event.key === "x") {
      this.#select(line.getAttribute("data-id") ?? "");
    }
  }

  /**
   * @param {number} index
   * @param {boolean} toBox
   */
  #moveTo(index, toBox) {
    const row = this.#rows[index];
    // The focus stays until the row is loaded.
    this.#next = row === undefined ? { index, toBox } : null;
    if (row !== undefined) this.#active = index;
    const headHeight = this.head.offsetHeight;
    const open = this.#open;
    const openAt = open === null ? -1 : this.#indexOf(open.id);
    const y = index * ROW_HEIGHT + (openAt >= 0 && index > openAt ? (open?.height ?? 0) : 0);
    const { scrollTop, clientHeight } = this.element;
    if (y < scrollTop) this.element.scrollTop = y;
    else if (y + ROW_HEIGHT + headHeight > scrollTop + clientHeight) this.element.scrollTop = y + ROW_HEIGHT + headHeight - clientHeight;
    if (row === undefined) {
      this.draw();
    } else {
      this.draw({ row, toBox });
      this.#focusOn(row, toBox);
    }
  }

  /**
   * @param {Row} row
   * @param {boolean} toBox
   */
  #focusOn({ id }, toBox) {
    const line = this.#lines.get(id);
    (toBox ? line?.box : line?.button)?.focus({ preventScroll: true });
  }
}

/**
 * Make these the children, and move only misplaced elements, since a moved element loses the focus.
 *
 * @param {Element} parent
 * @param {readonly Element[]} wanted
 */
function place(parent, wanted) {
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((element, index) => {
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  });
}
