import assert from "node:assert/strict";
import { test } from "node:test";
import { NEXT, next } from "../../manager/nni_manager/web/page/state/connection.js";
import { EventReader } from "../../manager/nni_manager/web/page/state/events.js";
import { Rows } from "../../manager/nni_manager/web/page/state/rows.js";
import { aRow } from "./trials.js";

test("the page opens a new event stream when the manager answers again", () => {
  const course = ["failed", "failed", "answered", "stream opened"];
  assert.equal(course.reduce((state, happening) => next(state, happening), "polling"), "streaming");
});

test("the page polls if no event stream can be opened", () => {
  assert.equal(["stream lost", "answered", "answered"].reduce((state, happening) => next(state, happening), "connecting"), "polling");
});

test("every transition leads to a known state, and an invalid event raises an error", () => {
  for (const leads of Object.values(NEXT)) for (const to of Object.values(leads)) assert.ok(to in NEXT);
  assert.throws(() => next("locked", "stream opened"), /cannot occur in state locked/);
});

test("events are parsed completely wherever the stream is split", () => {
  const text = ': hello\n\nid: 1\nevent: changes\ndata: {"a":1}\n\n: still there\n\nevent: changes\ndata: {"b":\ndata: 2}\n\n';
  for (let size = 1; size < text.length; size++) {
    const reader = new EventReader();
    const events = [];
    for (let at = 0; at < text.length; at += size) events.push(...reader.push(text.slice(at, at + size)));
    assert.deepEqual(events, [{ event: "changes", data: '{"a":1}' }, { event: "changes", data: '{"b":\n2}' }]);
  }
});

test("changed trials are replaced and new trials are inserted in order", () => {
  const rows = new Rows();
  rows.apply({ reset: true, trials: [aRow({ id: "b", seq: 1 }), aRow({ id: "a", seq: 0 })] });
  rows.apply({ reset: false, trials: [aRow({ id: "d", seq: 3 }), aRow({ id: "c", seq: 2 }), aRow({ id: "a", seq: 0, value: 5 })] });
  assert.deepEqual(rows.all.map((row) => row.id), ["a", "b", "c", "d"]);
  assert.equal(rows.byId.get("a")?.value, 5);
  assert.equal(rows.all[0], rows.byId.get("a"));
});

test("a reset by a restarted manager replaces all trials", () => {
  const rows = new Rows();
  rows.apply({ reset: true, trials: [aRow({ id: "old", seq: 0 })] });
  rows.apply({ reset: true, trials: [aRow({ id: "new", seq: 0 })] });
  assert.deepEqual(rows.all.map((row) => row.id), ["new"]);
});

test("a trial that is loaded again is a new object only if it has changed", () => {
  const rows = new Rows();
  const [same, changed] = [aRow({ id: "a", seq: 0 }), aRow({ id: "b", seq: 1 })];
  rows.remember([same, changed]);
  const [one, two, three] = rows.known([structuredClone(same), { ...changed, tags: ["keep"] }, aRow({ id: "c", seq: 2 })]);
  assert.equal(one, same);
  assert.deepEqual(two, { ...changed, tags: ["keep"] });
  assert.equal(three?.id, "c");
});
