import assert from "node:assert/strict";
import { test } from "node:test";
import { LONGEST_LINE, plain, short, shownLine } from "../../manager/nni_manager/web/page/plain.js";
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
