// What OpenPAI's server makes of templates, with mustache and the server's loop over its tokens. Input: {"variables": …, "templates":
// [text…]}. Output: for each template its text, or null for an error. Source of the loop: microsoft/pai v1.8.1,
// src/rest-server/src/middlewares/v2/protocol.js.
import { readFileSync } from "node:fs";
import mustache from "mustache";

const TAGS = ["<%", "%>"];

function filled(template, variables) {
  const context = new mustache.Context(variables);
  let text = "";
  try {
    for (const [kind, value] of new mustache.Writer().parse(template, TAGS)) {
      if (kind === "text") text += value;
      if (kind !== "name") continue;
      const name = value.replace(/\[(\d+)\]/g, ".$1");
      const found = context.lookup(name);
      text += found == null ? `${TAGS[0]} ${name} ${TAGS[1]}` : found;
    }
  } catch (error) {
    if (error instanceof Error) return null;
    throw error;
  }
  return text.trim();
}

const { variables, templates } = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(templates.map((each) => filled(each, variables))));
