// Work that need not wait for the modules: the theme, so that a dark page does not flash white, and the first request to the
// manager, which has the largest response. Not a module, since modules run last.
(() => {
  let key = null;
  // The path before that of the page's files, as in base.js.
  const source = new URL(/** @type {HTMLScriptElement} */ (document.currentScript).src).pathname;
  const base = source.slice(0, source.lastIndexOf("/page/"));
  try {
    const chosen = localStorage.getItem("trial-keeper-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.setAttribute("data-theme", chosen);
    key = localStorage.getItem(`trial-keeper-key${document.documentElement.dataset["home"] ?? base}`);
  } catch {
    // Storage may be forbidden; then the system's theme applies and there is no session.
  }
  if (key === null || location.pathname === `${base}/enter`) return;
  const asked = fetch(`${base}/api/v1/nni/changes?windows=true`, { cache: "no-store", signal: AbortSignal.timeout(30_000), credentials: "same-origin", headers: { "X-Trial-Keeper": key } });
  asked.catch(() => undefined); // the consumer of the promise reports the error
  /** @type {any} */ (window).firstChanges = { key, asked };
})();
