/** Dialogs and short notices. Dialogs are the browser's native ones, which keep the focus and close on escape. */

import { h } from "../dom.js";
import { prose } from "./facts.js";

/** @import { Child } from "../dom.js" */

/**
 * Show a dialog; resolves when it is closed.
 *
 * @param {string} title
 * @param {(Child | Child[])[]} content
 * @param {{isWide?: boolean}} [options]
 * @returns {{element: HTMLDialogElement, closed: Promise<void>}}
 */
export function openDialog(title, content, { isWide = false } = {}) {
  const close = h("button", { type: "button", class: "quiet close", "aria-label": "Close", click: () => dialog.close() }, "×");
  const dialog = h("dialog", { "data-test": "dialog", class: isWide ? "wide" : null, "aria-label": title },
    h("header", {}, h("h2", {}, title), close), h("div", { class: "content" }, ...content));
  document.body.append(dialog);
  dialog.showModal();
  const closed = new Promise((/** @type {(_: void) => void} */ resolve) => {
    dialog.addEventListener("close", () => {
      if (toasts !== null && dialog.contains(toasts)) document.body.append(toasts);
      dialog.remove();
      resolve();
    });
  });
  return { element: dialog, closed };
}

/**
 * Ask for confirmation of an irreversible action.
 *
 * @param {string} title
 * @param {string} text  the consequence
 * @param {string} yes  the button's label
 * @returns {Promise<boolean>}
 */
export async function confirm(title, text, yes) {
  let isSure = false;
  const { element, closed } = openDialog(title, [
    h("p", {}, prose(text)),
    h("div", { class: "buttons" },
      h("button", { type: "button", "data-test": "confirm-no", autofocus: true, click: () => element.close() }, "Cancel"),
      h("button", { type: "button", class: "danger", "data-test": "confirm-yes", click: () => {
        isSure = true;
        element.close();
      } }, yes)),
  ]);
  await closed;
  return isSure;
}

/** @type {HTMLElement | null} */
let toasts = null;
const NOTICE_MS = 6000;

/**
 * Show a notice at the edge of the page, and announce it to screen readers.
 *
 * @param {string} text
 * @param {"good" | "bad"} [look]
 */
export function notify(text, look = "good") {
  toasts ??= h("div", { class: "toasts", role: "status", "aria-live": "polite" });
  // Outside of an open dialog, the notice would be below the dialog's backdrop, and screen readers would not announce it.
  const place = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body;
  if (toasts.parentElement !== place) place.append(toasts);
  const toast = h("div", { class: `toast ${look}`, "data-test": "toast" }, prose(text));
  toasts.append(toast);
  // An error takes longer to read than "done".
  setTimeout(() => toast.remove(), look === "bad" ? NOTICE_MS * 2 : NOTICE_MS);
}

/**
 * Run an action that the manager may reject, and show the outcome.
 *
 * @param {() => Promise<unknown>} action
 * @param {string} [done]
 * @returns {Promise<boolean>} true if it succeeded
 */
export async function attempt(action, done) {
  try {
    await action();
  } catch (error) {
    notify(error instanceof Error ? error.message : String(error), "bad");
    return false;
  }
  if (done !== undefined) notify(done);
  return true;
}

/**
 * Copy text to the clipboard; if the browser does not allow it, show the text for manual copying.
 *
 * @param {string} text
 * @param {string} done
 */
export async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    notify(done);
  } catch {
    const area = h("textarea", { readonly: true, rows: 12, "aria-label": "Text to copy" });
    area.value = text;
    openDialog("Copy this", [area]);
    area.select();
  }
}
