import assert from "node:assert/strict";
import { test } from "node:test";
import { asTyped, flat, namesOf, typed } from "../../manager/nni_manager/web/page/parameters.js";
import { axisOf, bestSoFar, metricIn, metricNames, parallel, thinned, top, valued } from "../../manager/nni_manager/web/page/series.js";
import { aRow } from "./trials.js";

const ROWS = [3, 1, 4, 1, 5].map((value, seq) => aRow({ id: `t${seq}`, seq, value, end: 1000 + seq, parameters: { lr: 10 ** -seq, kind: "ab"[seq % 2], same: 1 } }));

test("the best so far only ever gets better", () => {
  assert.deepEqual(bestSoFar(ROWS, true).map((row) => row.value), [3, 4, 5]);
  assert.deepEqual(bestSoFar(ROWS, false).map((row) => row.value), [3, 1]);
});

test("trials that still run are not among the best so far", () => {
  assert.deepEqual(bestSoFar([aRow({ value: 1, end: null })], true), []);
});

test("the best share has at least one trial, the best first", () => {
  assert.deepEqual(top(ROWS, true, 1).map((row) => row.value), [5]);
  assert.deepEqual(top(ROWS, false, 40).map((row) => row.seq), [1, 3]);
});

test("results without a finite number are not drawn", () => {
  assert.deepEqual(valued([aRow(), aRow({ value: NaN }), aRow({ value: 0 })]).map((row) => row.value), [0]);
});

test("few of many keep the first and the last", () => {
  const few = thinned(Array.from({ length: 10_000 }, (_, index) => index), 100);
  assert.deepEqual([few.length, few[0], few[99]], [100, 0, 9999]);
});

test("numbers over many sizes have an axis of logarithms", () => {
  const axis = axisOf("lr", [1e-4, 1e-2, 1]);
  assert.equal(axis?.place(1e-2), 0.5);
  assert.equal(axis?.place(undefined), null);
});

test("a value alone has no axis, words have one in order", () => {
  assert.equal(axisOf("same", [1, 1]), null);
  assert.deepEqual(axisOf("kind", ["b", "a", true])?.ticks.map((tick) => tick.label), ["a", "b", "true"]);
});

test("each line of parallel coordinates ends with a gap", () => {
  const { axes, shades } = parallel(ROWS, ROWS, ["lr", "kind", "same"]);
  assert.deepEqual(axes.map((axis) => axis.name), ["lr", "kind", "default metric"]);
  assert.equal(shades.flat().length, ROWS.length * (axes.length + 1));
  for (const shade of shades) for (let at = axes.length; at < shade.length; at += axes.length + 1) assert.equal(shade[at], null);
});

test("a metric is a number or a dict of them, as the API writes it", () => {
  const dict = JSON.stringify(JSON.stringify({ default: 0.5, loss: 2, note: "x" }));
  assert.deepEqual(metricNames(dict), ["default", "loss"]);
  assert.equal(metricIn(dict, "loss"), 2);
  assert.equal(metricIn(dict, "note"), null);
  assert.equal(metricIn('"0.25"', "default"), 0.25);
  assert.equal(metricIn('"NaN"', "default"), null);
  assert.equal(metricIn("not JSON", "default"), null);
});

test("nested choices are laid flat", () => {
  const parameters = { net: { _name: "conv", units: { size: 3 } }, list: [1, 2], none: null };
  assert.deepEqual([...flat(parameters)], [["net", "conv"], ["net/units/size", 3], ["list", "[1,2]"], ["none", null]]);
  assert.deepEqual(namesOf([{ parameters }, { parameters: { lr: 1 } }]), ["net", "net/units/size", "list", "none", "lr"]);
});

test("what a person types for a parameter comes back as it was", () => {
  for (const value of [0.1, "adam", "0.1", true, null, { _name: "conv" }, "", "[", '"']) assert.deepEqual(typed(asTyped(value)), value);
});

test("one number that is none does not hide the others of a result", () => {
  const data = JSON.stringify('{"default": 0.5, "loss": NaN, "low": -Infinity, "said \\" NaN": "NaN"}');
  assert.equal(metricIn(data, "default"), 0.5);
  assert.equal(metricIn(data, "loss"), null);
  assert.deepEqual(metricNames(data), ["default", "loss", "low"]);
  assert.equal(metricIn(JSON.stringify("NaN"), "default"), null);
});
