import assert from "node:assert/strict";
import { test } from "node:test";
import { asTyped, flat, namesOf, typed } from "../../manager/nni_manager/web/page/parameters.js";
import { axisOf, bestSoFar, metricIn, metricNames, parallel, thinned, top, valued } from "../../manager/nni_manager/web/page/series.js";
import { aRow } from "./trials.js";

const ROWS = [3, 1, 4, 1, 5].map((value, seq) => aRow({ id: `t${seq}`, seq, value, end: 1000 + seq, parameters: { lr: 10 ** -seq, kind: "ab"[seq % 2], same: 1 } }));

test("the best value so far only improves", () => {
  assert.deepEqual(bestSoFar(ROWS, true).map((row) => row.value), [3, 4, 5]);
  assert.deepEqual(bestSoFar(ROWS, false).map((row) => row.value), [3, 1]);
});

test("running trials are not in the best values so far", () => {
  assert.deepEqual(bestSoFar([aRow({ value: 1, end: null })], true), []);
});

test("the best share has at least one trial, sorted by value", () => {
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

test("values over several orders of magnitude have a logarithmic axis", () => {
  const axis = axisOf("lr", [1e-4, 1e-2, 1]);
  assert.equal(axis?.place(1e-2), 0.5);
  assert.equal(axis?.place(undefined), null);
});

test("a constant has no axis, and texts have a sorted one", () => {
  assert.equal(axisOf("same", [1, 1]), null);
  assert.deepEqual(axisOf("kind", ["b", "a", true])?.ticks.map((tick) => tick.label), ["a", "b", "true"]);
});

test("each line of the parallel coordinates ends with a gap", () => {
  const { axes, shades } = parallel(ROWS, ROWS, ["lr", "kind", "same"]);
  assert.deepEqual(axes.map((axis) => axis.name), ["lr", "kind", "default metric"]);
  assert.equal(shades.flat().length, ROWS.length * (axes.length + 1));
  for (const shade of shades) for (let at = axes.length; at < shade.length; at += axes.length + 1) assert.equal(shade[at], null);
});

test("a metric is parsed as a number or as a dict of numbers", () => {
  const dict = JSON.stringify(JSON.stringify({ default: 0.5, loss: 2, note: "x" }));
  assert.deepEqual(metricNames(dict), ["default", "loss"]);
  assert.equal(metricIn(dict, "loss"), 2);
  assert.equal(metricIn(dict, "note"), null);
  assert.equal(metricIn('"0.25"', "default"), 0.25);
  assert.equal(metricIn('"NaN"', "default"), null);
  assert.equal(metricIn("not JSON", "default"), null);
});

test("nested choices are flattened", () => {
  const parameters = { net: { _name: "conv", units: { size: 3 } }, list: [1, 2], none: null };
  assert.deepEqual([...flat(parameters)], [["net", "conv"], ["net/units/size", 3], ["list", "[1,2]"], ["none", null]]);
  assert.deepEqual(namesOf([{ parameters }, { parameters: { lr: 1 } }]), ["net", "net/units/size", "list", "none", "lr"]);
});

test("a parameter survives a round trip through its text field", () => {
  for (const value of [0.1, "adam", "0.1", true, null, { _name: "conv" }, "", "[", '"']) assert.deepEqual(typed(asTyped(value)), value);
});

test("a NaN in a result does not hide its other numbers", () => {
  const data = JSON.stringify('{"default": 0.5, "loss": NaN, "low": -Infinity, "said \\" NaN": "NaN"}');
  assert.equal(metricIn(data, "default"), 0.5);
  assert.equal(metricIn(data, "loss"), null);
  assert.deepEqual(metricNames(data), ["default", "loss", "low"]);
  assert.equal(metricIn(JSON.stringify("NaN"), "default"), null);
});
