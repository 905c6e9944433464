import assert from "node:assert/strict";
import { test } from "node:test";
import { asTyped, flat, flatName, namesOf, typed } from "../../manager/nni_manager/web/page/parameters.js";
import { metricNamesOf, withMetric } from "../../manager/nni_manager/web/page/metrics.js";
import { logTicks, scalesOf } from "../../manager/nni_manager/web/page/scales.js";
import { axisOf, bestSoFar, endedWithResult, learningCurve, metricIn, metricNames, nearestLine, otherMetricNames, parallel, reportCount, thinned, top, valued } from "../../manager/nni_manager/web/page/series.js";
import { aRow, seeded } from "./trials.js";

const ROWS = [3, 1, 4, 1, 5].map((value, seq) => aRow({ id: `t${seq}`, seq, value, end: 1000 + seq, parameters: { lr: 10 ** -seq, kind: "ab"[seq % 2], same: 1 } }));

test("the best value so far only improves", () => {
  assert.deepEqual(bestSoFar(ROWS, true).map((row) => row.value), [3, 4, 5]);
  assert.deepEqual(bestSoFar(ROWS, false).map((row) => row.value), [3, 1]);
});

test("running trials are excluded from the best values so far and from the results", () => {
  const running = aRow({ value: 1, end: null });
  assert.deepEqual(bestSoFar([running], true), []);
  assert.deepEqual(endedWithResult([...ROWS, running, aRow()]), ROWS);
});

test("the best percentage of trials has at least one trial and is sorted by value", () => {
  assert.deepEqual(top(ROWS, true, 1).map((row) => row.value), [5]);
  assert.deepEqual(top(ROWS, false, 40).map((row) => row.seq), [1, 3]);
});

test("results without a finite number are not drawn", () => {
  assert.deepEqual(valued([aRow(), aRow({ value: NaN }), aRow({ value: 0 })]).map((row) => row.value), [0]);
});

test("thinning keeps the first and the last point", () => {
  const few = thinned(Array.from({ length: 10_000 }, (_, index) => index), 100);
  assert.deepEqual([few.length, few[0], few[99]], [100, 0, 9999]);
});

test("thinning keeps chosen items in their order", () => {
  const items = Array.from({ length: 10_000 }, (_, index) => index);
  const few = thinned(items, 100, [3, 5001]);
  assert.deepEqual([few.length, few[1], few.includes(5001)], [102, 3, true]);
  assert.deepEqual(few, [...few].sort((a, b) => a - b));
  assert.deepEqual(thinned([1, 2], 100, [2]), [1, 2]);
  assert.deepEqual([thinned([1, 2, 3], 1), thinned([1, 2, 3], 0)], [[1], []]);
});

test("an axis has the given scale, whatever the values are", () => {
  assert.equal(axisOf("lr", [1e-4, 1e-2, 1], "log")?.place(1e-2), 0.5);
  assert.equal(axisOf("lr", [1e-4, 0.5, 1], "linear")?.place(0.50005), 0.5);
  assert.equal(axisOf("lr", [0, 1, 2], "log")?.place(1), 0.5, "a logarithm of 0 does not exist");
  const ticks = [{ at: 0, label: "16", word: "16" }, { at: 0.5, label: "64", word: "64" }, { at: 1, label: "128", word: "128" }];
  assert.deepEqual(axisOf("units", [128, 16, 64], "category")?.ticks, ticks);
});

test("the last axis of parallel coordinates shows the chosen metric, and the shades show the default metric", () => {
  const rows = [3, 1].map((value, seq) => aRow({ id: `t${seq}`, seq, value, end: 1, parameters: { x: seq }, metrics: { loss: 10 * value } }));
  rows.push(aRow({ id: "t2", seq: 2, value: 2, end: 1, parameters: { x: 2 } }));
  const { axes, lineOf } = parallel(rows, rows, ["x"], new Map(), "loss");
  assert.deepEqual(axes.map((axis) => [axis.id, axis.name]), [["x", "x"], ["value/loss", "loss"]]);
  assert.deepEqual(axes[1]?.ticks.map((tick) => tick.label), ["10", "15", "20", "25", "30"]);
  assert.deepEqual(rows.map(lineOf).map(({ heights, shade }) => [...heights, shade]), [[0, 1, 6], [0.5, 0, 0], [1, null, 3]]);
});

