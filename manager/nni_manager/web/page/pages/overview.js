/** `/oview`: the state, the best results, the failures, and the limits that can be changed. */

import { fill, h, link, say, setAttribute, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { flat } from "../parameters.js";
import { plain, short } from "../plain.js";
import { bestSoFar, endedWithResult, MOST_MARKS, thinned } from "../series.js";
import { ALL_TRIALS } from "../query.js";
import { api, report } from "../state/api.js";
import { Chart, colours, label } from "../widgets/charts.js";
import { attempt, confirm } from "../widgets/dialog.js";
import { badge, card, codeVersion, experimentBadge, facts, resultName, time, topTable, trialLink, trouble, whyNoResult } from "../widgets/facts.js";
import { Sample } from "../state/sample.js";
import { wholeTrials } from "../state/trial_source.js";
import { frontChart } from "./front_chart.js";
import { NoticeBox } from "../widgets/notices.js";
import { RemarksEditor } from "../widgets/remarks.js";

/** @import { Configuration, Row, Summary, Trial } from "../types.js" */
/** @import { Context, Page } from "./page.js" */

const COUNTED = ["SUCCEEDED", "RUNNING", "WAITING", "FAILED", "EARLY_STOPPED", "USER_CANCELED", "SYS_CANCELED"];

/**
 * @param {Context} context
 * @returns {Page}
 */
export function overview({ live, go, notices }) {
  const state = stateCard();
  const limits = limitsCard(live);
  const best = bestCard();
  const problems = h("div", { "data-test": "error-panel", class: "problems" });
  const problemPanel = new NoticeBox(notices, problems, ({ title, text }) => trouble(title, text));
  const topBox = h("div", {});
  const failures = h("div", {});
  const failuresCard = card("Latest failures", { class: "wide" }, failures);
  const about = aboutCard();
  const remarks = new RemarksEditor((change) => api.remark(change), report !== null ? "" : "This view is read-only: `nnictl experiment tag ID --add TAG` and `nnictl experiment note ID --text TEXT` change tags and note.");
  const chart = new Chart("Best result over time", { test: "best-chart", onPoint: (id) => go(`/detail#trial=${encodeURIComponent(id)}`) });

  const front = frontChart((id) => go(`/detail#trial=${encodeURIComponent(id)}`));
  const frontCard = card("Pareto front", { class: "wide" }, front.element);
  const bestOverTime = card("Best result over time", { class: "wide" }, chart.element);
  const topCard = card("Top trials", { class: "wide", aside: link("/detail", {}, "All trials") }, topBox);

  const sample = new Sample(MOST_MARKS, () => drawBest());

  const stop = h("button", { type: "button", class: "danger", "data-test": "stop", click: async () => {
    const isSure = await confirm("Stop this experiment?",
      "Its running trials are stopped, then its manager and this page end. All data stays, and `nnictl resume` resumes the experiment.",
      "Stop the experiment");
    if (isSure) await attempt(api.stop, "The experiment is being stopped.");
  } }, "Stop experiment…");
  const save = h("button", { type: "button", "data-test": "download", click: () => download(live) }, "Download summary");

  const element = h("div", { class: "page grid" },
    problems,
    state.element,
    best.element,
    limits.element,
    frontCard,
    bestOverTime,
    topCard,
    failuresCard,
    card("Tags and note", { class: "wide" }, remarks.element),
    about.element,
    h("div", { class: "buttons wide" }, save, stop));

  const drawTop = whenChanged((/** @type {{trials: Trial[], why: string}} */ { trials, why }) =>
    fill(topBox, trials.length > 0 ? topTable(trials, live.objectives) : h("p", { class: "empty" }, why)));
  const drawFailures = whenChanged((/** @type {{trials: Trial[], failed: number}} */ { trials, failed }) => {
    failuresCard.hidden = trials.length === 0;
    const more = failed - trials.length;
    fill(failures, h("ul", { class: "lines" }, trials.map((trial) =>
      h("li", {}, trialLink(trial.id, `${trial.sequenceId} · ${trial.id}`), " ", badge(trial.state), " ", h("span", { class: "bad-text" }, short(format.why(trial), 300)))),
    more > 0 && h("li", {}, link("/detail#state=FAILED", { "data-test": "more-failures" }, format.counted(more, "more failed trial")))));
  });

  /** Redraws what has changed. */
  function update() {
    const { summary } = live;
    if (summary === null) return;
    tick();
    best.update(summary);
    limits.update(summary);
    remarks.showTags(summary.tags);
    remarks.showNote(summary.note);
    remarks.setReadOnly(live.isReadOnly);
    drawTop({ trials: summary.top, why: whyNoResult(summary) });
    drawFailures({ trials: summary.latestFailures, failed: summary.counts["FAILED"] ?? 0 });
    stop.hidden = live.isReadOnly || ["STOPPED", "STOPPING"].includes(summary.status);
    if (live.isWindowed) sample.refresh();
    else drawBest();
  }
  function drawBest() {
    const { summary } = live;
    chart.note = summary !== null && summary.best === null && format.isTerminal(summary.status) ? whyNoResult(summary) : "The curve begins with the first result.";
    const isFront = live.objectives.length > 1;
    frontCard.hidden = !isFront;
    bestOverTime.hidden = isFront;
    if (isFront && summary !== null) front.update(live.isWindowed ? sample.rows : live.rows.all, summary);
    else chart.draw(() => (live.isWindowed ? bestDrawing(sample.rows, live, sample.results) : bestDrawing(live.rows.all, live)));
  }
  function notice() {
    problemPanel.draw(notices.shown.filter(({ kind }) => kind === "problem"));
  }
  function tick() {
    if (live.summary !== null && !document.hidden) state.update({ ...live.summary, elapsedS: live.elapsedS });
  }
  const clock = setInterval(tick, 1000);
  update();
  notice();
  void about.load();
  return { title: "Overview", element, update, notice, close: () => {
    clearInterval(clock);
    sample.close();
    chart.destroy();
    front.destroy();
  } };
}

/**
 * Download the experiment and all its trials as a file.
 *
 * @param {import("../state/live.js").Live} live
 */
async function download(live) {
  await attempt(async () => {
    const trials = await wholeTrials(live, ALL_TRIALS, live.rows.all);
    const content = { summary: live.summary, profile: await api.profile(), trials };
    const url = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
    h("a", { href: url, download: `${live.summary?.id ?? "experiment"}.json` }).click();
    URL.revokeObjectURL(url);
  });
}

function stateCard() {
  const name = h("p", { class: "title" });
  const stateBox = h("span", { "data-test": "state", "aria-live": "polite" });
  const trialsBar = h("progress", { "data-test": "progress", "aria-label": "Trials ended" });
  const timeBar = h("progress", { "aria-label": "Time used" });
  const trials = h("span", {});
  const elapsed = h("span", {});
  const left = h("span", { "data-test": "time-left" });
  const times = h("div", {});
  const counts = h("ul", { class: "counts", "data-test": "counts", "aria-label": "Trials by state" });
  const element = card("Progress", { class: "two", aside: stateBox },
    name,
    h("div", { class: "bars" }, h("div", {}, trials), trialsBar, h("div", {}, elapsed, left), timeBar),
    counts, times);
  const drawState = whenChanged((/** @type {format.Outcome} */ outcome) => fill(stateBox, experimentBadge(outcome)));
  const drawTimes = whenChanged((/** @type {(number | null)[]} */ [start, end]) =>
    fill(times, facts([["Started", time(start)], ["Ended", time(end)]])));
  const drawCounts = whenChanged((/** @type {{[state: string]: number}} */ numbers) => {
    fill(counts, COUNTED.map((state) => h("li", {},
      link(`/detail#state=${state}`, { "data-look": format.stateLook(state), class: numbers[state] ? null : "none" },
        h("span", { class: "figure", "data-test": `count-${state}` }, format.count(numbers[state] ?? 0)),
        h("span", {}, format.stateWord(state))))));
  });

  /** @param {Summary} summary */
  function update(summary) {
    say(name, plain(summary.name || summary.id));
    drawState(format.outcomeOf(summary));
    drawCounts(summary.counts);
    drawTimes([summary.startTime, summary.endTime]);
    const done = format.ended(summary);
    const { maxTrialNum: most, maxExecDurationS: limit, elapsedS } = summary;
    say(trials, format.endedTrials(summary));
    say(elapsed, limit === null ? `${format.duration(elapsedS)} of running time` : `${format.duration(elapsedS)} of ${format.duration(limit)}`);
    const words = format.timeLeft(summary);
    say(left, words && ` · ${words}`);
    measure(trialsBar, done, most);
    measure(timeBar, elapsedS, limit);
  }
  return { element, update };
}

/**
 * @param {HTMLProgressElement} bar
 * @param {number} value
 * @param {number | null} most  null: no limit, and no bar
 */
function measure(bar, value, most) {
  bar.hidden = most === null;
  if (most !== null) {
    bar.max = Math.max(most, 1);
    bar.value = Math.min(value, most);
  }
}

function bestCard() {
  const value = h("p", { class: "large", "data-test": "best-value" });
  const goal = h("p", { class: "muted" });
  const of = h("div", {});
  const element = card("Best result", {}, value, goal, of);
  const title = element.querySelector("h2");
  const draw = whenChanged((/** @type {{best: Trial | null, why: string}} */ { best, why }) => {
    if (best === null) fill(of, h("p", { class: "muted" }, why));
    else {
      fill(of, h("p", {}, "Trial ", trialLink(best.id, `${best.sequenceId} · ${best.id}`)),
        facts([...flat(best.parameters)].slice(0, 12).map(([name, entry]) => [short(name, 60), short(typeof entry === "number" ? format.number(entry) : String(entry), 80)])));
    }
  });

  /** @param {Summary} summary */
  function update(summary) {
    const { objectives, front } = summary;
    const bound = summary.constraints.length > 0 ? `; ${summary.constraints.map((each) => short(each, 80)).join(", ")}` : "";
    const aims = objectives.map(({ metric, mode }) => `${metric === "default" ? "default metric" : short(metric, 60)}, ${mode === "minimize" ? "lower" : "higher"} is better`);
    say(goal, aims.join("; ") + bound);
    if (objectives.length > 1) {
      if (title !== null) say(title, "Best results");
      say(value, front.count > 0 ? format.counted(front.count, "trial") : "–");
      fill(of, h("p", { class: "muted" }, front.count > 0 ? "on the Pareto front: no other trial is at least as good in every objective and better in one." : whyNoResult(summary)));
      return;
    }
    say(value, format.number(summary.best?.value));
    draw({ best: summary.best, why: whyNoResult(summary) });
  }
  return { element, update };
}

/**
 * @typedef {object} Limit
 * @property {string} key  of the profile's params
 * @property {string} title
 * @property {string} updateType
 * @property {(summary: Summary) => number | null} value
 * @property {boolean} [isTime]
 */

/** @type {Limit[]} */
const LIMITS = [
  { key: "trialConcurrency", title: "Trials at a time", updateType: "TRIAL_CONCURRENCY", value: (summary) => summary.trialConcurrency },
  { key: "maxTrialNum", title: "Trials in all", updateType: "MAX_TRIAL_NUM", value: (summary) => summary.maxTrialNum },
  { key: "maxExecDuration", title: "Running time", updateType: "MAX_EXEC_DURATION", value: (summary) => summary.maxExecDurationS, isTime: true },
];

/** @param {import("../state/live.js").Live} live */
function limitsCard(live) {
  const rows = LIMITS.map((limit) => limitRow(limit, live));
  const element = card("Limits", {}, h("dl", { class: "facts limits" }, rows.flatMap((row) => [row.term, row.element])));
  return { element, update: (/** @type {Summary} */ summary) => rows.forEach((row) => row.update(summary)) };
}

/**
 * A limit with a button that turns it into an input; enter saves it, escape cancels.
 *
 * @param {Limit} limit
 * @param {import("../state/live.js").Live} live
 */
function limitRow(limit, live) {
  const test = `edit-${limit.key === "trialConcurrency" ? "concurrency" : limit.key}`;
  const text = h("span", {});
  const button = h("button", { type: "button", class: "small", "aria-label": `Change: ${limit.title}`, click: edit }, "Change");
  const box = h("dd", { "data-test": test }, text, " ", button);
  let isEdited = false;

  /** @param {number | null} value */
  function words(value) {
    if (value === null) return "no limit";
    return limit.isTime ? format.duration(value) : format.counted(value, "trial");
  }

  function edit() {
    const now = live.summary === null ? null : limit.value(live.summary);
    const hint = limit.isTime ? "such as 90m, 2h or 1.5d; empty: no limit" : limit.key === "maxTrialNum" ? "a number; empty: no limit" : "a number";
    const field = h("input", { type: "text", inputmode: limit.isTime ? "text" : "numeric", "aria-label": `${limit.title}, ${hint}`, placeholder: hint, size: 10 });
    field.value = now === null ? "" : limit.isTime ? `${now}s` : String(now);
    const form = h("form", { class: "inline", submit: (/** @type {Event} */ event) => {
      event.preventDefault();
      void send(field);
    }, keydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") end();
    } }, field, h("button", { type: "submit", class: "small" }, "Set"), h("button", { type: "button", class: "small quiet", click: end }, "Cancel"));
    isEdited = true;
    fill(box, form, h("small", { class: "muted" }, hint));
    field.select();
  }

  /** @param {HTMLInputElement} field */
  async function send(field) {
    const given = field.value.trim();
    const value = given === "" ? null : limit.isTime ? format.seconds(given) : /^\d+$/.test(given) ? Number(given) : Number.NaN;
    const isWrong = (given !== "" && value === null) || Number.isNaN(value) || (value === null && limit.key === "trialConcurrency");
    field.setCustomValidity(isWrong ? `Write ${limit.isTime ? "a time such as 90m or 2h" : "a whole number"}.` : "");
    if (isWrong) {
      field.reportValidity();
      field.addEventListener("input", () => field.setCustomValidity(""), { once: true });
      return;
    }
    if (await attempt(() => api.update(limit.updateType, { [limit.key]: value }), `${limit.title}: ${words(value)}.`)) end(value);
  }

  /** @param {unknown} [value] the new value */
  function end(value) {
    isEdited = false;
    fill(box, text, " ", button);
    if (typeof value === "number") say(text, words(value));
    button.focus();
  }

  return {
    term: h("dt", {}, limit.title),
    element: box,
    /** @param {Summary} summary */
    update(summary) {
      button.hidden = summary.readOnly;
      setAttribute(button, "data-value", limit.value(summary));
      if (!isEdited) say(text, words(limit.value(summary)));
    },
  };
}

