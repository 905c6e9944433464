/**
 * A parser of text/event-stream. The page reads the stream with `fetch`, since the browser's EventSource cannot send the
 * session's key.
 *
 * Source: HTML Living Standard, 9.2.6 (interpreting an event stream), the parts that the manager uses.
 */

/** @typedef {{event: string, data: string}} StreamEvent */

export class EventReader {
  #rest = "";

  /**
   * Add text and return the events that it completes.
   *
   * @param {string} text
   * @returns {StreamEvent[]}
   */
  push(text) {
    // A document of 10,000 trials arrives in many pieces; scan each piece only once.
    const from = Math.max(0, this.#rest.length - 1);
    this.#rest += text;
    /** @type {StreamEvent[]} */
    const events = [];
    let begin = 0;
    for (let end = this.#rest.indexOf("\n\n", from); end >= 0; end = this.#rest.indexOf("\n\n", begin)) {
      const event = read(this.#rest.slice(begin, end));
      if (event !== null) events.push(event);
      begin = end + 2;
    }
    if (begin > 0) this.#rest = this.#rest.slice(begin);
    return events;
  }
}

/**
 * @param {string} block
 * @returns {StreamEvent | null} null: a comment, which serves as keep-alive
 */
function read(block) {
  let event = "message";
  /** @type {string[]} */
  const data = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (line.slice(0, colon) === "event") event = value;
    else if (line.slice(0, colon) === "data") data.push(value);
  }
  return data.length > 0 ? { event, data: data.join("\n") } : null;
}
