/** The content of an open row of the table of trials, and the actions on a trial. */

import { fill, h, say, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { asTyped, typed } from "../parameters.js";
import { plain, short } from "../plain.js";
import { learningCurve, metricIn, metricNames, otherMetricNames, reportCount, thinned } from "../series.js";
import { api, report } from "../state/api.js";
import { usageLines } from "../usage.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { attempt, confirm, copy, notify, openDialog } from "../widgets/dialog.js";
import { badge, codeVersion, facts, metricTitle, parameterTable, time } from "../widgets/facts.js";
import { LogView } from "../widgets/log.js";
import { RemarksEditor } from "../widgets/remarks.js";

/** @import { Metric, Parameters, Row, Trial, UsageFigures, UsageSample } from "../types.js" */
/** @import { Detail } from "../widgets/table.js" */
/** @import { Live } from "../state/live.js" */

const LOOK_EVERY_MS = 5000;
/** Ratio of pause to load time: a trial with 100,000 reports takes long to load, which must not monopolise the manager. */
export const REST_PER_LOAD = 10;

/**
 * @param {Row} first
 * @param {Live} live
 * @returns {Detail}
 */
export function trialDetail(first, live) {
  const { id } = first;
  let row = first;
  let isGone = false;
  /** @type {number | undefined} */
  let timer;
  /** @type {Row | null} */
  let loadedFor = null;
  let loads = 0;

  const factBox = h("div", {});
  const usageBox = h("div", { "data-test": "usage" });
  const parameters = h("div", {});
  const trouble = h("p", { class: "bad-text", role: "status" });
  const curve = new IntermediateChart(live);
  const usageCharts = {
    load: new Chart("CPU and GPU over time", { test: "usage-chart", height: 230 }),
    memory: new Chart("Memory over time", { test: "memory-chart", height: 230 }),
  };
  const remarks = new RemarksEditor((change) => api.remark(change, id),
    report !== null ? "" : `This view is read-only: \`nnictl trial tag --trial-id ${id} --add TAG\` and \`nnictl trial note --trial-id ${id} --text TEXT\` change tags and note.`);
  const log = new LogView(id, () => !format.isEnded(row.state));
  const kill = h("button", { type: "button", class: "danger", "data-test": "kill", click: async () => {
    if (await confirm(`Stop trial ${row.seq}?`, `Trial ${id} is stopped and cannot be resumed; the experiment continues.`, "Stop the trial")) {
      await attempt(() => api.kill(id), `Trial ${row.seq} is being stopped.`);
    }
  } }, "Kill…");
  const retry = h("button", { type: "button", "data-test": "retry", click: () => begun(() => api.retry(id, "start")) }, "Retry");
  const proceed = h("button", { type: "button", "data-test": "retry-from-checkpoint", click: () => begun(() => api.retry(id, "checkpoint")) },
    "Retry from checkpoint");
  let hasCheckpoint = false;
  const clone = h("button", { type: "button", "data-test": "clone", click: async () => openClone(row, await wholeParameters(row)) }, "Clone as customised trial…");
  const copyJson = h("button", { type: "button", "data-test": "copy-json", click: () => copyTrial(id, row) }, "Copy as JSON");

  const element = h("div", { class: "trial", "data-test": `detail-${id}` },
    trouble,
    h("div", { class: "columns" },
      h("section", { "aria-label": "Facts" }, h("h3", {}, `Trial ${first.seq}`), remarks.element, factBox),
      h("section", { "aria-label": "Parameters" }, h("h3", {}, "Parameters"), parameters),
      h("section", { "aria-label": "Intermediate results" }, h("h3", {}, "Intermediate results"), curve.element),
      h("section", { "aria-label": "Usage" }, h("h3", {}, "Usage"), usageBox, usageCharts.load.element, usageCharts.memory.element)),
    report === null ? h("section", { "aria-label": "Logs" }, h("h3", {}, "Logs"), log.element) : null,
    h("div", { class: "buttons" }, copyJson, clone, retry, proceed, kill));

  const drawFacts = whenChanged((/** @type {Trial} */ trial) => fill(factBox, factsOf(trial, live.objectives)));

  const drawParameters = whenChanged((/** @type {Parameters} */ all) => fill(parameters, parameterTable(all)));
  drawParameters(first.parameters);

  async function load() {
    clearTimeout(timer);
    loadedFor = row;
    const number = ++loads;
    const beganAtMs = performance.now();
    try {
      const [trial, attempts, metrics, usage] = await Promise.all([api.trial(id), api.attempts(id), api.intermediates(id), api.usage(id)]);
      if (isGone || number !== loads) return; // closed, or a newer answer follows
      say(trouble, "");
      drawFacts(trial);
      remarks.showNote(trial.note);
      drawParameters(trial.parameters);
      hasCheckpoint = trial.hasCheckpoint ?? false;
      proceed.hidden = retry.hidden || !hasCheckpoint;
      log.setAttempts(attempts);
      curve.show(metrics);
      showUsage(usageBox, usageCharts, trial, usage);
    } catch (error) {
      if (isGone || number !== loads) return;
      say(trouble, error instanceof Error ? error.message : String(error));
    }
    if (!isGone && !format.isEnded(row.state)) {
      timer = window.setTimeout(load, Math.max(LOOK_EVERY_MS, (performance.now() - beganAtMs) * REST_PER_LOAD));
    }
  }

  /** @param {Row} now */
  function update(now) {
    const before = row;
    row = now;
    const isEnded = format.isEnded(row.state);
    // The table draws an unchanged row often, also before the change that the editor has just sent arrives here.
    if (now !== before) remarks.showTags(row.tags ?? []);
    remarks.setReadOnly(live.isReadOnly);
    kill.hidden = isEnded || live.isReadOnly;
    retry.hidden = !isEnded || row.state === "SUCCEEDED" || live.isReadOnly;
    proceed.hidden = retry.hidden || !hasCheckpoint;
    clone.hidden = live.isReadOnly;
    // While the trial runs, the timer reloads. The row of an ended trial changes only with what this shows.
    if (now !== loadedFor && (isEnded || row.note !== before.note)) void load();
  }

  remarks.showTags(first.tags ?? []);
  update(first);
  if (loadedFor === null) void load();
  return {
    element,
    update,
    close() {
      isGone = true;
      clearTimeout(timer);
      log.close();
      curve.close();
      usageCharts.load.destroy();
      usageCharts.memory.destroy();
    },
  };
}

/**
 * @param {Trial} trial
 * @param {{metric: string}[]} objectives
 */
function factsOf(trial, objectives) {
  const run = format.runSeconds({ start: trial.startTime ?? null, end: trial.endTime ?? null }, Date.now());
  const metric = trial.finalMetricData?.[0]?.data;
  const names = metric === undefined ? [] : otherMetricNames(metric, objectives);
  return facts([
    ["State", badge(trial.state, format.trialState(trial))],
    ["Why it ended", trial.how && h("span", { "data-test": "reason" }, plain(trial.how))],
    ["Message", trial.message && message(trial.message, trial.why)],
    ["Warning", trial.warning && h("span", { class: "warn-text" }, short(trial.warning, 2000))],
    [metricTitle(objectives), format.number(trial.value)],
    ["Violates", trial.violates?.map((each) => short(each, 80)).join(", ")],
    ...names.slice(0, 50).map((name) => /** @type {[string, string]} */ ([short(name, 60), format.number(metricIn(metric ?? "", name))])),
    ["Id", h("code", {}, trial.id)],
    ["Submitted", time(trial.submitTime)],
    ["Started", time(trial.startTime)],
    ["Ended", time(trial.endTime)],
    ["Duration", run === null ? null : format.duration(run)],
    ["Attempt", trial.attempt === null ? null : format.count(trial.attempt)],
    ["Retried", trial.retries ? `${format.counted(trial.retries, "time")}, because the cluster lost its job` : null],
    ["Preempted", trial.preemptions ? `${format.counted(trial.preemptions, "time")}, and started again` : null],
    ["Continues", trial.continues ? `trial ${trial.continues}, from its checkpoint` : null],
    ["Parameters from", trial.isCustomized ? "a person, or an earlier experiment" : "the tuner"],
    ["Job", jobOf(trial)],
    ["Transport", trial.transport && transportText(trial.transport, trial.lastContactAgoS)],
    ["Code", codeVersion(trial.provenance?.code)],
    ["Ran on", ranOn(trial)],
    ["Python", pythonOf(trial)],
    ["Log path", trial.logPath && h("code", { "data-test": "log-path" }, plain(trial.logPath))],
  ]);
}

/**
 * The machines of the attempts, without repetitions.
 *
 * @param {Trial} trial
 */
function ranOn(trial) {
  const names = (trial.provenance?.attempts ?? []).map(({ host, node }) => (node && node !== host ? `${host ?? ""} on ${node}` : host ?? ""));
  return short([...new Set(names)].filter(Boolean).join(", "), 500);
}

/**
 * The Python of the newest attempt that has reported one; its packages are loaded when they are opened.
 *
 * @param {Trial} trial
 */
function pythonOf(trial) {
  const { python, packages } = (trial.provenance?.attempts ?? []).filter((each) => each.python).at(-1) ?? {};
  if (!python) return null;
  if (!packages) return short(python, 100);
  const list = h("pre", { tabindex: 0, "data-test": "packages" });
  const box = h("details", {}, h("summary", {}, `${short(python, 100)}, packages`), list);
  box.addEventListener("toggle", () => attempt(async () => {
    if (list.textContent === "") list.textContent = plain((await api.packages(packages)).join("\n"));
  }));
  return box;
}

/**
 * @param {string} text
 * @param {string} why  the same on one line, if known
 */
function message(text, why) {
  const lines = plain(text).trim();
  if (!lines.includes("\n")) return h("div", { class: "scrolled", tabindex: lines.length > 300 ? 0 : null }, short(lines, 2000));
  return h("details", {}, h("summary", {}, short(why || "All of it", 200)), h("pre", { tabindex: 0 }, lines.slice(0, 20_000)));
}

/** @param {Trial} trial */
function jobOf(trial) {
  const { jobId, link } = trial;
  if (!jobId) return null;
  // Only http(s) links: other schemes could run a script.
  if (link && /^https?:\/\//i.test(link)) {
    return h("a", { href: link, rel: "noopener noreferrer", target: "_blank", "data-test": "job-link" }, plain(jobId), " (opens the cluster's page)");
  }
  return h("code", { "data-test": "job-link" }, plain(jobId));
}

/**
 * @param {string} transport
 * @param {number | null} agoS
 */
export function transportText(transport, agoS) {
  /** @type {{[transport: string]: string}} */
  const names = { grpc: "gRPC", shared_storage: "shared storage", none: "none yet" };
  return `${names[transport] ?? plain(transport)}${agoS === null ? "" : `, ${format.duration(agoS)} ago`}`;
}

/**
 * @param {HTMLElement} box
 * @param {{load: Chart, memory: Chart}} charts
 * @param {Trial} trial
 * @param {UsageSample[]} samples
 */
function showUsage(box, charts, trial, samples) {
  const { usage } = trial;
  fill(box, usage === null ? h("p", { class: "muted" }, "Nothing has been reported yet.") : h("table", { class: "plain" },
    h("caption", { class: "unseen" }, "Usage"),
    h("thead", {}, h("tr", {}, h("td", {}), usage.latest ? h("th", { scope: "col" }, "now") : null, h("th", { scope: "col" }, "most"))),
    h("tbody", {}, usageRows(usage.latest, usage.peak))));
  charts.load.element.hidden = charts.memory.element.hidden = samples.length < 2;
  if (samples.length < 2) return;
  const { load, memory, tasks, all } = usageLines(samples);
  const last = Number(samples[samples.length - 1]?.timestamp);
  const duration = format.duration((last - Number(samples[0]?.timestamp)) / 1000);
  const ofTasks = tasks > 1 ? ` of ${format.counted(tasks, "task")}` : "";
  const some = load.length < all ? `; ${load.length} of ${format.counted(all, "line")} are drawn` : "";
  const words = `${format.counted(samples.length, "sample")}${ofTasks} over ${duration}${some}.`;
  charts.load.draw(() => usageDrawing(load, "%", words));
  charts.memory.draw(() => usageDrawing(memory, "MiB", words));
}

/**
 * @param {UsageFigures | null} now
 * @param {UsageFigures} most
 */
function usageRows(now, most) {
  /** @type {[string, (figures: UsageFigures) => string][]} */
  const rows = [
    ["CPU", (figures) => format.percent(figures.cpuPercent)],
    ["Memory", (figures) => format.bytes(figures.rssBytes)],
    ["Disk", (figures) => format.bytes(figures.diskBytes)],
    ...most.gpus.map(({ index }) => /** @type {[string, (figures: UsageFigures) => string]} */ ([`GPU ${index}`, (figures) => {
      const gpu = figures.gpus.find((each) => each.index === index);
      return gpu === undefined ? format.NOTHING : `${format.percent(gpu.utilisationPercent)}, ${format.bytes(gpu.memoryUsedBytes)}`;
    }])),
  ];
  return rows.map(([name, show]) => h("tr", {}, h("th", { scope: "row" }, name), now && h("td", { class: "number" }, show(now)), h("td", { class: "number" }, show(most))));
}

/**
 * @param {import("../usage.js").Line[]} lines
 * @param {string} unit
 * @param {string} words
 */
function usageDrawing(lines, unit, words) {
  const colour = colours();
  return {
    traces: lines.map(({ name, x, y }, index) => ({
      type: "scatter", mode: "lines", name: label(name), x, y, connectgaps: false,
      line: { color: colour[`series-${index % 8}`], dash: index < 8 ? "solid" : "dot" },
    })),
    layout: { showlegend: true, margin: { l: 44, r: 12, t: 8, b: 36 }, xaxis: { title: "s" }, yaxis: { title: unit, rangemode: "tozero" } },
    words,
  };
}

/** The learning curve of one trial, with a selector of the metric if results are dicts. */
class IntermediateChart {
  /** @type {Metric[]} */
  #metrics = [];

  /** @param {{objectives: {metric: string}[]}} live */
  constructor(live) {
    this.live = live;
    this.chart = new Chart("Intermediate results", { test: "intermediate-chart", note: "No intermediate results have been reported.", height: 220 });
    this.chooser = h("select", { "aria-label": "Metric", "data-test": "metric-chooser", change: () => this.#draw() });
    this.chooser.hidden = true;
    this.element = h("div", {}, this.chooser, this.chart.element);
  }

  /** @param {Metric[]} metrics */
  show(metrics) {
    if (metrics.length === this.#metrics.length && metrics.length > 0) return;
    this.#metrics = metrics;
    choose(this.chooser, metrics.slice(-1).flatMap((metric) => metricNames(metric.data)), this.live.objectives[0]?.metric);
    this.#draw();
  }

  close() {
    this.chart.destroy();
  }

  #draw() {
    const name = this.chooser.value || "default";
    const metrics = this.#metrics;
    this.chart.draw(() => {
      const points = learningCurve(metrics, name);
      if (points.length === 0) return null;
      const drawn = thinned(points);
      return {
        traces: [{ type: "scatter", mode: points.length < 100 ? "lines+markers" : "lines", x: drawn.map(({ x }) => x), y: drawn.map(({ y }) => y), line: { color: colours()["accent"] }, marker: { size: 5 } }],
        layout: { xaxis: { title: "report" }, margin: { l: 56, r: 12, t: 8, b: 40 } },
        words: `${format.counted(reportCount(metrics), "report")}, the newest ${format.number(points[points.length - 1]?.y)}.`,
      };
    });
  }
}

/**
 * Offer these names, and keep the current selection.
 *
 * @param {HTMLSelectElement} chooser
 * @param {string[]} names
 * @param {string} [first]  the name that is selected at first, if it is offered
 */
export function choose(chooser, names, first = "default") {
  const unique = [...new Set(names)];
  chooser.hidden = unique.length < 2;
  if (unique.join("\n") === [...chooser.options].map((option) => option.value).join("\n")) return;
  const chosen = chooser.value;
  fill(chooser, unique.map((name) => h("option", { value: name }, short(name, 60))));
  chooser.value = unique.includes(chosen) ? chosen : unique.includes(first) ? first : unique.includes("default") ? "default" : (unique[0] ?? "");
}

/**
 * @param {() => Promise<{sequenceId: number, trialJobId: string}>} action
 */
async function begun(action) {
  let said = "";
  const isDone = await attempt(async () => {
    const { sequenceId, trialJobId } = await action();
    said = `Trial ${sequenceId} (${trialJobId}) starts.`;
  });
  if (isDone) notify(said);
  return isDone;
}

/**
 * @param {string} id
 * @param {Row} row
 */
async function copyTrial(id, row) {
  /** @type {Trial | Row} */
  let trial = row;
  await attempt(async () => {
    trial = await api.trial(id);
  });
  await copy(JSON.stringify(trial, null, 2), `Trial ${row.seq} is on the clipboard as JSON.`);
}

/**
 * The full parameters of a trial; rows have truncated values.
 *
 * @param {Row} row
 * @returns {Promise<Parameters>}
 */
async function wholeParameters(row) {
  let { parameters } = row;
  if (row.cut) {
    await attempt(async () => {
      ({ parameters } = await api.trial(row.id));
    });
  }
  return parameters;
}

/**
 * A form with a field for each parameter, which submits a customized trial.
 *
 * @param {Row} row
 * @param {Parameters} given
 */
function openClone(row, given) {
  const fields = Object.entries(given).map(([name, value]) => {
    const input = h("input", { type: "text", name });
    input.value = asTyped(value);
    return { name, input };
  });
  const form = h("form", { class: "fields", submit: async (/** @type {Event} */ event) => {
    event.preventDefault();
    /** @type {Parameters} */
    const parameters = Object.fromEntries(fields.map(({ name, input }) => [name, typed(input.value)]));
    if (await begun(() => api.propose(parameters))) element.close();
  } },
    h("p", { class: "muted" }, "Values are read as JSON: 0.1, true, \"text\"; what is no JSON is text. The trial is begun ahead of what the tuner proposes."),
    fields.map(({ name, input }) => h("label", {}, h("span", {}, short(name, 80)), input)),
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Start this trial")));
  const { element } = openDialog(`Clone trial ${row.seq}`, [form]);
}
