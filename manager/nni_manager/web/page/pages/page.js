/** What every page is to the frame around it. */

/** @import { Live, News } from "../state/live.js" */

/**
 * @typedef {object} Context
 * @property {Live} live
 * @property {(text: string) => void} announce  tell a screen reader
 * @property {(path: string) => void} go  to another page
 *
 * @typedef {object} Page
 * @property {string} title
 * @property {HTMLElement} element
 * @property {(news: News) => void} [update]  something has changed
 * @property {() => void} [arrive]  the fragment of the address has changed
 * @property {() => void} close
 *
 * @typedef {(context: Context) => Page} MakePage
 */

/**
 * What stands in the fragment of the address: `#state=FAILED&trial=ab`. Queries are written into logs, fragments are not.
 *
 * @returns {URLSearchParams}
 */
export function fragment() {
  return new URLSearchParams(location.hash.slice(1));
}
