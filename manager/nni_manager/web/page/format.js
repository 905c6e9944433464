/** Formats numbers, sizes and times for people, with units. */

import { plain } from "./plain.js";

/** @import { KnownExperiment, Row, Summary, Trial } from "./types.js" */

export const NOTHING = "–";

/** @type {{[state: string]: string}} */
const STATE_WORDS = {
  WAITING: "Waiting",
  RUNNING: "Running",
  STOPPING: "Stopping",
  CLOSING: "Closing",
  SUCCEEDED: "Succeeded",
  FAILED: "Failed",
  USER_CANCELED: "Stopped by user",
  SYS_CANCELED: "Out of time",
  EARLY_STOPPED: "Early stopped",
  UNKNOWN: "Unknown",
  INITIALIZED: "Starting",
  NO_MORE_TRIAL: "Finishing its last trials",
  TUNER_NO_MORE_TRIAL: "Finishing: the tuner has no more trials",
  DONE: "Done",
  ERROR: "Error",
  STOPPED: "Stopped",
  UNREADABLE: "Unreadable",
  // States of jobs:
  readying: "Getting ready",
  idle: "Idle",
  busy: "Busy",
  leaving: "Leaving",
  ended: "Ended",
  unknown: "Unknown",
};

const ENDED = ["SUCCEEDED", "FAILED", "USER_CANCELED", "SYS_CANCELED", "EARLY_STOPPED"];
const OVER = ["DONE", "ERROR", "STOPPED"];
const QUIET = ["idle", "ended", "unknown", "UNKNOWN"];

/**
 * The display name of a state of a trial, a job or an experiment.
 *
 * @param {string} state
 */
export function stateWord(state) {
  return STATE_WORDS[state] ?? plain(state);
}

/**
 * The state of a trial, with the time of a stop in progress: "Stopping since 14:03:05".
 *
 * @param {{state: string, stoppingSince?: number | null}} trial
 */
export function trialState(trial) {
  return stateWord(trial.state) + (trial.stoppingSince ? ` since ${clock(trial.stoppingSince)}` : "");
}

/**
 * The style of a state: good, bad, busy, waiting, or quiet for a requested stop.
 *
 * @param {string} state
 */
export function stateLook(state) {
  if (state === "SUCCEEDED" || state === "DONE") return "good";
  if (state === "FAILED" || state === "ERROR" || state === "UNREADABLE") return "bad";
  if (state === "WAITING" || state === "INITIALIZED" || state === "readying") return "waiting";
  return ENDED.includes(state) || OVER.includes(state) || QUIET.includes(state) ? "quiet" : "busy";
}

/** @typedef {{status: string, trials: number, succeeded: number, hasBest: boolean}} Outcome  what the state of an experiment depends on */

/**
 * @param {Summary} summary
 * @returns {Outcome}
 */
export function outcomeOf({ status, trialCount, counts, best, front }) {
  return { status, trials: trialCount, succeeded: counts["SUCCEEDED"] ?? 0, hasBest: best !== null || front.count > 0 };
}

/**
 * The same of an experiment in a list.
 *
 * @param {KnownExperiment} each
 * @returns {Outcome}
 */
export function listedOutcome({ status, trialCount = 0, succeededCount = 0, bestValue, frontCount = 0 }) {
  return { status, trials: trialCount, succeeded: succeededCount, hasBest: bestValue !== undefined || frontCount > 0 };
}

/**
 * The style and the display name of an experiment's state, in the words of `nnictl experiment list`. One that has ended without a
 * best result is not good.
 *
 * @param {Outcome} outcome
 */
export function experimentState({ status, trials, succeeded, hasBest }) {
  const isDone = status === "DONE" && trials > 0;
  if (isDone && succeeded === 0) return { look: "bad", text: `${stateWord(status)}, 0 of ${count(trials)} succeeded` };
  if (isDone && !hasBest) return { look: "waiting", text: `${stateWord(status)}, no result counts` };
  return { look: stateLook(status), text: stateWord(status) };
}

/** @param {string} state of a trial */
export function isEnded(state) {
  return ENDED.includes(state);
}

/** @param {string} status of an experiment */
export function isTerminal(status) {
  return OVER.includes(status);
}

/**
 * A measured number with six significant digits, more for whole numbers.
 *
 * @param {number | null | undefined} value
 */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return count(value);
  const size = Math.abs(value);
  const text = size >= 1e-4 && size < 1e15 ? String(Number(value.toPrecision(6))) : value.toExponential(4).replace(/\.?0+e/, "e");
  return text.replaceAll("-", "−");
}

/**
 * A whole number with thousands separators.
 *
 * @param {number} value
 */
export function count(value) {
  // Not with Intl: creating its first formatter delays the first drawing by tens of milliseconds.
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",").replace("-", "−");
}

