import assert from "node:assert/strict";
import { test } from "node:test";
import { isMarked, markOf, markText, moved, spanOf } from "../../manager/nni_manager/web/page/marks.js";
import { arrange, conditionText } from "../../manager/nni_manager/web/page/query.js";
import { axisOf } from "../../manager/nni_manager/web/page/series.js";
import { aRow, seeded } from "./trials.js";

const LR = axisOf("lr", [1e-4, 1e-2, 1], "log");
const KIND = axisOf("kind", ["a", "b", "c", undefined]);
const MOMENTUM = axisOf("momentum", [0, 1, undefined]);
const near = (one, other) => Math.abs(one - other) < 0.003;

test("a mark contains the numbers between both ends of a drag in either direction", () => {
  for (const mark of [markOf(LR, 0.25, 0.5), markOf(LR, 0.5, 0.25)]) {
    assert.deepEqual([1e-4, 2e-3, 1e-2, 2e-2, undefined, "a"].map((value) => isMarked(mark, value)), [false, true, true, false, false, false]);
    assert.deepEqual(spanOf(LR, mark)?.map((at) => Math.round(at * 1000)), [250, 500]);
    assert.equal(markText(mark), "lr 0.001 to 0.01");
  }
  assert.deepEqual([1e-4, 1].map((value) => isMarked(markOf(LR, -0.1, 1.2), value)), [true, true], "the outermost trials too");
});

test("a mark keeps its values when new results extend the axis", () => {
  const mark = markOf(LR, 0.5, 1);
  const longer = axisOf("lr", [1e-4, 1e4], "log");
  assert.deepEqual(spanOf(longer, mark)?.map((at) => Math.round(at * 1000)), [250, 500]);
  assert.deepEqual(spanOf(axisOf("lr", [0, 1], "log"), { ...mark, low: -1 }), [0, 1], "an end off the axis is drawn at its end");
});

test("a drag marks the categories nearest to its ends and all categories between", () => {
  assert.deepEqual(markOf(KIND, 0.3, 0.7).words, ["a", "b"]);
  assert.deepEqual(markOf(KIND, 0.97, 0.99).words, ["c"]);
  const mark = markOf(KIND, 0, 0.2);
  assert.deepEqual([mark.words, mark.notChosen, markText(mark)], [["a"], true, "kind a, not chosen"]);
  assert.deepEqual(spanOf(KIND, mark), [0, KIND.place("a")]);
  assert.equal(spanOf(axisOf("kind", ["b", "c"]), mark), null, "nothing of it is on this axis");
  assert.equal(isMarked(markOf(axisOf("batch", [16, 64], "category"), 0.9, 1), 64), true);
});

test("trials without the parameter are marked at the tick below the values", () => {
  const [below, across, above] = [[0, 0.1], [0, 0.6], [0.16, 0.6]].map(([from, to]) => markOf(MOMENTUM, from, to));
  assert.deepEqual([below, across, above].map((mark) => [isMarked(mark, undefined), isMarked(mark, 0), isMarked(mark, 1)]),
    [[true, false, false], [true, true, false], [false, true, false]]);
  assert.deepEqual(spanOf(MOMENTUM, below), [0, 0]);
  assert.equal(markText(below), "momentum not chosen");
});

test("a key moves one end of a mark by a step, and a mark of the whole axis is removed", () => {
  let mark = moved(LR, undefined, "low", 1);
  assert.ok(near(spanOf(LR, mark)[0], 0.05) && spanOf(LR, mark)[1] === 1);
  mark = moved(LR, mark, "high", -1);
  assert.ok(near(spanOf(LR, mark)[1], 0.95));
  assert.equal(moved(LR, moved(LR, mark, "low", -1), "high", 1), null);
  assert.equal(moved(LR, undefined, "low", -1), null);
  assert.deepEqual(moved(KIND, undefined, "low", 1).words, ["a", "b", "c"]);
  assert.deepEqual(moved(KIND, moved(KIND, undefined, "low", 1), "high", -1).words, ["a", "b"]);
});

test("keys can move a mark to the end of every axis and never swap its ends", () => {
  const random = seeded(7);
  for (const axis of [LR, KIND, MOMENTUM, axisOf("narrow", [0.99951, 0.99953])]) {
    let mark = null;
    for (let press = 0; press < 300; press += 1) {
      mark = moved(axis, mark ?? undefined, random() < 0.5 ? "low" : "high", random() < 0.5 ? 1 : -1);
      const span = mark && spanOf(axis, mark);
      assert.ok(mark === null || (span[0] <= span[1] && span[0] >= 0 && span[1] <= 1), JSON.stringify([axis.id, mark]));
    }
    mark = null;
    for (let press = 0; press < 25; press += 1) mark = moved(axis, mark ?? undefined, "low", 1);
    assert.ok(spanOf(axis, mark)[0] > 1 - 1e-9, axis.id);
  }
});

test("a mark of a parameter or of a result filters the trials", () => {
  const rows = [0.5, null, 0.9].map((value, seq) => aRow({ id: `t${seq}`, seq, value, parameters: seq === 0 ? {} : { lr: 0.1 }, metrics: { loss: seq } }));
  const found = (...conditions) => arrange(rows, { states: new Set(), text: "", conditions, order: { column: "seq", descending: false } }).map((row) => row.seq);
  const none = { low: 0, high: -1, words: [], notChosen: false };
  assert.deepEqual(found({ ...none, name: "value/", low: -Infinity, high: Infinity }), [0, 2]);
  assert.deepEqual(found({ ...none, name: "value/loss", low: 1, high: 2 }), [1, 2]);
  assert.deepEqual(found({ ...none, name: "lr", notChosen: true }), [0]);
  assert.deepEqual(found({ ...none, name: "lr", low: 0, high: 1 }, { name: "value/", operator: ">", value: "0.6" }), [2]);
  assert.equal(conditionText({ ...none, name: "value/", low: -Infinity, high: Infinity }), "default metric any number");
  assert.equal(conditionText({ name: "lr", operator: "<", value: "1" }), "lr < 1");
});
