/** `/jobs`: the jobs on the cluster, their keepers with versions, and the transport of each; and the GPUs of this machine. */

import { fill, h, say, whenChanged } from "../dom.js";
import * as format from "../format.js";
import { plain, short } from "../plain.js";
import { api } from "../state/api.js";
import { badge, card, time, trialLink } from "../widgets/facts.js";
import { listPage } from "./list_page.js";

/** @import { Gpu, Job } from "../types.js" */
/** @import { Context, Page } from "./page.js" */

/** Maximum number of listed trials of one job; a reused job may have run hundreds. */
const MOST_NAMED = 5;
const TITLES = ["Job", "Trials", "State", "Created", "Ended", "Transport", "Last contact", "Keepers"];
const CONTACT = TITLES.indexOf("Last contact");

/**
 * @param {Context} _
 * @returns {Page}
 */
export function jobs(_) {
  const body = h("tbody");
  const note = h("p", { class: "empty" });
  const total = h("span", { class: "muted" });
  const box = card("Jobs", { aside: total },
    h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Table of jobs" },
      h("table", { class: "plain lines", "data-test": "jobs" }, h("caption", { class: "unseen" }, "Jobs"),
        h("thead", {}, h("tr", {}, TITLES.map((title) => h("th", { scope: "col" }, title)))), body)), note);
  const gpuBody = h("tbody");
  const gpuBox = card("GPUs", {},
    h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Table of GPUs" },
      h("table", { class: "plain lines", "data-test": "gpus" }, h("caption", { class: "unseen" }, "GPUs"),
        h("thead", {}, h("tr", {}, ["GPU", "Trials", "Load", "Memory"].map((title) => h("th", { scope: "col" }, title)))), gpuBody)));
  gpuBox.hidden = true;
  const drawGpus = whenChanged((/** @type {Gpu[]} */ found) => {
    gpuBox.hidden = found.length === 0;
    fill(gpuBody, found.map(gpuLine));
  });
  /** The jobs whose log is shown, because a changed job draws all lines again. @type {Set<string>} */
  const opened = new Set();
  const drawLines = whenChanged((/** @type {Job[]} */ found) => fill(body, found.map((job) => line(job, opened))));
  return listPage("Jobs", [gpuBox, box], async () => {
    const [found, gpus] = await Promise.all([api.jobs(), api.gpus()]);
    drawGpus(gpus);
    // The contact time changes with each poll and is drawn separately: a redraw loses the focus and the selection.
    drawLines(found.map((job) => ({ ...job, lastContactAgoS: null })));
    found.forEach(({ lastContactAgoS }, index) => {
      const cell = body.children[index]?.children[CONTACT];
      if (cell) say(cell, lastContactAgoS === null ? format.NOTHING : `${format.duration(lastContactAgoS)} ago`);
    });
    fill(total, format.counted(found.length, "job"));
    fill(note, found.length === 0 ? "There is no job now. Each trial starts in a job." : null);
  });
}

/** @param {Gpu} gpu */
function gpuLine({ index, trialIds, hasOtherPrograms, utilisationPercent, memoryUsedBytes }) {
  const use = hasOtherPrograms === null ? format.NOTHING : hasOtherPrograms ? "other programs" : "free";
  return h("tr", {},
    h("td", {}, format.count(index)),
    h("td", {}, trialIds.length > 0 ? trialIds.flatMap((id, at) => [at > 0 ? ", " : "", trialLink(id)]) : h("span", { class: "muted" }, use)),
    h("td", {}, format.percent(utilisationPercent)),
    h("td", {}, format.bytes(memoryUsedBytes)));
}

/**
 * @param {Job} job
 * @param {Set<string>} opened  the ids of the jobs whose log is shown
 */
function line({ jobId, trialIds, trialCount = trialIds.length, state, created, ended, transport, keepers, link, hasLog }, opened) {
  const isEnded = typeof ended === "number";
  const named = trialIds.slice(-MOST_NAMED);
  const more = trialCount - named.length;
  /** @type {{[transport: string]: string}} */
  const transports = { grpc: "gRPC", shared_storage: "Shared storage", none: "Not yet" };
  const name = link && /^https?:\/\//i.test(link)
    ? h("a", { href: link, rel: "noopener noreferrer", target: "_blank" }, plain(jobId), " (opens the cluster's page)")
    : h("code", {}, plain(jobId));
  return h("tr", {},
    h("td", {}, name, hasLog && logOf(jobId, opened)),
    h("td", {}, named.flatMap((id, index) => [index > 0 ? ", " : "", trialLink(id)]), more > 0 ? ` and ${format.count(more)} more` : ""),
    h("td", {}, badge(state)),
    h("td", {}, time(created) ?? format.NOTHING),
    h("td", {}, time(ended) ?? format.NOTHING),
    h("td", {}, transport === null || isEnded ? format.NOTHING : (transports[transport] ?? plain(transport))),
    h("td"),
    h("td", {}, keepers.length === 0 ? h("span", { class: "muted" }, isEnded ? format.NOTHING : "none connected") : h("ul", { class: "bare" }, keepers.map((keeper) =>
      h("li", {}, `${short(keeper.task, 60)}: version ${short(keeper.version, 40)}${keeper.address ? `, ${short(keeper.address, 80)}` : ""}`)))));
}

/**
 * The end of a job's log, which is read each time it is opened.
 *
 * @param {string} jobId
 * @param {Set<string>} opened
 */
function logOf(jobId, opened) {
  const text = h("div");
  const box = h("details", { open: opened.has(jobId), "data-test": `job-log-${jobId}` }, h("summary", {}, "Log"), text);
  box.addEventListener("toggle", async () => {
    if (!box.open) {
      opened.delete(jobId);
      return;
    }
    opened.add(jobId);
    fill(text, h("p", { class: "muted" }, "Loading"));
    try {
      const found = await api.jobLog(jobId);
      fill(text, found.length === 0 && h("p", { class: "muted" }, "The job has no tasks yet."), found.flatMap(({ task, text: end }) =>
        [h("p", { class: "muted" }, plain(task)), h("pre", { tabindex: 0, role: "region", "aria-label": `Log of ${task}` }, plain(end))]));
    } catch (error) {
      fill(text, h("p", { class: "bad-text" }, error instanceof Error ? error.message : String(error)));
    }
  });
  return box;
}
