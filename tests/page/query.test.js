import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { number } from "../../manager/nni_manager/web/page/format.js";
import { arrange, hasTag, matches, rearrange } from "../../manager/nni_manager/web/page/query.js";
import { aRow, seeded } from "./trials.js";

const ALL = { states: new Set(), text: "", conditions: [], order: { column: "seq", descending: false } };
/** @param {object} row @param {string} name @param {string} operator @param {string} value */
const holds = (row, name, operator, value) => matches(aRow(row), { ...ALL, conditions: [{ name, operator, value }] });

test("a search matches trials that contain every word", () => {
  const row = aRow({ id: "xYz12", seq: 41, parameters: { optimizer: "Adam", lr: 0.01 }, message: "loss is nan" });
  for (const text of ["xyz", "41", "adam nan", "lr=0.01", "optimizer=adam", "  "]) assert.ok(matches(row, { ...ALL, text }), text);
  for (const text of ["sgd", "adam sgd"]) assert.ok(!matches(row, { ...ALL, text }), text);
});

test("a search finds words in tags and notes, and `tag:` finds whole tags in any letter case", () => {
  const row = aRow({ tags: ["Keep", "lr/high"], note: "converges late" });
  for (const text of ["keep", "late", "tag:keep", "tag:KEEP tag:lr/high", "tag:", "tag:keep converges"]) assert.ok(matches(row, { ...ALL, text }), text);
  for (const text of ["tag:kee", "tag:late", "tag:keep tag:bad", "tag:keep soon"]) assert.ok(!matches(row, { ...ALL, text }), text);
  for (const text of ["tag:keep", "tag:"]) assert.ok(!matches(aRow({ message: "tag:keep" }), { ...ALL, text }), text);
  assert.ok(hasTag(row, "keep"));
});

test("trials are sorted by their tags, and trials without tags come last", () => {
  const rows = [aRow({ id: "a", seq: 0 }), aRow({ id: "b", seq: 1, tags: ["y"] }), aRow({ id: "c", seq: 2, tags: ["x", "z"] })];
  for (const [descending, ids] of [[false, ["c", "b", "a"]], [true, ["b", "c", "a"]]]) {
    assert.deepEqual(arrange(rows, { ...ALL, order: { column: "tags", descending } }).map(({ id }) => id), ids);
  }
});

test("trials are filtered by the selected states, and all trials match if no state is selected", () => {
  assert.ok(matches(aRow(), ALL));
  assert.ok(!matches(aRow(), { ...ALL, states: new Set(["FAILED"]) }));
});

test("numbers are compared as numbers", () => {
  const row = { parameters: { batch: 16 } };
  assert.ok(holds(row, "batch", "<", "128"));
  assert.ok(holds(row, "batch", "=", "16.0"));
  assert.ok(holds(row, "batch", "≥", "16"));
  assert.ok(!holds(row, "batch", ">", "16"));
});

test("texts are compared as texts, and `contains` finds substrings", () => {
  const row = { parameters: { net: { _name: "conv", units: 3 } } };
  assert.ok(holds(row, "net", "=", "conv"));
  assert.ok(holds(row, "net", "contains", "ON"));
  assert.ok(holds(row, "net/units", "=", "3"));
});

test("a trial without the parameter matches only the operator ≠", () => {
  assert.ok(!holds({}, "depth", "<", "3"));
  assert.ok(holds({}, "depth", "≠", "3"));
});

test("trials without a value come last in both sort orders", () => {
  const rows = [aRow({ id: "a", seq: 0 }), aRow({ id: "b", seq: 1, value: 1 }), aRow({ id: "c", seq: 2, value: 2 })];
  /** @param {boolean} descending */
  const ids = (descending) => arrange(rows, { ...ALL, order: { column: "value", descending } }).map((row) => row.id).join("");
  assert.equal(ids(false), "bca");
  assert.equal(ids(true), "cba");
});

test("incremental changes give the same table as a new sort", () => {
  const random = seeded(3);
  for (const column of ["seq", "value", "state", "p:lr", "p:kind"]) {
    const query = { ...ALL, text: "", states: new Set(["SUCCEEDED", "RUNNING"]), order: { column, descending: random() < 0.5 } };
    /** @param {number} seq */
    const some = (seq) => aRow({
      id: `t${seq}`, seq, status: ["SUCCEEDED", "RUNNING", "FAILED"][Math.floor(random() * 3)], value: random() < 0.2 ? null : Math.floor(random() * 9),
      parameters: { lr: Math.floor(random() * 5), kind: ["a", "b"][Math.floor(random() * 2)] },
    });
    let rows = Array.from({ length: 200 }, (_, seq) => some(seq));
    let shown = arrange(rows, query);
    for (let round = 0; round < 60; round++) {
      const changed = Array.from({ length: 1 + Math.floor(random() * 20) }, () => Math.floor(random() * (rows.length + 1)));
      const fresh = [...new Set(changed)].map(some);
      rows = [...rows.filter((row) => !fresh.some((each) => each.id === row.id)), ...fresh];
      shown = rearrange(shown, fresh, query);
      assert.deepEqual(shown.map((row) => row.id), arrange(rows, query).map((row) => row.id));
    }
  }
});

test("trials are filtered and sorted by a metric", () => {
  const rows = [0.5, 2, undefined].map((loss, seq) => aRow({ id: `t${seq}`, seq, ...(loss === undefined ? {} : { metrics: { loss } }) }));
  const query = { states: new Set(), text: "", conditions: [], order: { column: "m:loss", descending: true } };
  assert.deepEqual(arrange(rows, query).map((row) => row.seq), [1, 0, 2]);
  const filtered = { ...query, conditions: [{ name: "value/loss", operator: /** @type {const} */ ("<"), value: "1" }] };
  assert.deepEqual(arrange(rows, filtered).map((row) => row.seq), [0]);
});

test("a query returns the expected trials for the cases that the manager's tests share", () => {
  const { rows, queries, numbers } = JSON.parse(readFileSync(new URL("queries.json", import.meta.url), "utf8"));
  for (const { states, text, conditions: sent, column, descending, ids } of queries) {
    // As the page sends them: JSON has no infinite numbers.
    const conditions = sent.map((/** @type {any} */ each) => ("operator" in each ? each : { ...each, low: each.low ?? -Infinity, high: each.high ?? Infinity }));
    assert.equal(JSON.stringify(conditions), JSON.stringify(sent));
    const query = { states: new Set(states), text, conditions, order: { column, descending } };
    assert.deepEqual(arrange(rows, query).map((row) => row.id), ids, JSON.stringify({ states, text, sent, column, descending }));
  }
  for (const [value, text, shown] of numbers) assert.deepEqual([String(value), number(value)], [text, shown]);
});
