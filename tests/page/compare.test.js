import assert from "node:assert/strict";
import { test } from "node:test";
import { comparedLines } from "../../manager/nni_manager/web/page/pages/compare.js";
import { aRow } from "./trials.js";

test("a comparison marks values that differ although they are shown alike", () => {
  const numbers = Object.fromEntries(Array.from({ length: 70 }, (_, number) => [`m${number}`, number]));
  const prompt = "word ".repeat(1000);
  const rows = [0, 1].map((number) => aRow({
    value: 0.12345678 + number * 1e-9, metrics: { ...numbers, loss: 1 + number * 1e-9 },
    parameters: { lr: 0.1, decay: 0.1 + number * 1e-9, prompt: prompt + number, seed: 3 },
  }));
  const lines = comparedLines(rows, [{ metric: "accuracy" }]);
  assert.deepEqual(lines.filter(({ differs }) => differs).map(({ name }) => name), ["accuracy", "loss", "decay", "prompt"]);
  assert.deepEqual(lines.find(({ name }) => name === "m69")?.texts, ["69", "69"]);
  for (const { texts } of lines) assert.ok(texts.every((text) => text.length <= 200));
});