test("a chosen metric replaces the default metric", () => {
  const rows = [aRow({ value: 1, metrics: { loss: 2, acc: 3 } }), aRow({ value: 4 })];
  assert.deepEqual(metricNamesOf(rows), ["loss", "acc"]);
  assert.deepEqual(withMetric(rows, "loss").map((row) => row.value), [2, null]);
  assert.equal(withMetric(rows, ""), rows);
});

test("the line of a trial without the parameter passes the tick below the values", () => {
  const axis = axisOf("momentum", [0, undefined, 1]);
  assert.deepEqual(axis?.ticks[0], { at: 0, label: "not chosen" });
  const [none, low = NaN, high] = [undefined, 0, 1].map((value) => axis?.place(value));
  assert.deepEqual([none, low > 0.1, high], [0, true, 1]);
  assert.deepEqual(axis?.ticks.slice(1).map((tick) => tick.label), ["0", "0.25", "0.5", "0.75", "1"]);
});

test("the type of a parameter determines its scale, also in nested choices", () => {
  const space = {
    lr: { _type: "loguniform", _value: [1e-4, 1] },
    momentum: { _type: "uniform", _value: [0, 1] },
    units: { _type: "choice", _value: [16, 32] },
    net: { _type: "choice", _value: [{ _name: "conv", size: { _type: "quniform", _value: [1, 9, 2] }, rate: { _type: "lognormal", _value: [0, 1] } }, { _name: "none" }] },
    mine: { type: "special" },
    list: [1, 2],
  };
  assert.deepEqual([...scalesOf(space)], [["lr", "log"], ["momentum", "linear"], ["units", "category"], ["net", "category"], ["net/size", "linear"], ["net/rate", "log"]]);
  for (const odd of [null, undefined, "text", 7, [], { a: null }]) assert.equal(scalesOf(odd).size, 0);
});

test("a logarithmic axis has from two to ten ticks, whatever its range", () => {
  assert.deepEqual([[1e-4, 1], [1e-5, 1], [1e-12, 1], [0.01, 0.5], [0.012, 0.05], [100, 180]].map(([low, high]) => logTicks(low, high)), [1, 1, 2, "D2", "L0.01", "L20"]);
  const random = seeded(3);
  for (let run = 0; run < 500; run += 1) {
    const low = 10 ** (random() * 16 - 8);
    const high = low * 10 ** (0.01 + random() ** 3 * 12);
    const step = logTicks(low, high);
    const exponents = Array.from({ length: 30 }, (_, index) => Math.floor(Math.log10(low)) + index);
    const ticks = step === "D2" ? exponents.flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power))
      : typeof step === "number" ? exponents.filter((power) => power % step === 0).map((power) => 10 ** power)
        : Array.from({ length: 200 }, (_, index) => (Math.floor(low / Number(step.slice(1))) + index) * Number(step.slice(1)));
    const seen = ticks.filter((tick) => tick >= low && tick <= high).length;
    assert.ok(seen >= 2 && seen <= 10, `${low} to ${high}: ${step} has ${seen}`);
  }
});

test("the _name entry of a nested choice is shown under the name of the choice", () => {
  assert.deepEqual(["lr", "net/_name", "net/units/_name", "net/units", "_name"].map(flatName), ["lr", "net", "net/units", "net/units", "_name"]);
});

test("a constant parameter has no axis, and the axis of a text parameter is sorted", () => {
  assert.equal(axisOf("same", [1, 1]), null);
  assert.deepEqual(axisOf("kind", ["b", "a", true])?.ticks.map((tick) => tick.label), ["a", "b", "true"]);
});

test("parallel coordinates have an axis for each parameter with several values, in the order that the user chose", () => {
  const { axes, lineOf } = parallel(ROWS, ROWS, ["lr", "kind", "same"]);
  assert.deepEqual(axes.map((axis) => axis.name), ["lr", "kind", "default metric"]);
  assert.equal(lineOf(ROWS[0]).heights.length, 3);
  const moved = parallel(ROWS, ROWS, ["lr", "kind"], new Map(), "", ["value/", "gone", "kind"]);
  assert.deepEqual(moved.axes.map((axis) => axis.id), ["value/", "kind", "lr"]);
  assert.deepEqual(moved.lineOf(ROWS[1]).heights.slice(0, 2), [0, 1]);
});

