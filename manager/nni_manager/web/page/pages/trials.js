/** `/detail`: a table of all trials with sort, filter and search, and charts of the shown trials. */

import { fill, h, say, setAttribute, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { METRIC_PREFIX } from "../metrics.js";
import { flat, shown } from "../parameters.js";
import { plain, short } from "../plain.js";
import { conditionText, OPERATORS } from "../query.js";
import { trialSource, wholeTrials } from "../state/trial_source.js";
import { attempt, notify } from "../widgets/dialog.js";
import { metricTitle, resultName } from "../widgets/facts.js";
import { TrialTable } from "../widgets/table.js";
import { csvOf, saveAs } from "../csv.js";
import { openCompare } from "./compare.js";
import { fragment } from "./page.js";
import { trialDetail } from "./trial_detail.js";
import { TrialCharts } from "./trial_charts.js";

/** @import { Row } from "../types.js" */
/** @import { Condition, Query } from "../query.js" */
/** @import { Column } from "../widgets/table.js" */
/** @import { News } from "../state/live.js" */
/** @import { Context, Page } from "./page.js" */

const STATES = ["RUNNING", "WAITING", "SUCCEEDED", "FAILED", "EARLY_STOPPED", "USER_CANCELED", "SYS_CANCELED"];
/** Number of parameter columns shown by default. */
const FIRST_PARAMETERS = 6;
/** Number of metric columns shown by default. */
const FIRST_METRICS = 3;
/** Redraw interval for the durations of running trials. */
const TICK_MS = 1000;

/** @type {Column[]} */
const OWN_COLUMNS = [
  { id: "seq", title: "No.", width: 72, isNumber: true, text: (row) => format.count(row.seq) },
  { id: "id", title: "Id", width: 100, text: (row) => row.id },
  { id: "state", title: "State", width: 164, text: format.trialState, look: (row) => format.stateLook(row.state) },
  { id: "value", title: "Default metric", width: 140, isNumber: true, text: (row) => format.number(row.value) },
  { id: "latest", title: "Latest report", width: 130, isNumber: true, text: (row) => format.number(row.latest) },
  { id: "count", title: "Reports", width: 96, isNumber: true, text: (row) => format.count(row.count) },
  { id: "start", title: "Started", width: 190, text: (row) => format.moment(row.start) },
  { id: "duration", title: "Duration", width: 120, isNumber: true, text: (row) => format.duration(format.runSeconds(row, Date.now())) },
  { id: "tags", title: "Tags", width: 160, text: (row) => short((row.tags ?? []).join(" "), 200) },
  { id: "note", title: "Note", width: 220, text: (row) => short(row.note ?? "", 200) },
  { id: "reason", title: "Reason", width: 260, text: (row) => short(format.why(row), 200) },
];
const FIRST_COLUMNS = ["seq", "id", "state", "value", "latest", "duration", "reason"];
/** Fewer columns on a narrow screen, the result first. */
const FIRST_COLUMNS_NARROW = ["value", "seq", "state", "duration", "reason"];

/**
 * @param {Context} context
 * @returns {Page}
 */
export function trials({ live, announce }) {
  /** @type {Query} */
  let query = { states: new Set(), text: "", conditions: [], order: { column: "seq", descending: true } };
  /** @type {string[]} */
  let names = [];
  /** @type {string[]} */
  let metrics = [];
  let hasTags = false;
  /** The user's choice; null: the defaults. */
  let chosenColumns = keptColumns(columnsKey(live));
  let wanted = "";
  const isNarrow = matchMedia("(max-width: 700px)").matches;

  const table = new TrialTable({
    label: "Trials",
    order: query.order,
    onOrder: (order) => ask({ ...query, order }),
    onRange: (first, last) => source.need(first, last),
    detail: (row) => trialDetail(row, live),
    onSelect: (selected) => {
      compare.disabled = selected.size < 2;
      say(compare, selected.size > 0 ? `Compare ${format.count(selected.size)}` : "Compare");
      charts.setSelected([...selected]);
    },
  });
  const charts = new TrialCharts(live, (id) => void open(id), (marks) => conditions.add(marks));
  const total = h("span", { class: "muted", "data-test": "table-count", role: "status" });
  const compare = h("button", { type: "button", "data-test": "compare", disabled: true, click: () => {
    void attempt(() => openCompare([...table.selected].map((id) => live.rows.byId.get(id)).filter((row) => row !== undefined), live));
  } }, "Compare");
  const download = h("button", { type: "button", "data-test": "download-csv", click: async () => {
    download.disabled = true;
    await attempt(async () => {
      saveAs("trials.csv", csvOf(await wholeTrials(live, query, source.rows)));
    });
    download.disabled = false;
  } }, "Download CSV");
  const search = h("input", { type: "search", placeholder: "Search id, message, tag:keep", "aria-label": "Search trials", "data-test": "search", input: () => ask({ ...query, text: search.value }) });
  const filters = stateFilters((states) => ask({ ...query, states }));
  const conditions = conditionBar(live, (each) => ask({ ...query, conditions: each }));
  const columnList = h("div", { class: "menu" });
  const columnMenu = h("details", { class: "popup", "data-test": "columns" }, h("summary", {}, "Columns"), columnList);
  columnMenu.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      columnMenu.open = false;
      columnMenu.querySelector("summary")?.focus();
    }
  });

  /** What the charts show. @type {{charted: readonly Row[], isFiltered: boolean | null}} */
  let drawn = { charted: [], isFiltered: null };
  const sampled = h("p", { class: "muted hint", "data-test": "sample-note" });
  let isWindowed = live.isWindowed;
  let source = trialSource(live, query, () => show());

  const element = h("div", { class: "page" },
    charts.element, sampled,
    h("section", { class: "card", "aria-label": "Table of trials" }, h("h2", { class: "unseen" }, "Table of trials"),
      h("div", { class: "bar" }, search, filters.element),
      h("div", { class: "bar" }, conditions.element, h("span", { class: "grow" }), total, columnMenu, download, compare),
      table.element,
      h("p", { class: "muted hint" }, "Keys in the table: ↑ ↓ move, Enter opens a trial, x selects it to compare.")));

  /** @param {Query} now */
  function ask(now) {
    query = now;
    source.ask(query);
  }

  function show() {
    const { rows, charted, total: all } = source;
    setNames(source.names);
    setMetrics(source.metrics);
    setHasTags(source.hasTags);
    say(total, source.isLoading ? "Searching…" : `${format.count(rows.length)} of ${format.counted(all, "trial")}`);
    table.setRows(rows, source.isLoading ? "Loading…" : all === 0 ? "No trial has started yet. Trials appear here automatically." : "No trial matches. Remove a filter to see more.");
    const isFiltered = rows.length < all;
    if (charted !== drawn.charted || isFiltered !== drawn.isFiltered) {
      drawn = { charted, isFiltered };
      charts.setRows(charted, isFiltered);
    }
    sampled.hidden = charted.length >= rows.length;
    say(sampled, `The charts show ${format.count(charted.length)} of ${format.counted(rows.length, "trial")}: evenly chosen, with the best and the improvements.`);
  }

  /** @param {Row} row */
  function waitsFor(row) {
    return short(plain(live.summary?.clusterMessages[row.id] ?? ""), 200);
  }

  function chooseColumns() {
    // The first objective is the column of the trial's value.
    const others = metrics.filter((name) => name !== live.objectives[0]?.metric);
    const isChosen = (/** @type {string} */ id) =>
      chosenColumns?.has(id) ?? ((id === "tags" && hasTags) || (isNarrow ? FIRST_COLUMNS_NARROW : FIRST_COLUMNS).includes(id)
        || (id.startsWith("p:") ? names.slice(0, FIRST_PARAMETERS) : id.startsWith("m:") ? others.slice(0, FIRST_METRICS) : []).includes(id.slice(2)));
    const parameterColumns = [...others.map(metricColumn), ...names.map(parameterColumn)];
    const last = OWN_COLUMNS.slice(-1).map((column) => ({ ...column, text: (/** @type {Row} */ row) => column.text(row) || waitsFor(row) }));
    const own = OWN_COLUMNS.slice(0, -1).map((column) => (column.id === "value" ? { ...column, title: metricTitle(live.objectives) } : column));
    if (isNarrow) own.sort((a, b) => Number(b.id === "value") - Number(a.id === "value"));
    const all = [...own, ...parameterColumns, ...last];
    table.setColumns(all.filter(({ id }) => isChosen(id)));
    fill(columnList, all.map(({ id, title }) => {
      const box = h("input", { type: "checkbox", change: () => {
        chosenColumns ??= new Set(all.map((column) => column.id).filter(isChosen));
        if (!chosenColumns.delete(id)) chosenColumns.add(id);
        keepColumns(columnsKey(live), chosenColumns);
        chooseColumns();
        /** @type {HTMLInputElement | null} */ (columnList.querySelector(`[name="${CSS.escape(id)}"]`))?.focus();
      }, name: id });
      box.checked = isChosen(id);
      return h("label", { class: "check" }, box, title);
    }));
  }
  const setNames = whenChanged((/** @type {string[]} */ found) => {
    names = found;
    conditions.setNames([...found, ...metrics.map((name) => METRIC_PREFIX + name)]);
    charts.setNames(found);
    chooseColumns();
  });
  const setMetrics = whenChanged((/** @type {string[]} */ found) => {
    metrics = found;
    conditions.setNames([...names, ...found.map((name) => METRIC_PREFIX + name)]);
    charts.setMetrics(found);
    chooseColumns();
  });

  const setClusterMessages = whenChanged((/** @type {{[trial: string]: string}} */ _) => table.draw());
  const setHasTags = whenChanged((/** @type {boolean} */ found) => {
    hasTags = found;
    chooseColumns();
  });

  /** @param {News} news */
  function update(news) {
    if (isWindowed !== live.isWindowed) {
      isWindowed = live.isWindowed;
      source.close();
      source = trialSource(live, query, () => show());
      source.ask(query);
    }
    const isChanged = source.update(news);
    filters.update(live.summary?.counts ?? {});
    if (isChanged) show();
    setClusterMessages(live.summary?.clusterMessages ?? {});
    if (wanted !== "") void open(wanted);
  }

  /**
   * Open a trial, and remove the filters that it does not match. False: there is no such trial yet.
   *
   * @param {string} id
   */
  async function open(id) {
    wanted = id;
    try {
      let place = await source.place(id);
      if (place < 0 && wanted === id && (await source.has(id))) {
        filters.set(new Set());
        conditions.clear();
        search.value = "";
        ask({ ...query, states: new Set(), text: "", conditions: [] });
        place = await source.place(id);
      }
      if (place < 0 || wanted !== id) return wanted !== id;
    } catch {
      return true; // the bar at the top reports that the manager does not answer; the next change retries
    }
    wanted = "";
    table.show(id);
    table.element.scrollIntoView({ block: "nearest" });
    announce(`Trial ${live.rows.byId.get(id)?.seq} is open`);
    return true;
  }

  async function arrive() {
    const wish = fragment();
    const state = wish.get("state");
    if (state !== null && STATES.includes(state)) {
      filters.set(new Set([state]));
      ask({ ...query, states: new Set([state]) });
    }
    const trial = wish.get("trial");
    if (trial !== null && !(await open(trial)) && live.summary !== null) notify(`There is no trial ${plain(trial).slice(0, 40)}.`, "bad");
  }

  const tick = setInterval(() => {
    if (!document.hidden && source.rows.some((row) => row?.end === null && row.start !== null)) table.draw();
  }, TICK_MS);
  chooseColumns();
  update({ reset: true, rows: live.rows.all });
  // After the insertion into the document; scrolling has no effect before.
  requestAnimationFrame(() => void arrive());
  return {
    title: "Trials",
    element,
    update,
    arrive: () => void arrive(),
    close() {
      clearInterval(tick);
      source.close();
      table.destroy();
      charts.close();
    },
  };
}

