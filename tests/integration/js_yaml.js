// What js-yaml, the reader of OpenPAI's server, makes of texts. Input: a JSON array of texts. Output: for each, {"value": …}, or
// {"refused": the reason}. Values that JSON lacks are {"$number": …}, {"$date": milliseconds}; a mapping is {"$map": [[key, value]…]}.
import { readFileSync } from "node:fs";
import yaml from "js-yaml";

function encoded(value) {
  if (typeof value === "number" && !Number.isFinite(value)) return { $number: String(value) };
  if (value instanceof Date) return { $date: value.getTime() };
  if (Array.isArray(value)) return value.map(encoded);
  if (value !== null && typeof value === "object") {
    return { $map: Object.entries(value).map(([key, each]) => [key, encoded(each)]) };
  }
  return value;
}

function read(text) {
  try {
    return { value: encoded(yaml.safeLoad(text) ?? null) };
  } catch (error) {
    // A node that contains itself has no end.
    if (error instanceof RangeError) return { refused: "a cycle" };
    if (error instanceof yaml.YAMLException) return { refused: error.reason };
    throw error;
  }
}

process.stdout.write(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(read)));
