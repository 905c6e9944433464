import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const PAGE = new URL("../../manager/nni_manager/web/page/", import.meta.url);
const names = readdirSync(PAGE, { recursive: true }).map(String).filter((name) => name.endsWith(".js"));

test("every module is preloaded", () => {
  const index = readFileSync(new URL("index.html", PAGE), "utf8");
  const preloaded = [...index.matchAll(/modulepreload" href="\/page\/([^"]+)"/g)].map((match) => match[1]);
  // main.js and early.js have script elements; types.js is only for the type checker, report/ and hub/ are other pages.
  assert.deepEqual(preloaded.sort(), names.filter((name) => !["main.js", "early.js", "types.js"].includes(name) && !/^(report|hub)\//.test(name)).sort());
});

test("no module interprets text as markup or as code", () => {
  for (const name of names) {
    const text = readFileSync(new URL(name, PAGE), "utf8");
    assert.doesNotMatch(text, /innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc/, name);
  }
});
