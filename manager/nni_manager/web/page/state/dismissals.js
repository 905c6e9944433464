/** The notices that a viewer has dismissed, kept in the browser until they are over. */

/** Amounts that grow while a problem lasts: "for 35 s", "12.5 MB". A new amount is not a new problem. */
const AMOUNTS = /\d[\d.,]* ?(?:%|(?:s|min|h|[KMG]i?B|B|bytes)\b)/g;

/**
 * What identifies a notice: its title and text without the amounts that grow.
 *
 * @param {string} title
 * @param {string} text
 */
export function keyOf(title, text) {
  return `${title}\n${text.replace(AMOUNTS, "#")}`;
}

export class Dismissals {
  /** @type {Set<string>} */
  #keys;

  /** @param {{load: () => string | null, save: (text: string) => void}} storage  either may raise an error */
  constructor(storage) {
    this.storage = storage;
    this.#keys = new Set();
    try {
      const kept = JSON.parse(storage.load() ?? "[]");
      if (Array.isArray(kept)) this.#keys = new Set(kept.map(String));
    } catch {
      // Storage is forbidden, or has another text.
    }
  }

  /** @param {string} key */
  has(key) {
    return this.#keys.has(key);
  }

  /** @param {string} key */
  add(key) {
    this.#keys.add(key);
    this.#save();
  }

  /**
   * Forget the dismissals of notices that are over, so that a new occurrence is shown.
   *
   * @param {readonly string[]} current  the keys of all current notices
   */
  keepOnly(current) {
    const kept = current.filter((key) => this.#keys.has(key));
    if (kept.length === this.#keys.size) return;
    this.#keys = new Set(kept);
    this.#save();
  }

  #save() {
    try {
      this.storage.save(JSON.stringify([...this.#keys]));
    } catch {
      // Storage may be forbidden; then the dismissals apply until the page is closed.
    }
  }
}
