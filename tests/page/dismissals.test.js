import assert from "node:assert/strict";
import { test } from "node:test";
import { Dismissals, keyOf } from "../../manager/nni_manager/web/page/state/dismissals.js";

/** A storage with its text. */
function aStorage(text = null) {
  return { text, load() { return this.text; }, save(now) { this.text = now; } };
}

test("a dismissed notice stays dismissed after a page load, until the notice ends", () => {
  const storage = aStorage();
  const dismissals = new Dismissals(storage);
  dismissals.add("one");
  dismissals.add("two");
  dismissals.keepOnly(["one", "two", "three"]);
  assert.ok(new Dismissals(storage).has("two"));
  dismissals.keepOnly(["one"]);
  assert.ok(!dismissals.has("two"));
  assert.ok(!new Dismissals(storage).has("two"));
  assert.ok(new Dismissals(storage).has("one"));
});

test("a notice stays the same if only an amount changes, and a different name or count makes a new notice", () => {
  const key = (text) => keyOf("Needs attention", text);
  assert.equal(key("the storage has not answered for 35 s; 1.5 MB wait"), key("the storage has not answered for 120 s; 20 MB wait"));
  assert.equal(key("the disk is 99% full"), key("the disk is 98 % full"));
  assert.notEqual(key("job a1 has ended"), key("job a2 has ended"));
  assert.notEqual(key("2 of 3 jobs wait"), key("3 of 3 jobs wait"));
});

test("a notice can be dismissed if the browser has no usable storage", () => {
  const forbidden = { load() { throw new Error("forbidden"); }, save() { throw new Error("forbidden"); } };
  for (const storage of [forbidden, aStorage("{"), aStorage('{"a": 1}')]) {
    const dismissals = new Dismissals(storage);
    dismissals.add("one");
    assert.ok(dismissals.has("one"));
  }
});
