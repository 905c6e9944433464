import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "../../manager/nni_manager/web/page/format.js";
import { aRow } from "./trials.js";

const SUMMARY = { status: "RUNNING", counts: { SUCCEEDED: 10 }, maxTrialNum: 20, elapsedS: 100, maxExecDurationS: null };

test("a metric is shown with six significant digits", () => {
  assert.equal(format.number(0.123456789), "0.123457");
  assert.equal(format.number(1234567), "1,234,567");
  assert.equal(format.number(-0.5), "−0.5");
  assert.equal(format.number(1e-7), "1e−7");
  assert.equal(format.number(1.23456789e-7), "1.2346e−7");
  assert.equal(format.number(-1e300), "−1e+300");
});

test("a missing number is shown as a dash and an infinite number as a symbol", () => {
  assert.deepEqual([null, undefined, NaN, Infinity, -Infinity].map(format.number), ["–", "–", "–", "∞", "−∞"]);
});

test("a duration is shown in its two largest units", () => {
  assert.deepEqual([0.02, 2.34, 59.9, 61, 3600, 3725, 90_000, -5].map(format.duration),
    ["20 ms", "2.3 s", "1 min", "1 min 1 s", "1 h", "1 h 2 min", "1 d 1 h", "0 ms"]);
});

test("a duration is parsed with the units of nnictl", () => {
  assert.deepEqual(["90", "90s", "1.5h", " 2 d ", "30min", "soon", "", "-1"].map(format.seconds), [90, 90, 5400, 172_800, 1800, null, null, null]);
});

test("sizes are shown in binary units", () => {
  assert.deepEqual([0, 1023, 1536, 5 * 2 ** 30, null].map(format.bytes), ["0 bytes", "1,023 bytes", "1.5 KiB", "5.0 GiB", "–"]);
});

test("the remaining time is estimated from the remaining trials", () => {
  assert.equal(format.timeLeft(SUMMARY), "about 1 min 40 s left");
});

test("the time limit is shown if the experiment reaches the time limit first", () => {
  assert.equal(format.timeLeft({ ...SUMMARY, maxExecDurationS: 130 }), "30 s left");
});

test("an ended experiment has no remaining time", () => {
  assert.equal(format.timeLeft({ ...SUMMARY, status: "DONE" }), "");
});

test("the reason of a trial is shown without escape sequences", () => {
  assert.equal(format.why(aRow({ why: "exit code 1: ValueError: \u001b[31mnan\u001b[0m" })), "exit code 1: ValueError: nan");
});

test("a warning is shown after the reason, or alone if there is no reason", () => {
  const warning = "its metrics file was truncated";
  assert.equal(format.why(aRow({ why: "signal 9 (SIGKILL)", warning })), "signal 9 (SIGKILL); its metrics file was truncated");
  assert.equal(format.why(aRow({ warning })), warning);
  assert.equal(format.why(aRow()), "");
});

test("a finished experiment without a best result is shown as a warning, and without a succeeded trial as failed", () => {
  const states = [{}, { bestValue: 0 }, { succeededCount: 0 }, { frontCount: 2 }, { frontCount: 0 }, { status: "RUNNING" }, { trialCount: 0, succeededCount: 0 }]
    .map((fields) => format.experimentState(format.listedOutcome({ id: "a", status: "DONE", trialCount: 3, succeededCount: 2, ...fields })));
  const [good, warning] = [{ look: "good", text: "Done" }, { look: "waiting", text: "Done, no result counts" }];
  assert.deepEqual(states, [warning, good, { look: "bad", text: "Done, 0 of 3 succeeded" }, good, warning, { look: "busy", text: "Running" }, good]);
});

test("a trial count above a lowered limit is not shown as a part of the limit", () => {
  const limits = [20, 10, 2, null].map((maxTrialNum) => format.endedTrials({ ...SUMMARY, maxTrialNum }));
  assert.deepEqual(limits, ["10 of 20 trials ended", "10 of 10 trials ended", "10 trials ended (limit 2)", "10 trials ended"]);
});

test("the page of an ended experiment does not announce further results", () => {
  assert.equal(format.soFar("No trial has started", SUMMARY), "No trial has started yet.");
  assert.equal(format.soFar("No trial has started", { ...SUMMARY, status: "STOPPED" }), "No trial has started.");
});

test("an unknown state is shown unchanged", () => {
  assert.equal(format.stateWord("SOMETHING_NEW"), "SOMETHING_NEW");
  assert.equal(format.stateWord("SYS_CANCELED"), "Out of time");
});

test("a stopping trial shows the time since the stop request", () => {
  const stoppingSince = new Date(2026, 0, 2, 14, 3, 5).getTime();
  assert.equal(format.trialState(aRow({ state: "STOPPING", stoppingSince })), `Stopping since ${format.clock(stoppingSince)}`);
  assert.equal(format.trialState(aRow({ state: "STOPPING" })), "Stopping");
});