/** @param {import("../state/live.js").Live} live */
function columnsKey(live) {
  return `trial-keeper-columns-${live.summary?.id ?? ""}`;
}

/**
 * The columns that this browser keeps for the experiment; null: none.
 *
 * @param {string} key
 * @returns {Set<string> | null}
 */
function keptColumns(key) {
  try {
    const kept = JSON.parse(localStorage.getItem(key) ?? "null");
    return Array.isArray(kept) ? new Set(kept.map(String)) : null;
  } catch {
    return null; // storage is forbidden, or has another text
  }
}

/**
 * @param {string} key
 * @param {ReadonlySet<string>} columns
 */
function keepColumns(key, columns) {
  try {
    localStorage.setItem(key, JSON.stringify([...columns]));
  } catch {
    // Storage may be forbidden; then the choice applies until the page is closed.
  }
}

/**
 * @param {string} name
 * @returns {Column}
 */
function parameterColumn(name) {
  return { id: `p:${name}`, title: short(name, 40), width: Math.min(220, Math.max(124, 40 + 8 * name.length)), text: (row) => short(shown(flat(row.parameters).get(name)), 80) };
}

/**
 * @param {string} name
 * @returns {Column}
 */
function metricColumn(name) {
  return { id: `m:${name}`, title: short(name, 40), width: Math.min(220, Math.max(124, 40 + 8 * name.length)), isNumber: true, text: (row) => format.number(row.metrics?.[name] ?? null) };
}