test("the pointer selects the nearest line, or no line if all lines are far away", () => {
  const lines = [[0, 1, 0], [0.5, 0.5, 0.5], [1, null, 1]].map((heights, seq) => ({ row: aRow({ seq }), heights, shade: 0 }));
  const size = { gap: 100, height: 200, slack: 8 };
  const at = (x, y) => nearestLine(lines, { x, y }, size)?.row.seq;
  assert.deepEqual([at(0, 3), at(10, 22), at(25, 100), at(150, 100), at(200, 2), at(-5, 100)], [0, 0, 1, 1, 0, 1]);
  assert.equal(at(50, 150), undefined);
  assert.equal(at(50, 200), undefined, "a trial without a value there has no line there");
  assert.equal(nearestLine([], { x: 0, y: 0 }, size), null);
});

test("an axis converts a position back to its number", () => {
  for (const values of [[1e-4, 1e-2, 1], [1e-4, undefined, 1]]) {
    const axis = axisOf("lr", values, "log");
    for (const value of [1e-4, 3e-3, 1]) assert.ok(Math.abs(axis.valueAt(axis.place(value)) / value - 1) < 1e-9);
    assert.deepEqual([axis.valueAt(axis.bottom), axis.valueAt(1)], [1e-4, 1]);
  }
  assert.equal(axisOf("kind", ["a", "b"]).valueAt, null);
});

test("a metric is parsed as a number or as a dict of numbers", () => {
  const dict = JSON.stringify(JSON.stringify({ default: 0.5, loss: 2, note: "x" }));
  assert.deepEqual(metricNames(dict), ["default", "loss"]);
  assert.equal(metricIn(dict, "loss"), 2);
  assert.equal(metricIn(dict, "note"), null);
  assert.equal(metricIn('"0.25"', "default"), 0.25);
  assert.equal(metricIn('"NaN"', "default"), null);
  assert.equal(metricIn("not JSON", "default"), null);
  assert.deepEqual([metricIn('"true"', "default"), metricIn('{"ok": false}', "ok")], [1, 0]);
});

test("nested choices are flattened", () => {
  const parameters = { net: { _name: "conv", units: { size: 3 } }, list: [1, 2], none: null };
  assert.deepEqual([...flat(parameters)], [["net", "conv"], ["net/units/size", 3], ["list", "[1,2]"], ["none", null]]);
  assert.deepEqual(namesOf([{ parameters }, { parameters: { lr: 1 } }]), ["net", "net/units/size", "list", "none", "lr"]);
});

test("a parameter value is unchanged after a round trip through a text field", () => {
  for (const value of [0.1, "adam", "0.1", true, null, { _name: "conv" }, "", "[", '"']) assert.deepEqual(typed(asTyped(value)), value);
});

test("a NaN in a result does not hide the other numbers of the result", () => {
  const data = JSON.stringify('{"default": 0.5, "loss": NaN, "low": -Infinity, "said \\" NaN": "NaN"}');
  assert.equal(metricIn(data, "default"), 0.5);
  assert.equal(metricIn(data, "loss"), null);
  assert.deepEqual(metricNames(data), ["default", "loss", "low"]);
  assert.equal(metricIn(JSON.stringify("NaN"), "default"), null);
});

test("a NaN in a result that is JSON text without an outer level does not hide the other numbers", () => {
  const data = '{"latency": 5.0, "default": 0.5, "extra": NaN, "f1": 0.7}';
  assert.deepEqual([metricIn(data, "f1"), metricIn(data, "extra")], [0.7, null]);
  assert.deepEqual(metricNames(data), ["latency", "default", "extra", "f1"]);
});

test("every number of a result is shown beside that of the first objective", () => {
  const data = '{"latency": 5.0, "default": 0.5, "f1": 0.7}';
  assert.deepEqual(otherMetricNames(data, [{ metric: "latency" }, { metric: "default" }]), ["default", "f1"]);
  assert.deepEqual(otherMetricNames(data, [{ metric: "default" }]), ["latency", "f1"]);
  assert.deepEqual(otherMetricNames(data, []), ["latency", "f1"]);
  assert.deepEqual(otherMetricNames("0.5", [{ metric: "default" }]), []);
});

test("a learning curve has the place of each report among all reports", () => {
  const records = [4, 3, 2].map((value) => ({ data: JSON.stringify(JSON.stringify({ loss: value })) }));
  assert.deepEqual(learningCurve(records, "loss"), [{ x: 1, y: 4 }, { x: 2, y: 3 }, { x: 3, y: 2 }]);
  assert.deepEqual([reportCount(records), reportCount([])], [3, 0]);
  const chosen = records.map((record, index) => ({ ...record, place: [0, 2000, 4999][index] }));
  assert.deepEqual(learningCurve(chosen, "loss").map(({ x }) => x), [1, 2001, 5000]);
  assert.equal(reportCount(chosen), 5000);
});
