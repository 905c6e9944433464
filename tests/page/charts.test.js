import assert from "node:assert/strict";
import { test } from "node:test";
import { parameterAxis } from "../../manager/nni_manager/web/page/pages/charted_trials.js";
import { surfaceTrace } from "../../manager/nni_manager/web/page/pages/contour_chart.js";
import { axisTexts } from "../../manager/nni_manager/web/page/pages/parallel_chart.js";
import { axisOf, parallel } from "../../manager/nni_manager/web/page/series.js";
import { surface } from "../../manager/nni_manager/web/page/surface.js";
import { aRow } from "./trials.js";

const FOLDER = "/data/models/pretrained/checkpoints/";
const MODELS = [`${FOLDER}roberta.pt`, `${FOLDER}bert-base.pt`];

test("categories with the same start have places of their own", () => {
  const { layout, at } = parameterAxis("model", MODELS, "category");
  assert.deepEqual(layout.categoryarray, [at(MODELS[1]), at(MODELS[0])]);
  assert.match(at(MODELS[0]), /roberta\.pt$/);
  assert.equal(new Set(layout.categoryarray).size, 2);
});

test("categories of numbers that are shown alike have places of their own", () => {
  const { layout, at } = parameterAxis("rate", [0.12345678901, 0.12345678902, 16], "category");
  assert.deepEqual(layout.categoryarray, ["0.12345678901", "0.12345678902", "16"]);
  assert.equal(at(16), at("16"));
});

test("the cells of a contour are at the places of its points", () => {
  const x = { name: "model", scale: "category" };
  const y = { name: "on", scale: undefined };
  const samples = MODELS.flatMap((model, index) => [true, null].map((on) => ({ x: model, y: on, value: index })));
  const [across, up] = [parameterAxis(x.name, samples.map((each) => each.x), x.scale), parameterAxis(y.name, samples.map((each) => each.y), y.scale)];
  const trace = surfaceTrace(surface(samples, x, y), across.at, up.at, "grey");
  assert.deepEqual([trace.x, trace.y], [across.layout.categoryarray, up.layout.categoryarray]);
  assert.deepEqual(trace.z, [[1, 0], [1, 0]]);
});

test("axes and categories of parallel coordinates with the same start have texts of their own", () => {
  const names = ["encoder/attention/dropout", "encoder/attention/heads", "model"];
  const rows = [0, 1].map((value) => aRow({ value, parameters: { [names[0]]: value, [names[1]]: value, model: MODELS[value] }, metrics: { model: value } }));
  const { axes } = parallel(rows, rows, names, new Map(), "", [], "encoder/attention/score");
  const texts = axisTexts(axes);
  assert.deepEqual(texts.map(({ name }) => name), ["encode…ion/dropout", "encode…ntion/heads", "model", "value/…ntion/score"]);
  assert.deepEqual(axes[2].ticks.map(texts[2].tick), ["/dat…t-base.pt", "/dat…oberta.pt"]);
  const ofMetric = axisTexts(parallel(rows, rows, names, new Map(), "model").axes);
  assert.deepEqual(ofMetric.slice(2).map(({ name }) => name), ["model", "value/model"]);
});

test("the ticks of a numeric axis have their numbers in full, and in the order of the axis", () => {
  for (const [low, high, scale] of [[0.9712, 0.9714], [1000, 1001], [-5.0002, -5], [0, 10], [1e-5, 0.1, "log"], [100, 100.5, "log"], [0, 2 ** 40]]) {
    const axis = axisOf("x", [low, high], scale);
    const { tick } = axisTexts([axis])[0];
    const numbers = axis.ticks.map((each) => Number(tick(each).replaceAll(",", "").replaceAll("−", "-")));
    for (const [index, number] of numbers.entries()) {
      assert.ok(Math.abs(axis.place(number) - index / 4) < 0.02, `${number} of ${numbers}`);
    }
  }
});
