/**
 * The state of the connection to the manager. `streaming` is normal; `polling` is the fallback where a proxy buffers events.
 * `silent` means that the manager does not answer; the page retries, so it reconnects to a resumed manager. A hidden page is
 * `resting`, since a browser has few connections per host and other pages may need them. A `report` has no manager.
 */

/** @typedef {"loading" | "connecting" | "streaming" | "polling" | "resting" | "silent" | "locked" | "report"} Connection */
/** @typedef {"answered" | "failed" | "refused" | "stream opened" | "stream lost" | "stream wanted" | "hidden" | "seen" | "embedded"} Happening */

/** @type {{[state in Connection]: {[event in Happening]?: Connection}}} */
export const NEXT = {
  loading: { answered: "connecting", failed: "silent", refused: "locked", embedded: "report" },
  connecting: { "stream opened": "streaming", "stream lost": "polling", hidden: "resting" },
  streaming: { "stream lost": "polling", hidden: "resting" },
  polling: { answered: "polling", failed: "silent", refused: "locked", "stream wanted": "connecting" },
  resting: { seen: "connecting" },
  silent: { answered: "connecting", failed: "silent", refused: "locked" },
  locked: { answered: "connecting", failed: "silent", refused: "locked" },
  report: {},
};

/**
 * @param {Connection} state
 * @param {Happening} happening
 * @returns {Connection}
 */
export function next(state, happening) {
  const following = NEXT[state][happening];
  if (following === undefined) throw new Error(`${happening} cannot occur in state ${state}`);
  return following;
}
