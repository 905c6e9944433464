/**
 * Requests to the HTTP API at this page's address. A session has two secrets: a cookie, which scripts cannot read, and a key, which
 * the page stores and sends with every request. Browsers send cookies to every port of a host; the stored key is limited to this
 * origin.
 */

import { BASE, HOME } from "../base.js";

/** As in early.js. */
export const FIRST_CHANGES = "/changes?windows=true";
const ROOT = `${BASE}/api/v1/nni`;
/** Managers behind one proxy share the storage of its origin. */
const KEY = `trial-keeper-key${HOME}`;
/** Timeout of a read; a slower manager is shown as unresponsive. */
const PATIENCE_MS = 30_000;
/** Timeout of a change, as in nnictl: the manager confirms it when its disk has it. */
const CHANGE_PATIENCE_MS = 120_000;

/** A rejected request; `message` is the manager's error message. */
export class Refused extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The manager did not answer. */
export class Unreachable extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
export async function send(path, options) {
  const key = storedKey();
  const headers = new Headers(options.headers);
  if (key !== null) headers.set("X-Trial-Keeper", key);
  const early = path === FIRST_CHANGES ? asked(key) : null;
  const response = await (early ?? fetch(ROOT + path, { cache: "no-store", credentials: "same-origin", ...options, headers }));
  // Another tab may have signed in meanwhile; keep its key.
  if (response.status === 401 && key !== null && storedKey() === key) localStorage.removeItem(KEY);
  return response;
}

/** @returns {string | null} */
function storedKey() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is forbidden
  }
}

/**
 * The response to the request that early.js sent with this key; returned once.
 *
 * @param {string | null} key
 * @returns {Promise<Response> | null}
 */
function asked(key) {
  /** @type {{firstChanges?: {key: string, asked: Promise<Response>}}} */
  const early = /** @type {any} */ (window);
  const first = early.firstChanges;
  delete early.firstChanges;
  return first !== undefined && first.key === key ? first.asked : null;
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<any>} null if there is no body
 */
export async function ask(path, options = {}) {
  let response;
  let text;
  const isRead = options.method === undefined || options.method === "GET";
  try {
    response = await send(path, { signal: AbortSignal.timeout(isRead ? PATIENCE_MS : CHANGE_PATIENCE_MS), ...options });
    text = await response.text();
  } catch (error) {
    const effect = isRead ? "" : " The change may still take effect: look before you repeat it.";
    throw new Unreachable(`The manager does not answer.${effect}`, { cause: error });
  }
  if (!response.ok) throw new Refused(response.status, sentence(text) ?? `The manager answered ${response.status}.`);
  if (text === "") return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Unreachable("The server at this address is not the manager.", { cause: error });
  }
}

/** @param {string} text */
function sentence(text) {
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : null;
  } catch {
    return null;
  }
}

/**
 * @param {string} method
 * @param {unknown} [body]
 * @returns {RequestInit}
 */
export function change(method, body) {
  return body === undefined
    ? { method }
    : { method, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
}

/** The session of this browser. */
export const session = {
  /** @param {string} code */
  enter: async (code) => {
    const { key } = await ask("/session", change("POST", { code }));
    localStorage.setItem(KEY, key);
  },
  /** Sign out. The key is removed from this browser even if the request fails. */
  leave: async () => {
    try {
      await ask("/session", change("DELETE"));
    } finally {
      localStorage.removeItem(KEY);
    }
  },
};