/**
 * A button for each possible state, pressed for those that are shown; none pressed shows all.
 *
 * @param {(states: Set<string>) => void} onChange
 */
function stateFilters(onChange) {
  /** @type {Set<string>} */
  let states = new Set();
  const buttons = STATES.map((state) => {
    const figure = h("span", { class: "figure" });
    const button = h("button", { type: "button", class: "chip", "data-look": format.stateLook(state), "aria-pressed": "false", "data-test": `state-filter-${state}`, click: () => {
      const now = new Set(states);
      if (!now.delete(state)) now.add(state);
      set(now);
      onChange(states);
    } }, format.stateWord(state), " ", figure);
    return { state, button, figure };
  });

  /** @param {Set<string>} now */
  function set(now) {
    states = now;
    for (const { state, button } of buttons) setAttribute(button, "aria-pressed", String(states.has(state)));
  }

  /** @param {{[state: string]: number}} counts */
  function update(counts) {
    for (const { state, button, figure } of buttons) {
      const number = counts[state] ?? 0;
      say(figure, format.count(number));
      button.hidden = number === 0 && !states.has(state);
    }
  }
  return { element: h("div", { class: "chips", role: "group", "aria-label": "Filter by state" }, buttons.map(({ button }) => button)), set, update };
}

/**
 * Conditions on parameters: the active ones, each with a remove button, and inputs for a new one.
 *
 * @param {{objectives: {metric: string}[]}} live
 * @param {(conditions: Condition[]) => void} onChange
 */
