import assert from "node:assert/strict";
import { test } from "node:test";
import { csvOf } from "../../manager/nni_manager/web/page/csv.js";
import { aRow } from "./trials.js";

test("the CSV file has a line for each trial and quotes only where a value needs quotes", () => {
  const rows = [
    aRow({ id: "aB3dE", seq: 0, state: "SUCCEEDED", value: 0.5, start: 1000, end: 3500, parameters: { lr: 0.1, state: 'say "a, b"' } }),
    aRow({ id: "xY9zW", seq: 1, state: "RUNNING", value: null, start: 1000, end: null, parameters: { net: { _name: "conv", size: 3 } } }),
  ];
  assert.equal(csvOf(rows, ["lr", "state", "net", "net/size"]),
    'number,trialJobId,state,value,durationS,lr,parameter/state,net,net/size\r\n'
    + '0,aB3dE,SUCCEEDED,0.5,2.5,0.1,"say ""a, b""",,\r\n'
    + "1,xY9zW,RUNNING,,,,,conv,3\r\n");
  assert.equal(csvOf([aRow({ value: 1, metrics: { loss: 0.25 } }), aRow({ id: "x" })], [], ["loss"]),
    "number,trialJobId,state,value,durationS,value/loss\r\n0,aB3dE,SUCCEEDED,1,1,0.25\r\n0,x,SUCCEEDED,,1,\r\n");
  assert.equal(csvOf([aRow({ value: 1, tags: ["bad", "keep"] }), aRow({ id: "x" })], ["tags"]),
    "number,trialJobId,state,value,durationS,tags,parameter/tags\r\n0,aB3dE,SUCCEEDED,1,1,bad keep,\r\n0,x,SUCCEEDED,,1,,\r\n");
  assert.equal(csvOf([], []), "number,trialJobId,state,value,durationS\r\n");
});
