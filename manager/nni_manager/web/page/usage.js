/** The lines of a trial's usage charts: one for each figure of each task, over all attempts. */

import { thinned } from "./series.js";

/** @import { UsageFigures, UsageSample } from "./types.js" */

/** Limits of what one chart, and its legend, can show. */
const MOST_LINES = 12;
const MOST_POINTS = 4000;
const MIB = 2 ** 20;

/**
 * @typedef {{name: string, x: (number | null)[], y: (number | null)[]}} Line  `x` in seconds since the first sample; null: a gap
 * @typedef {(figures: UsageFigures) => number | null} Figure
 */

/**
 * The load in percent (of CPU cores, of a GPU) and the memory in MiB (of the task's processes, of a GPU). CPU and memory of the
 * tasks come first, then GPUs. A line has a gap between two attempts.
 *
 * @param {readonly UsageSample[]} samples  in order of time
 * @returns {{load: Line[], memory: Line[], tasks: number, all: number}}  `all`: the number of lines of each without the limit
 */
export function usageLines(samples) {
  const byTask = tasksOf(samples);
  const from = samples[0]?.timestamp ?? 0;
  /** @type {{task: string, own: readonly UsageSample[], index: number | null}[]} */
  const wanted = [...byTask].map(([task, own]) => ({ task, own, index: null }));
  for (const [task, own] of byTask) wanted.push(...gpusOf(own).map((index) => ({ task, own, index })));
  const shown = wanted.slice(0, MOST_LINES);
  /** @param {string} ofTask @param {string} ofGpu @param {(index: number | null) => Figure} figureOf */
  const lines = (ofTask, ofGpu, figureOf) => shown.map(({ task, own, index }) => ({
    name: (index === null ? ofTask : `GPU ${index}${ofGpu}`) + (byTask.size > 1 ? ` of ${task}` : ""),
    ...points(thinned(own, Math.floor(MOST_POINTS / MOST_LINES)), from, figureOf(index)),
  }));
  return {
    load: lines("CPU", "", (index) => (figures) => (index === null ? figures.cpuPercent : (gpuOf(figures, index)?.utilisationPercent ?? null))),
    memory: lines("memory", " memory", (index) => (figures) => {
      const bytes = index === null ? figures.rssBytes : gpuOf(figures, index)?.memoryUsedBytes;
      return bytes === undefined ? null : bytes / MIB;
    }),
    tasks: byTask.size,
    all: wanted.length,
  };
}

/** @param {readonly UsageSample[]} samples */
function tasksOf(samples) {
  /** @type {Map<string, UsageSample[]>} */
  const byTask = new Map();
  for (const sample of samples) {
    const own = byTask.get(sample.task);
    if (own === undefined) byTask.set(sample.task, [sample]);
    else own.push(sample);
  }
  return byTask;
}

/** @param {readonly UsageSample[]} samples */
function gpusOf(samples) {
  return [...new Set(samples.flatMap(({ gpus }) => gpus.map(({ index }) => index)))].sort((a, b) => a - b);
}

/**
 * @param {UsageFigures} figures
 * @param {number} wanted
 */
function gpuOf({ gpus }, wanted) {
  return gpus.find(({ index }) => index === wanted);
}

/**
 * @param {readonly UsageSample[]} samples
 * @param {number} from
 * @param {Figure} figure
 */
function points(samples, from, figure) {
  /** @type {(number | null)[]} */
  const x = [];
  /** @type {(number | null)[]} */
  const y = [];
  let attempt = samples[0]?.attempt;
  for (const sample of samples) {
    if (sample.attempt !== attempt) {
      x.push(null);
      y.push(null);
      attempt = sample.attempt;
    }
    x.push((sample.timestamp - from) / 1000);
    y.push(figure(sample));
  }
  return { x, y };
}
