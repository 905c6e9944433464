// What OpenPAI's server answers to jobs: for each text of the list on stdin, why the server refuses the job with 400; empty if it does
// not. Source of the rules: microsoft/pai v1.8.1, src/rest-server/src/config/v2/protocol.js and src/middlewares/v2/protocol.js.
import { readFileSync } from "node:fs";
import Ajv from "ajv";
import yaml from "js-yaml";

const TEXT = { type: "string" }, WHOLE = { type: "integer" }, TEXTS = { type: "array", items: TEXT };
const VERSION = { enum: ["2", 2] };
const NAME = { type: "string", pattern: "^[a-zA-Z0-9_-]+$", maxLength: 255 };
const ANY_PART = { protocolVersion: VERSION, name: NAME, version: { type: ["string", "number"] }, contributor: TEXT, description: TEXT };

const mapping = (properties, required = [], additionalProperties = false) => ({ type: "object", properties, required, additionalProperties });
const named = (value) => ({
  type: "object", patternProperties: { "^[a-zA-Z_][a-zA-Z0-9_]*$": value }, additionalProperties: false, minProperties: 1,
});
const filled = (list) => ({ ...list, minItems: 1 });

const PLUGIN = { plugin: TEXT, require: TEXTS };
const PREREQUISITES = [
  mapping({ ...ANY_PART, ...PLUGIN, type: { enum: ["script", "output"] }, uri: TEXT }, ["name", "type"], true),
  mapping({ ...ANY_PART, ...PLUGIN, type: { enum: ["data"] }, uri: TEXTS }, ["name", "type"], true),
  mapping(
    { ...ANY_PART, type: { enum: ["dockerimage"] }, uri: TEXT, auth: mapping({ username: TEXT, password: TEXT, registryuri: TEXT }, [], true) },
    ["name", "type", "uri"],
  ),
];
const COUNT = { type: ["integer", "null"] };
const RESOURCES = mapping({ cpu: WHOLE, memoryMB: WHOLE, gpu: WHOLE, ports: named(WHOLE) }, ["cpu", "memoryMB", "gpu"]);
const ROLE = mapping(
  {
    protocolVersion: VERSION,
    instances: { ...WHOLE, minimum: 1 },
    completion: mapping({ minFailedInstances: COUNT, minSucceededInstances: COUNT }),
    taskRetryCount: WHOLE,
    prerequisites: TEXTS,
    dockerImage: TEXT, data: TEXT, output: TEXT, script: TEXT,
    extraContainerOptions: mapping({ shmMB: WHOLE }, [], true),
    resourcePerInstance: RESOURCES,
    commands: filled(TEXTS),
  },
  ["dockerImage", "resourcePerInstance", "commands"],
);
const DEPLOYED = named(mapping({ preCommands: filled(TEXTS), postCommands: filled(TEXTS) }));
const JOB = mapping(
  {
    ...ANY_PART,
    type: { enum: ["job"] },
    prerequisites: filled({ type: "array", items: { type: "object", oneOf: PREREQUISITES } }),
    parameters: { type: "object" },
    secrets: { type: "object" },
    jobRetryCount: { ...WHOLE, minimum: 0 },
    taskRoles: named(ROLE),
    deployments: filled({ type: "array", items: mapping({ protocolVersion: VERSION, name: NAME, taskRoles: DEPLOYED }, ["name", "taskRoles"], true) }),
    defaults: mapping({ deployment: TEXT }, [], true),
    extras: { type: "object" },
  },
  ["protocolVersion", "name", "type", "taskRoles"],
);
const validate = new Ajv({ allErrors: true }).compile(JOB);
const REFERENCES = { script: "script", output: "output", data: "data", dockerImage: "dockerimage" };

function refusal(text) {
  let job;
  try {
    job = yaml.safeLoad(text);
  } catch (error) {
    return error.message;
  }
  if (!validate(job)) return validate.errors.map(({ dataPath, message }) => `${dataPath} ${message}`).join("; ");
  const known = {};
  for (const type of Object.values(REFERENCES)) known[type] = {};
  const names = new Set();
  for (const { type, name } of job.prerequisites ?? []) {
    if (Object.hasOwn(known[type], name)) return `prerequisite ${name} twice`;
    known[type][name] = true;
    names.add(name);
  }
  const deployments = {};
  for (const { name } of job.deployments ?? []) {
    if (Object.hasOwn(deployments, name)) return `deployment ${name} twice`;
    deployments[name] = true;
  }
  for (const role of Object.values(job.taskRoles)) {
    for (const name of role.prerequisites ?? []) if (!names.has(name)) return `no prerequisite ${name}`;
    for (const [key, type] of Object.entries(REFERENCES)) if (key in role && !(role[key] in known[type])) return `no ${type} ${role[key]}`;
  }
  const chosen = job.defaults?.deployment;
  return chosen !== undefined && !(chosen in deployments) ? `no deployment ${chosen}` : "";
}

process.stdout.write(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(refusal)));
