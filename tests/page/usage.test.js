import assert from "node:assert/strict";
import { test } from "node:test";
import { usageLines } from "../../manager/nni_manager/web/page/usage.js";

const MIB = 2 ** 20;
/** @param {number} s @param {object} [fields] */
const sample = (s, fields = {}) => ({ attempt: 0, task: "main-0", timestamp: 1000 * s, cpuPercent: s, rssBytes: s * MIB, diskBytes: 0, gpus: [], ...fields });
/** @param {number} index @param {number} percent */
const gpu = (index, percent) => ({ index, utilisationPercent: percent, memoryUsedBytes: percent * MIB });

test("CPU load, memory, and the load and memory of each GPU are separate lines over the seconds since the first sample", () => {
  const { load, memory, tasks } = usageLines([sample(10, { gpus: [gpu(1, 40)] }), sample(15, { gpus: [gpu(0, 30), gpu(1, 50)] })]);
  assert.deepEqual(load, [
    { name: "CPU", x: [0, 5], y: [10, 15] },
    { name: "GPU 0", x: [0, 5], y: [null, 30] },
    { name: "GPU 1", x: [0, 5], y: [40, 50] },
  ]);
  assert.deepEqual(memory.map(({ name, y }) => [name, y]), [["memory", [10, 15]], ["GPU 0 memory", [null, 30]], ["GPU 1 memory", [40, 50]]]);
  assert.equal(tasks, 1);
});

test("each of several tasks has separate lines", () => {
  const samples = [sample(0), sample(1, { task: "worker-1", cpuPercent: 90 }), sample(5), sample(6, { task: "worker-1", cpuPercent: 95 })];
  assert.deepEqual(usageLines(samples).load, [
    { name: "CPU of main-0", x: [0, 5], y: [0, 5] },
    { name: "CPU of worker-1", x: [1, 6], y: [90, 95] },
  ]);
});

test("a line has a gap between two attempts", () => {
  const { load: [cpu] } = usageLines([sample(0), sample(5), sample(60, { attempt: 1 }), sample(65, { attempt: 1 })]);
  assert.deepEqual(cpu?.x, [0, 5, null, 60, 65]);
  assert.deepEqual(cpu?.y, [0, 5, null, 60, 65]);
});

test("long and numerous lines are thinned, and the first and the last sample are kept", () => {
  const samples = Array.from({ length: 20_000 }, (_, n) => sample(n, { task: `worker-${n % 10}`, gpus: [gpu(0, 1)] }));
  const { load, memory, tasks, all } = usageLines(samples);
  assert.deepEqual([tasks, all, load.length, memory.length], [10, 20, 12, 12]);
  assert.deepEqual(load.slice(8).map(({ name }) => name), ["CPU of worker-8", "CPU of worker-9", "GPU 0 of worker-0", "GPU 0 of worker-1"]);
  assert.ok(load.reduce((sum, { x }) => sum + x.length, 0) <= 4000);
  assert.deepEqual([load[0]?.x[0], load[0]?.x.at(-1)], [0, 19_990]);
});

test("no line is drawn if there are no samples", () => {
  assert.deepEqual(usageLines([]), { load: [], memory: [], tasks: 0, all: 0 });
});