function conditionBar(live, onChange) {
  /** @type {Condition[]} */
  let conditions = [];
  const name = h("select", { "aria-label": "Parameter", "data-test": "param-filter-name" });
  const operator = h("select", { "aria-label": "Comparison", "data-test": "param-filter-op" }, OPERATORS.map((each) => h("option", { value: each }, each)));
  const value = h("input", { type: "text", size: 8, "aria-label": "Value", placeholder: "value", "data-test": "param-filter-value" });
  const chips = h("span", { class: "chips" });
  const form = h("form", { class: "inline", submit: (/** @type {Event} */ event) => {
    event.preventDefault();
    if (name.value === "" || value.value === "") return;
    set([...conditions, { name: name.value, operator: /** @type {import("../query.js").Operator} */ (operator.value), value: value.value }]);
    value.value = "";
  } }, name, operator, value, h("button", { type: "submit", class: "small", "data-test": "param-filter-add" }, "Add filter"));

  const text = (/** @type {Condition} */ condition) => conditionText(condition, resultName(live.objectives));

  /** @param {Condition[]} now */
  function set(now) {
    conditions = now;
    fill(chips, conditions.map((condition) => h("button", { type: "button", class: "chip", "aria-pressed": "true", "aria-label": `Remove the filter ${text(condition)}`,
      click: () => set(conditions.filter((each) => each !== condition)) },
      `${text(condition)} ×`)));
    onChange(conditions);
  }
  return {
    element: h("div", { class: "inline" }, form, chips),
    /** @param {string[]} names */
    setNames: (names) => {
      form.hidden = names.length === 0;
      const chosen = name.value;
      fill(name, names.map((each) => h("option", { value: each }, short(each, 40))));
      if (names.includes(chosen)) name.value = chosen;
    },
    /** @param {Condition[]} more */
    add: (more) => set([...conditions, ...more]),
    clear: () => set([]),
  };
}