function aboutCard() {
  const profileBox = h("div", {}, h("p", { class: "muted" }, "Loading…"));
  const config = h("pre", { tabindex: 0, "data-test": "config-text" });
  const space = h("pre", { tabindex: 0, "data-test": "search-space" });
  const element = card("Experiment", { class: "wide" }, profileBox,
    h("details", {}, h("summary", {}, "Search space"), space),
    h("details", {}, h("summary", {}, "Experiment file"), config));

  async function load() {
    try {
      const configuration = await api.configuration();
      const { text, searchSpace } = configuration;
      fill(profileBox, configurationFacts(configuration));
      say(config, plain(text));
      say(space, plain(typeof searchSpace === "string" ? searchSpace : JSON.stringify(searchSpace, null, 2)));
    } catch (error) {
      fill(profileBox, h("p", { class: "muted" }, `Could not be loaded: ${error instanceof Error ? error.message : error}`));
    }
  }
  return { element, load };
}

/** @param {Configuration} configuration */
function configurationFacts({ id, logDir, description, tuner, assessor, earlyStops, warmStart, trainingService, trial, version }) {
  const perTrial = trial.maxDurationS;
  return facts([
    ["Id", h("code", {}, id)],
    ["Description", plain(description ?? "")],
    ["Tuner", plain(tuner.name)],
    ["Tuner arguments", tuner.classArgs ? h("code", {}, short(JSON.stringify(tuner.classArgs), 500)) : null],
    ["Assessor", assessor && plain(assessor.name)],
    ["Early stops", plain(earlyStops)],
    ["Starts with", warmStart.map(({ source, value }) => plain(`the best of ${source} (${format.number(value)})`)).join(", ")],
    ["Training service", plain(trainingService)],
    ["Command", h("code", {}, plain(trial.command))],
    ["Code", h("code", {}, plain(trial.codeDirectory))],
    ["Code version", codeVersion(trial.codeVersion)],
    ["GPUs per trial", trial.gpuNumber ? format.count(trial.gpuNumber) : null],
    ["Time limit per trial", perTrial === null ? "no limit" : format.duration(perTrial)],
    ["Folder", h("code", {}, plain(logDir))],
    ["trial-keeper", plain(version)],
  ]);
}

