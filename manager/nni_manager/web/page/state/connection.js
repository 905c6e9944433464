/**
 * How the page hears from its manager. `streaming` is the rule; where something on the way holds events back it is `polling`,
 * and when nobody answers it is `silent` until somebody does: a manager that is resumed finds the page waiting. A page that nobody
 * sees is `resting`: a browser has few connections to a host, and other pages may want them.
 */

/** @typedef {"loading" | "connecting" | "streaming" | "polling" | "resting" | "silent" | "locked"} Connection */
/** @typedef {"answered" | "failed" | "refused" | "stream opened" | "stream lost" | "stream wanted" | "hidden" | "seen"} Happening */

/** @type {{[state in Connection]: {[event in Happening]?: Connection}}} */
export const NEXT = {
  loading: { answered: "connecting", failed: "silent", refused: "locked" },
  connecting: { "stream opened": "streaming", "stream lost": "polling", hidden: "resting" },
  streaming: { "stream lost": "polling", hidden: "resting" },
  polling: { answered: "polling", failed: "silent", refused: "locked", "stream wanted": "connecting" },
  resting: { seen: "connecting" },
  silent: { answered: "connecting", failed: "silent", refused: "locked" },
  locked: { answered: "connecting", failed: "silent", refused: "locked" },
};

/**
 * @param {Connection} state
 * @param {Happening} happening
 * @returns {Connection}
 */
export function next(state, happening) {
  const following = NEXT[state][happening];
  if (following === undefined) throw new Error(`${happening} cannot happen while ${state}`);
  return following;
}
