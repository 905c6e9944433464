import assert from "node:assert/strict";
import { test } from "node:test";
import { LogWindow, MOST_BYTES, PIECE_BYTES } from "../../manager/nni_manager/web/page/logwindow.js";

/** A log as the manager serves it. @param {string} text */
function served(text) {
  return (/** @type {{from: number, limit: number}} */ { from, limit }) => {
    const begin = Math.min(text.length, from < 0 ? Math.max(0, text.length + from) : from);
    const next = Math.min(text.length, begin + limit);
    return { size: text.length, from: begin, text: text.slice(begin, next), next };
  };
}

/** @param {number} count */
const lines = (count) => Array.from({ length: count }, (_, index) => `line ${index}\n`).join("");

test("the end of a log is loaded first", () => {
  const log = new LogWindow();
  log.accept(served(lines(100_000))(log.following()));
  assert.ok(log.text().endsWith("line 99999\n"));
  assert.ok(log.text().startsWith("… "));
  assert.ok(log.isAtEnd);
});

test("only appended bytes are requested", () => {
  const log = new LogWindow();
  log.accept(served("one\n")(log.following()));
  assert.deepEqual(log.following(), { from: 4, limit: PIECE_BYTES });
  log.accept(served("one\ntwo\n")(log.following()));
  assert.equal(log.text(), "one\ntwo\n");
});

test("memory is limited to the window while a large log is scrolled", () => {
  const ask = served("0123456789abcde\n".repeat(100 * 65_536 / 16 * 16));
  const log = new LogWindow();
  log.accept(ask(LogWindow.last()));
  for (let step = 0; step < 40; step++) {
    const range = log.older();
    if (range !== null) log.accept(ask(range));
    assert.ok(log.end - log.start <= MOST_BYTES);
  }
  const back = log.start;
  for (let step = 0; step < 60; step++) {
    log.accept(ask(log.newer()));
    assert.ok(log.end - log.start <= MOST_BYTES);
  }
  assert.ok(log.start > back && log.isAtEnd);
});

test("loaded pieces of a log join without a gap", () => {
  const text = lines(20_000);
  const ask = served(text);
  const log = new LogWindow();
  log.accept(ask(LogWindow.last()));
  log.accept(ask(log.older() ?? LogWindow.last()));
  assert.equal(log.text(), `… ${text.slice(log.start)}`);
});

test("no request is sent for bytes before the start of the log", () => {
  const log = new LogWindow();
  log.accept(served("short\n")(LogWindow.first()));
  assert.equal(log.older(), null);
  assert.equal(log.text(), "short\n");
});

test("a log that grew by more than the window is shown at its end", () => {
  const log = new LogWindow();
  log.accept(served("a\n")(log.following()));
  log.size = 10 * MOST_BYTES;
  assert.deepEqual(log.following(), LogWindow.last());
});

test("a log that became shorter is loaded from its start", () => {
  const log = new LogWindow();
  log.accept(served("of the first attempt\n")(log.following()));
  log.accept(served("new\n")(log.following()));
  assert.equal(log.text(), "");
  log.accept(served("new\n")(log.following()));
  assert.equal(log.text(), "new\n");
});

test("a log that ends within a character is not requested again immediately", () => {
  const log = new LogWindow();
  log.accept({ size: 10, from: 0, text: "x".repeat(9), next: 9 });
  assert.ok(log.isBehind);
  log.accept({ size: 10, from: 9, text: "", next: 9 });
  assert.ok(!log.isBehind);
  log.accept({ size: 200_000, from: 9, text: "é" + "y".repeat(100), next: 111 });
  assert.ok(log.isBehind);
});
