import assert from "node:assert/strict";
import { test } from "node:test";
import { distinctShort, LONGEST_LINE, plain, short, shownLine } from "../../manager/nni_manager/web/page/plain.js";
import { seeded } from "./trials.js";

test("terminal colours, titles and links are removed", () => {
  assert.equal(plain("\u001b[1;31mred\u001b[0m \u001b]0;title\u0007ok \u001b]8;;http://x\u001b\\link\u001b]8;;\u001b\\ \u001b(B\u009b31mend"), "red ok link end");
});

test("bidirectional marks and control characters are removed", () => {
  assert.equal(plain("exe\u202egnp.\u0000\u0008\u007f\u2066x"), "exegnp.x");
});

test("tabs and newlines are kept", () => {
  assert.equal(plain("a\tb\r\nc\n"), "a\tb\nc\n");
});

test("markup is kept as text", () => {
  assert.equal(plain("<script>alert(1)</script>"), "<script>alert(1)</script>");
});

test("no control sequence is left in random input", () => {
  const random = seeded(7);
  const alphabet = ["\u001b", "[", "]", "3", "1", "m", ";", "\u0007", "\\", "\u009b", "\r", "a", "\u202e", "é", "\u001bP"];
  for (let round = 0; round < 2000; round++) {
    const text = Array.from({ length: 12 }, () => alphabet[Math.floor(random() * alphabet.length)]).join("");
    assert.doesNotMatch(plain(text), /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e]/, JSON.stringify(text));
  }
});

test("only the last state of a progress bar is shown", () => {
  assert.equal(shownLine("10 %\r50 %\r100 %"), "100 %");
  assert.equal(shownLine("50 %\r"), "50 %");
});

test("a very long line is truncated with the number of omitted characters", () => {
  const line = shownLine("x".repeat(2 ** 20));
  assert.ok(line.startsWith("x".repeat(LONGEST_LINE)));
  assert.ok(line.endsWith(`… ${(2 ** 20 - LONGEST_LINE).toLocaleString("en-US")} more characters in this line`));
  assert.ok(line.length < LONGEST_LINE + 100);
});

test("a truncation never splits a character", () => {
  assert.equal(short("😀😀😀", 4), "😀…");
  assert.ok(shownLine("😀".repeat(50_000)).isWellFormed());
});

test("short texts of different values are different, and keep the end where the start is the same", () => {
  const labels = (texts, most) => [...distinctShort(new Map(texts.map((text) => [text, text])), most).values()];
  assert.deepEqual(labels(["adam", "a much longer text"], 10), ["adam", "a much lo…"]);
  assert.deepEqual(labels(["/data/models/a.pt", "/data/models/b.pt", "c"], 10), ["/da…s/a.pt", "/da…s/b.pt", "c"]);
  assert.deepEqual(labels(["beginning one ending", "beginning two ending", "beg…ending"], 10), ["beg…ending (2)", "beg…ending (3)", "beg…ending"]);
  assert.deepEqual(labels(["a\u0000", "a"], 10), ["a", "a (2)"]);
  assert.deepEqual([...distinctShort(new Map([["0.1234567891", "0.123457"], ["0.1234567892", "0.123457"]]), 30).values()], ["0.1234567891", "0.1234567892"]);
  for (const label of labels(["aaaaa😀😀😀1", "aaaaa😀😀😀2"], 7)) assert.ok(label.isWellFormed() && label.length <= 7, label);
});
