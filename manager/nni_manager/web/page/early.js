// Work that need not wait for the modules: the theme, so that a dark page does not flash white, and the first request to the
// manager, which has the largest response. Not a module, since modules run last.
(() => {
  let key = null;
  try {
    const chosen = localStorage.getItem("trial-keeper-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.setAttribute("data-theme", chosen);
    key = localStorage.getItem("trial-keeper-key");
  } catch {
    // Storage may be forbidden; then the system's theme applies and there is no session.
  }
  if (key === null || location.pathname === "/enter") return;
  const asked = fetch("/api/v1/nni/changes", { cache: "no-store", signal: AbortSignal.timeout(30_000), credentials: "same-origin", headers: { "X-Trial-Keeper": key } });
  asked.catch(() => undefined); // the consumer of the promise reports the error
  /** @type {any} */ (window).firstChanges = { key, asked };
})();
