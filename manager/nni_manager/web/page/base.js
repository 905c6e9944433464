/** The addresses of the pages and of the chart library. A report, which is one file, has its own: report/base.js. */

const { pathname } = new URL(import.meta.url);

/** The path before all addresses of this manager, such as `/lab/digits`; empty without a prefix. */
export const BASE = pathname.slice(0, pathname.lastIndexOf("/page/"));

/**
 * The address of a page.
 *
 * @param {string} to  such as `/detail#trial=ab`
 */
export function addressOf(to) {
  return BASE + to;
}

/**
 * The page of an address, with its parameters; null if the address is not below the base.
 *
 * @param {{pathname: string, hash: string}} address
 * @returns {string | null}
 */
export function pageOf(address) {
  return address.pathname.startsWith(`${BASE}/`) ? address.pathname.slice(BASE.length) + address.hash : null;
}

/** The address of the chart library. @returns {Promise<string>} */
export function chartLibrary() {
  return Promise.resolve(new URL("./plotly.min.js", import.meta.url).pathname);
}
