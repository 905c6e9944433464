import assert from "node:assert/strict";
import { test } from "node:test";
import { csvOf } from "../../manager/nni_manager/web/page/csv.js";
import { aRow } from "./trials.js";

test("the CSV file has a line for each trial and quotes only where a value needs quotes", () => {
  const rows = [
    aRow({ id: "aB3dE", seq: 0, state: "SUCCEEDED", value: 0.5, start: 1000, end: 3500, parameters: { lr: 0.1, state: 'say "a, b"' } }),
    aRow({ id: "xY9zW", seq: 1, state: "RUNNING", value: null, start: 1000, end: null, parameters: { net: { _name: "conv", size: 3 } } }),
  ];
  assert.equal(csvOf(rows),
    'number,trialJobId,state,value,durationS,lr,parameter/state,net,net/size\r\n'
    + '0,aB3dE,SUCCEEDED,0.5,2.5,0.1,"say ""a, b""",,\r\n'
    + "1,xY9zW,RUNNING,,,,,conv,3\r\n");
  assert.equal(csvOf([aRow({ value: 1, metrics: { loss: 0.25 } }), aRow({ id: "x" })]),
    "number,trialJobId,state,value,durationS,value/loss\r\n0,aB3dE,SUCCEEDED,1,1,0.25\r\n0,x,SUCCEEDED,,1,\r\n");
  assert.equal(csvOf([aRow({ value: 1, tags: ["bad", "keep"], parameters: { tags: 3 } }), aRow({ id: "x" })]),
    "number,trialJobId,state,value,durationS,tags,parameter/tags\r\n0,aB3dE,SUCCEEDED,1,1,bad keep,3\r\n0,x,SUCCEEDED,,1,,\r\n");
  assert.equal(csvOf([]), "number,trialJobId,state,value,durationS\r\n");
});

test("the CSV file has a column of its own for each metric and each parameter, however many", () => {
  const numbers = (prefix, count) => Object.fromEntries(Array.from({ length: count }, (_, number) => [`${prefix}${number}`, number]));
  const [head, line] = csvOf([aRow({ value: 1, metrics: { ...numbers("m", 70), x: 7 }, parameters: { ...numbers("p", 300), "value/x": 8 } })]).split("\r\n").map((each) => each.split(","));
  assert.equal(head.length, 5 + 71 + 301);
  assert.equal(new Set(head).size, head.length);
  const valueOf = (name) => line[head.indexOf(name)];
  assert.deepEqual(["value/m69", "p299", "value/x", "parameter/value/x"].map(valueOf), ["69", "299", "7", "8"]);
});
