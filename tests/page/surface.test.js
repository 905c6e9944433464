import assert from "node:assert/strict";
import { test } from "node:test";
import { surface, twoParameters } from "../../manager/nni_manager/web/page/surface.js";
import { seeded } from "./trials.js";

const LINEAR = { name: "x", scale: "linear" };
const LOG = { name: "lr", scale: "log" };
const KIND = { name: "kind", scale: "category" };
const random = seeded(5);
const numbers = Array.from({ length: 200 }, () => ({ x: random(), y: 10 ** (-4 * random()) }));

/** The value of a surface nearest to a place on its grid. */
function at({ xs, ys, values }, x, y) {
  const nearest = (stops, wanted) => stops.reduce((best, stop, index) => (Math.abs(stop - wanted) < Math.abs(stops[best] - wanted) ? index : best), 0);
  return values[nearest(ys, y)][nearest(xs, x)];
}

test("a point between trials has the average of the trials, on the scales of the search space", () => {
  const found = surface(numbers.map(({ x, y }) => ({ x, y, value: x + Math.log10(y) })), LINEAR, LOG);
  assert.deepEqual([found.xs.length, found.ys.length], [41, 41]);
  const middle = found.ys[20];
  assert.ok(middle > 3e-3 && middle < 3e-2, `the middle of the logarithmic axis is ${middle}`);
  for (const [x, y] of [[0.3, 1e-3], [0.5, 1e-2], [0.7, 0.1]]) assert.ok(Math.abs(at(found, x, y) - (x + Math.log10(y))) < 0.3, `${at(found, x, y)} at ${x}, ${y}`);
  for (const value of found.values.flat()) assert.ok(value === null || (value >= found.range[0] && value <= found.range[1]));
});

test("the surface is blank where no trial is near", () => {
  const diagonal = Array.from({ length: 400 }, (_, index) => ({ x: index, y: index, value: 1 }));
  const found = surface(diagonal, LINEAR, { ...LINEAR, name: "y" });
  assert.equal(at(found, 0, 399), null);
  assert.equal(at(found, 200, 200), 1);
});

test("each category has its own row, and no value is averaged across categories", () => {
  const samples = numbers.map(({ x }, index) => ({ x, y: index % 2 ? "adam" : "sgd", value: index % 2 }));
  const found = surface(samples, LINEAR, KIND);
  assert.deepEqual(found.ys, ["adam", "sgd"]);
  assert.deepEqual(new Set(found.values[0]), new Set([1]));
  assert.deepEqual(new Set(found.values[1]), new Set([0]));
  const both = surface([{ x: 16, y: "a", value: 1 }, { x: 64, y: "b", value: 2 }], { name: "batch", scale: "category" }, KIND);
  assert.deepEqual([both.xs, both.values], [["16", "64"], [[1, null], [null, 2]]], "no trial had the two others");
});

test("a diverged trial does not change the colour range of the other trials", () => {
  const found = surface([...numbers.map(({ x, y }) => ({ x, y, value: x })), { x: 0.5, y: 0.01, value: 1e9 }], LINEAR, LOG);
  assert.ok(found.range[1] <= 1);
  const same = surface([{ x: 0, y: 0, value: 1 }, { x: 1, y: 1, value: 1 }, { x: 1, y: 0, value: 1 }, { x: 0, y: 1, value: 9 }], LINEAR, { ...LINEAR, name: "y" });
  assert.deepEqual(same.range, [1, 9]);
});

test("a parameter with one value has no surface", () => {
  assert.equal(surface([{ x: 1, y: 1, value: 1 }, { x: 1, y: 2, value: 2 }], LINEAR, LOG), "x");
  assert.equal(surface([{ x: 1, y: 1, value: 1 }, { x: 2, y: 1, value: 2 }], LINEAR, LOG), "lr");
});

test("the two most important parameters are chosen, or else numeric parameters", () => {
  const scales = new Map([["kind", "category"], ["lr", "log"], ["size", "linear"]]);
  const names = [...scales.keys()];
  assert.deepEqual(twoParameters(names, scales, ["kind", "gone", "size", "lr"]), ["kind", "size"]);
  assert.deepEqual(twoParameters(names, scales, []), ["lr", "size"]);
  assert.deepEqual(twoParameters(names, scales, ["size"]), ["size", "lr"]);
  assert.deepEqual(twoParameters(["kind", "lr"], scales, []), ["lr", "kind"]);
  assert.deepEqual(twoParameters(["lr"], scales, []), ["lr", ""]);
});
