/** Small elements that several pages share. */

import { h, link } from "../dom.js";
import { count, experimentState, moment, momentWithZone, number, soFar, stateLook, stateWord } from "../format.js";
import { flat, oneLine, shown } from "../parameters.js";
import { plain, short } from "../plain.js";

/** @import { Child } from "../dom.js" */
/** @import { Outcome } from "../format.js" */
/** @import { CodeVersion, Parameters, Summary } from "../types.js" */

/**
 * A badge with the style of a state, and its name unless there is a text.
 *
 * @param {string} state
 * @param {string} [text]
 */
export function badge(state, text = stateWord(state)) {
  return h("span", { class: "badge", "data-look": stateLook(state) }, text);
}

/**
 * The badge of an experiment.
 *
 * @param {Outcome} outcome
 */
export function experimentBadge(outcome) {
  const { look, text } = experimentState(outcome);
  return h("span", { class: "badge", "data-look": look }, text);
}

/**
 * A text in which parts between backticks are commands.
 *
 * @param {string} text
 * @returns {Child[]}
 */
export function prose(text) {
  return plain(text).split("`").map((part, index, all) => (index % 2 === 1 && index < all.length - 1 ? h("code", {}, part) : index % 2 === 1 ? `\`${part}` : part));
}

/**
 * A list of names and values; entries with a null value are omitted.
 *
 * @param {[string, Child][]} entries
 */
export function facts(entries) {
  return h("dl", { class: "facts" }, entries
    .filter(([, value]) => value !== null && value !== undefined && value !== false && value !== "")
    .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/**
 * A time in the reader's time zone; the tooltip has the name of the zone.
 *
 * @param {number | null | undefined} ms
 */
export function time(ms) {
  if (ms === null || ms === undefined) return null;
  return h("time", { datetime: new Date(ms).toISOString(), title: momentWithZone(ms) }, moment(ms));
}

/**
 * The commit of the training code, and the digest of its folder.
 *
 * @param {CodeVersion | null | undefined} code
 */
export function codeVersion(code) {
  if (!code || !(code.gitCommit || code.digest)) return null;
  const { gitCommit, isDirty, digest } = code;
  return h("span", { "data-test": "code-version" },
    gitCommit && ["commit ", h("code", { title: plain(gitCommit) }, short(gitCommit, 12)), isDirty ? " with changes" : "", digest ? ", " : ""],
    digest && ["content ", h("code", {}, short(digest, 16))]);
}

/**
 * A link to a trial in the list of trials.
 *
 * @param {string} id
 * @param {string} [text]
 */
export function trialLink(id, text = id) {
  return link(`/detail#trial=${encodeURIComponent(id)}`, {}, text);
}

/**
 * Parameters as a table, for an open row.
 *
 * @param {Parameters} parameters
 */
export function parameterTable(parameters) {
  const rows = [...flat(parameters)].map(([name, value]) =>
    h("tr", {}, h("th", { scope: "row" }, short(name, 200)), h("td", {}, short(shown(value), 2000))));
  if (rows.length === 0) return h("p", { class: "muted" }, "This trial has no parameters.");
  return h("table", { class: "plain", "data-test": "parameters" }, h("caption", { class: "unseen" }, "Parameters"), h("tbody", {}, rows));
}

/**
 * The title of the number of a trial: the metric of the first objective.
 *
 * @param {{metric: string}[]} objectives
 */
export function metricTitle(objectives) {
  const metric = objectives[0]?.metric ?? "default";
  return metric === "default" ? "Default metric" : short(metric, 40);
}

/**
 * The same within a sentence, or as the title of an axis.
 *
 * @param {{metric: string}[]} objectives
 */
export function resultName(objectives) {
  return metricTitle(objectives).replace(/^Default metric$/, "default metric");
}

/**
 * The reason why no trial has a result to show.
 *
 * @param {Summary | null} summary
 */
export function whyNoResult(summary) {
  if (summary === null) return soFar("No trial has reported a final result", summary);
  const hasResult = (summary.counts["SUCCEEDED"] ?? 0) > 0 && !summary.latestWithoutResult;
  if (hasResult && summary.constraints.length > 0 && summary.best === null && summary.front.count === 0) return "Every result violates a constraint.";
  if (!summary.latestWithoutResult) return soFar("No trial has reported a final result", summary);
  return `No final result has a number for ${summary.objectives.length > 1 ? "each objective" : `the ${resultName(summary.objectives).replace(/^(?!default metric$)/, "objective ")}`}.`;
}

/**
 * The best trials with their parameters.
 *
 * @param {{id: string, sequenceId: number, value: number | null, values?: number[], parameters: Parameters}[]} trials
 * @param {{metric: string}[]} objectives  with several, a column for each, and no ranks
 */
export function topTable(trials, objectives) {
  const several = objectives.length > 1;
  const titles = several ? objectives.map(({ metric }) => short(metric, 40)) : [metricTitle(objectives)];
  const head = [...(several ? [] : ["Rank"]), "Trial", ...titles, "Parameters"].map((title) =>
    h("th", { scope: "col", class: titles.includes(title) ? "number" : null }, title));
  const rows = trials.map((trial, index) => h("tr", {},
    several ? null : h("td", {}, count(index + 1)),
    h("td", {}, trialLink(trial.id, `${trial.sequenceId} · ${trial.id}`)),
    ...(several ? trial.values ?? [] : [trial.value]).map((value) => h("td", { class: "number" }, number(value))),
    h("td", { class: "grow" }, short(oneLine(trial.parameters), 300))));
  return h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Table of top trials" },
    h("table", { class: "plain lines", "data-test": "top-trials" },
      h("caption", { class: "unseen" }, "Top trials"), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}

/**
 * A heading with its content in a box.
 *
 * @param {string} title
 * @param {{class?: string, aside?: Child}} options
 * @param {...(Child | Child[])} children
 */
export function card(title, options, ...children) {
  return h("section", { class: `card ${options.class ?? ""}`, "aria-label": title },
    h("header", {}, h("h2", {}, title), options.aside ?? null), ...children);
}

/**
 * A problem and its remedy.
 *
 * @param {string} title
 * @param {string} text  may have several lines
 */
export function trouble(title, text) {
  const lines = plain(text).trim().split("\n");
  const rest = lines.slice(1).join("\n");
  return h("div", { class: "trouble dismissible", "data-test": "problem" }, h("div", { class: "text" },
    h("strong", {}, title), h("p", {}, prose(lines[0] ?? "")),
    rest && h("details", { open: true }, h("summary", {}, "All of it"), h("pre", { tabindex: 0 }, rest))));
}
