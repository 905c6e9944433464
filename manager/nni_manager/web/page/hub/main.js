/** The page of all experiments: the list with its actions, and the comparison. */

import { BASE, LOGIN_COMMAND } from "../base.js";
import { fill, h, say, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { enter } from "../pages/enter.js";
import { matches, trialsOf } from "../pages/experiments.js";
import { plain, short } from "../plain.js";
import { Refused, session } from "../state/requests.js";
import { attempt, confirm, notify, openDialog } from "../widgets/dialog.js";
import { card, experimentBadge, time } from "../widgets/facts.js";
import { tagList } from "../widgets/remarks.js";
import { api } from "./api.js";
import { Comparison } from "./compare.js";
import { sparkline } from "./sparkline.js";

/** @import { Line } from "./api.js" */

const LOOK_EVERY_MS = 3000;
const MOST_COMPARED = 20;
const TITLES = ["", "Experiment", "Tags", "State", "Best", "Best so far", "Trials", "Platform", "Started", "Time", ""];
const NUMBERS = ["Best", "Trials"];

/** @type {Line[]} */
let known = [];
/** @type {Set<string>} */
const chosen = new Set();
/** The experiments with an action in progress. @type {Set<string>} */
const busy = new Set();
let text = "";
let shown = "all";
/** @type {number | undefined} */
let timer;

const main = h("main", { id: "main", tabindex: -1 });
const trouble = h("p", { class: "bad-text", role: "status", "data-test": "trouble" });
const body = h("tbody");
const note = h("p", { class: "empty" });
const count = h("span", { class: "muted", role: "status", "data-test": "count" });
const search = h("input", { type: "search", "aria-label": "Search experiments", placeholder: "Search id, name, tag:baseline", input: () => {
  text = search.value.toLowerCase();
  draw();
} });
const which = h("select", { "aria-label": "Which experiments", change: () => {
  shown = which.value;
  draw();
} }, h("option", { value: "all" }, "All"), h("option", { value: "running" }, "Running"), h("option", { value: "ended" }, "Not running"));
const comparison = new Comparison();
const compare = h("button", { type: "button", "data-test": "compare", click: () => attempt(() => comparison.show([...chosen])) }, "Compare");
const start = h("button", { type: "button", "data-test": "start", click: openStart }, "Start an experiment…");
const signOut = h("button", { type: "button", class: "quiet", "data-test": "sign-out", click: async () => {
  if (await attempt(session.leave)) location.reload();
} }, "Sign out");
const list = h("div", { class: "page grid" },
  trouble,
  card("Experiments", { class: "wide" },
    h("div", { class: "bar" }, search, which, count, compare, start),
    h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Table of experiments" },
      h("table", { class: "plain lines experiments", "data-test": "experiments" }, h("caption", { class: "unseen" }, "Experiments"),
        h("thead", {}, h("tr", {}, TITLES.map((title) => h("th", { scope: "col", class: NUMBERS.includes(title) ? "number" : null }, title || h("span", { class: "unseen" }, "Actions"))))), body)),
    note),
  comparison.element);

const drawLines = whenChanged((/** @type {{lines: Line[], chosen: string[], busy: string[]}} */ { lines }) => fill(body, lines.map(row)));

function draw() {
  const isShown = matches(text);
  const lines = known.filter((each) => (shown === "all" || (shown === "running") === Boolean(each.managerIsRunning)) && isShown(each));
  // A redraw loses the focus and the selection.
  drawLines({ lines, chosen: [...chosen], busy: [...busy] });
  say(count, `${format.count(lines.length)} of ${format.counted(known.length, "experiment")}`);
  fill(note, lines.length === 0 ? (known.length === 0 ? "There is no experiment yet." : "No experiment matches.") : null);
  compare.disabled = chosen.size < 2 || chosen.size > MOST_COMPARED;
  compare.title = chosen.size > MOST_COMPARED ? `At most ${MOST_COMPARED} at a time` : "Select at least two";
}

