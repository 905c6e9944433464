/** The interface between each page and the frame around it. */

import { pageOf } from "../base.js";

/** @import { Live, News } from "../state/live.js" */
/** @import { Notices } from "../widgets/notices.js" */

/**
 * @typedef {object} Context
 * @property {Live} live
 * @property {(text: string) => void} announce  announce to screen readers
 * @property {(path: string) => void} go  navigate to another page
 * @property {Notices} notices
 *
 * @typedef {object} Page
 * @property {string} title
 * @property {HTMLElement} element
 * @property {(news: News) => void} [update]  called after changes
 * @property {() => void} [notice]  called after changes of the notices
 * @property {() => void} [arrive]  called after a change of the address's fragment
 * @property {() => void} close
 *
 * @typedef {(context: Context) => Page} MakePage
 */

/**
 * The parameters in the fragment of the address: `#state=FAILED&trial=ab`. Unlike queries, fragments are not logged.
 *
 * @returns {URLSearchParams}
 */
export function fragment() {
  return new URLSearchParams((pageOf(location) ?? "").split("#")[1] ?? "");
}