/**
 * "1 trial", "12 trials".
 *
 * @param {number} value
 * @param {string} noun
 */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/**
 * A duration in its two largest units.
 *
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NOTHING;
  if (seconds < 0) return duration(0);
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return two(whole, 60, "min", 1, "s");
  if (whole < 86_400) return two(whole, 3600, "h", 60, "min");
  return two(whole, 86_400, "d", 3600, "h");
}

/**
 * @param {number} seconds
 * @param {number} large
 * @param {string} largeName
 * @param {number} small
 * @param {string} smallName
 */
function two(seconds, large, largeName, small, smallName) {
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/**
 * Parse a duration that a person wrote into seconds: "90", "90s", "1.5h", "2d". Null: invalid.
 *
 * @param {string} text
 */
export function seconds(text) {
  const match = /^\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?\s*$/i.exec(text);
  if (match === null) return null;
  /** @type {{[unit: string]: number}} */
  const units = { s: 1, m: 60, min: 60, h: 3600, d: 86_400 };
  return Number(match[1]) * (units[(match[2] ?? "s").toLowerCase()] ?? 1);
}

/**
 * @param {number | null | undefined} value
 */
export function bytes(value) {
  if (value === null || value === undefined) return NOTHING;
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count(size) : size.toFixed(size < 10 ? 1 : 0)} ${units[unit]}`;
}

/** @param {number | null | undefined} value */
export function percent(value) {
  return value === null || value === undefined ? NOTHING : `${number(Math.round(value * 10) / 10)} %`;
}

const momentOf = formatter({ year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const clockOf = formatter({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
const withZone = formatter({ dateStyle: "full", timeStyle: "long" });

/**
 * A formatter of times, created on first use and cached, since its creation takes tens of milliseconds.
 *
 * @param {Intl.DateTimeFormatOptions} options
 * @returns {(ms: number) => string}
 */
function formatter(options) {
  /** @type {Intl.DateTimeFormat | undefined} */
  let made;
  return (ms) => (made ??= new Intl.DateTimeFormat(undefined, options)).format(ms);
}

/**
 * A date and time in the reader's time zone.
 *
 * @param {number | null | undefined} ms
 */
export function moment(ms) {
  return ms === null || ms === undefined ? NOTHING : momentOf(ms);
}

/**
 * The time of day in the reader's time zone.
 *
 * @param {number | null | undefined} ms
 */
export function clock(ms) {
  return ms === null || ms === undefined ? NOTHING : clockOf(ms);
}

/**
 * A date and time with the name of the time zone.
 *
 * @param {number | null | undefined} ms
 */
export function momentWithZone(ms) {
  return ms === null || ms === undefined ? "" : withZone(ms);
}

/**
 * "No trial has started yet.", and of an experiment that has ended "No trial has started."
 *
 * @param {string} text  without the full stop
 * @param {Summary | null} summary
 */
export function soFar(text, summary) {
  return summary !== null && isTerminal(summary.status) ? `${text}.` : `${text} yet.`;
}

/**
 * The number of terminal trials.
 *
 * @param {Summary} summary
 */
export function ended(summary) {
  return ENDED.reduce((sum, state) => sum + (summary.counts[state] ?? 0), 0);
}

/**
 * "3 of 20 trials ended"; of more trials than a limit that was lowered later, "7 trials ended (limit 2)".
 *
 * @param {Summary} summary
 */
export function endedTrials(summary) {
  const done = ended(summary);
  const most = summary.maxTrialNum;
  if (most !== null && done <= most) return `${count(done)} of ${counted(most, "trial")} ended`;
  return `${counted(done, "trial")} ended${most === null ? "" : ` (limit ${count(most)})`}`;
}

/**
 * The estimated remaining time; empty if it is unknown or the experiment is terminal. The earlier of the time limit and the
 * end of all trials at the rate so far.
 *
 * @param {Summary} summary
 */
export function timeLeft(summary) {
  if (isTerminal(summary.status)) return "";
  const trials = ended(summary);
  const most = summary.maxTrialNum;
  const limit = summary.maxExecDurationS;
  const byTrials = most !== null && trials > 0 ? (summary.elapsedS / trials) * Math.max(most - trials, 0) : null;
  if (byTrials !== null && (limit === null || byTrials < limit - summary.elapsedS)) {
    return `about ${duration(byTrials)} left`;
  }
  return limit === null ? "" : `${duration(limit - summary.elapsedS)} left`;
}

/**
 * The reason why a trial ended, on one line, and the manager's warning. Empty while it runs.
 *
 * @param {Pick<Row | Trial, "why" | "warning">} trial
 */
export function why(trial) {
  return [trial.why, trial.warning].filter(Boolean).map((text) => plain(text ?? "")).join("; ");
}

/**
 * The run time of a trial in seconds; null before its start.
 *
 * @param {Pick<Row, "start" | "end">} row
 * @param {number} nowMs
 */
export function runSeconds(row, nowMs) {
  return row.start === null || row.start === undefined ? null : ((row.end ?? nowMs) - row.start) / 1000;
}
