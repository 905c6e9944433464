import assert from "node:assert/strict";
import { test } from "node:test";
import { parameterAxis } from "../../manager/nni_manager/web/page/pages/charted_trials.js";
import { surfaceTrace } from "../../manager/nni_manager/web/page/pages/contour_chart.js";
import { surface } from "../../manager/nni_manager/web/page/surface.js";

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
