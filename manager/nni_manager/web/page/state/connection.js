/**
 * How the page hears from its manager. `streaming` is the rule; where something on the way holds events back it is `polling`,
 * and when nobody answers it is `silent` until somebody does: a manager that is resumed finds the page waiting.
 */

/** @typedef {"loading" | "connecting" | "streaming" | "polling" | "silent" | "locked"} Connection */
/** @typedef {"answered" | "failed" | "refused" | "stream opened" | "stream lost" | "stream wanted"} Happening */

/** @type {{[state in Connection]: {[event in Happening]?: Connection}}} */
export const NEXT = {
  loading: { answered: "connecting", failed: "silent", refused: "locked" },
  connecting: { "stream opened": "streaming", "stream lost": "polling" },
  streaming: { "stream opened": "streaming", "stream lost": "polling" },
  polling: { answered: "polling", failed: "silent", refused: "locked", "stream wanted": "connecting" },
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