/**
 * @param {readonly Row[]} all
 * @param {{maximize: boolean, objectives: {metric: string}[]}} live
 * @param {number} [results]  if `all` is a sample: the number of results that it is from
 */
function bestDrawing(all, { maximize, objectives }, results) {
  const rows = endedWithResult(all);
  const count = results ?? rows.length;
  if (rows.length === 0) return null;
  const colour = colours();
  const corners = bestSoFar(rows, maximize);
  const shownRows = thinned(rows, MOST_MARKS, corners);
  const last = corners[corners.length - 1];
  const x = corners.map((row) => local(Number(row.end)));
  const y = corners.map((row) => row.value);
  const ends = shownRows.reduce((most, row) => Math.max(most, Number(row.end)), 0);
  if (last !== undefined && ends > Number(last.end)) {
    x.push(local(ends));
    y.push(last.value);
  }
  const some = shownRows.length < count ? `; ${format.count(shownRows.length)} of ${format.count(count)} results are drawn` : "";
  return {
    traces: [
      { type: "scatter", mode: "markers", name: "results", x: shownRows.map((row) => local(Number(row.end))), y: shownRows.map((row) => row.value),
        text: shownRows.map((row) => label(`trial ${row.seq} · ${row.id}`)), customdata: shownRows.map((row) => row.id), hovertemplate: "%{text}<br>%{y}<extra></extra>",
        marker: { color: colour["quiet"], size: 6, opacity: 0.55 } },
      { type: "scatter", mode: "lines", name: "best so far", x, y, line: { shape: "hv", color: colour["accent"], width: 2.5 }, hovertemplate: "best %{y}<extra></extra>" },
    ],
    layout: { yaxis: { title: label(resultName(objectives)) }, xaxis: { type: "date" } },
    words: `Best: ${format.number(last?.value)}, trial ${last?.seq ?? ""}; ${format.counted(corners.length, "improvement")} in ${format.counted(count, "result")}${some}.`,
  };
}

/**
 * A time for plotly, without a time zone, so that plotly shows it in the reader's.
 *
 * @param {number} ms
 */
function local(ms) {
  const date = new Date(ms);
  return new Date(ms - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 23);
}