/** @param {Line} each */
function row(each) {
  const { id } = each;
  const box = h("input", { type: "checkbox", "aria-label": `Compare ${plain(each.experimentName || id)}`, change: () => {
    if (box.checked) chosen.add(id);
    else chosen.delete(id);
    draw();
  } });
  box.checked = chosen.has(id);
  box.disabled = Boolean(each.problem);
  const points = each.best ?? [];
  const results = (each.trialCount ?? 0) - (each.failedCount ?? 0);
  return h("tr", { "data-test": `experiment-${id}` },
    h("td", {}, box),
    h("td", { class: "named" }, each.problem ? plain(id) : h("a", { href: `${BASE}/experiments/${encodeURIComponent(id)}/oview` }, short(each.experimentName || id, 80)),
      h("div", { class: "muted" }, h("code", {}, plain(id))), each.problem ? h("p", { class: "bad-text" }, short(each.problem, 300)) : null),
    h("td", { class: "tags" }, tagList(each.tags ?? [])),
    h("td", {}, experimentBadge(format.listedOutcome(each))),
    h("td", { class: "number", "data-title": "Best" }, each.frontCount ? `front of ${format.count(each.frontCount)}` : format.number(each.bestValue ?? null)),
    h("td", {}, points.length > 1 ? sparkline(points, results, `${format.counted(points.length, "improvement")}, from ${format.number(points[0]?.[2] ?? null)} to ${format.number(points[points.length - 1]?.[2] ?? null)}`) : null),
    h("td", { class: "number", "data-title": "Trials" }, trialsOf(each)),
    h("td", {}, plain(each.platform ?? "")),
    h("td", { "data-title": "Started" }, time(each.startTime) ?? format.NOTHING),
    h("td", { "data-title": "Time" }, each.durationS === undefined ? format.NOTHING : format.duration(each.durationS)),
    h("td", { class: "last" }, h("div", { class: "buttons" }, actions(each))));
}

/** @param {Line} each */
function actions(each) {
  const { id } = each;
  const name = plain(each.experimentName || id);
  if (busy.has(id)) return [h("span", { class: "muted" }, "Working…")];
  const button = (/** @type {string} */ title, /** @type {() => Promise<void>} */ click, look = "small") =>
    h("button", { type: "button", class: look, "aria-label": `${title} ${name}`, click }, title);
  if (each.managerIsRunning) {
    return [button("Stop", async () => {
      if (await confirm(`Stop ${name}?`, "Its running trials are stopped, then its manager ends. All data stays, and it can be resumed.", "Stop the experiment")) {
        await act(id, () => api.stop(id));
      }
    })];
  }
  return [
    each.problem ? null : button("Resume", () => act(id, () => api.resume(id))),
    button("Delete", async () => {
      if (await confirm(`Delete ${name}?`, `All results and logs of experiment ${id} are deleted. Your code is kept.`, "Delete the experiment")) {
        chosen.delete(id);
        await act(id, () => api.remove(id));
      }
    }, "small danger"),
  ].filter((made) => made !== null);
}

/**
 * @param {string} id
 * @param {() => Promise<{message: string}>} action
 */
async function act(id, action) {
  busy.add(id);
  draw();
  let message = "";
  const isDone = await attempt(async () => {
    ({ message } = await action());
  });
  if (isDone) notify(message || "Done.");
  // Until the new list has arrived, the row must not show the buttons of the old state.
  await look();
  busy.delete(id);
  draw();
}

function openStart() {
  const field = h("input", { type: "text", name: "config", "aria-label": "Experiment file", placeholder: "/home/me/digits/config.yml", size: 50, required: true });
  const form = h("form", { class: "fields", submit: async (/** @type {Event} */ event) => {
    event.preventDefault();
    send.disabled = true;
    const isDone = await attempt(async () => {
      const { message } = await api.create(field.value.trim());
      notify(message || "The experiment runs.");
    });
    send.disabled = false;
    if (isDone) element.close();
    await look();
  } },
    h("p", { class: "muted" }, "The path of an experiment file on the machine of this server, as for `nnictl create`."),
    h("label", {}, h("span", {}, "Experiment file"), field));
  const send = h("button", { type: "submit", class: "primary" }, "Start");
  form.append(h("div", { class: "buttons" }, send));
  const { element } = openDialog("Start an experiment", [form]);
  field.focus();
}

async function look() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      known = await api.all();
      say(trouble, "");
      if (main.firstChild !== list) fill(main, list);
      draw();
      document.documentElement.dataset["ready"] = "true";
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) return fill(main, locked());
      say(trouble, error instanceof Refused ? error.message : `The server of this page does not answer; experiments continue. It retries automatically. \`${LOGIN_COMMAND}\` starts it again.`);
      if (main.firstChild === null) fill(main, list);
    }
  }
  timer = window.setTimeout(look, LOOK_EVERY_MS);
}

function locked() {
  document.documentElement.dataset["ready"] = "true";
  return h("div", { class: "page narrow", "data-test": "locked" }, h("section", { class: "card" },
    h("h1", {}, "This page needs a login link"),
    h("p", {}, "Run ", h("code", {}, LOGIN_COMMAND), " on the machine of the experiments, and open the link that it prints. It lets in this browser alone.")));
}

document.body.append(
  h("div", { class: "top" }, h("header", { "data-test": "app" }, h("div", { class: "brand" }, h("span", { class: "name" }, "Experiments")), h("div", { class: "status" }, signOut))),
  main);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void look();
});
if (location.pathname === `${BASE}/enter`) {
  const go = () => {
    history.replaceState(null, "", `${BASE}/all`);
    fill(main, list);
    void look();
  };
  const page = enter(/** @type {any} */ ({ live: { start: () => undefined }, go }));
  fill(main, page.element);
} else void look();
