/** The path before all addresses of this manager, such as `/lab/digits`; empty without a prefix. */

const { pathname } = new URL(import.meta.url);

export const BASE = pathname.slice(0, pathname.lastIndexOf("/page/"));

/**
 * An address without the base; null if it is not below the base.
 *
 * @param {string} path
 * @returns {string | null}
 */
export function withoutBase(path) {
  return path.startsWith(`${BASE}/`) ? path.slice(BASE.length) : null;
}
