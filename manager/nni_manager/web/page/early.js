// What need not wait for the modules: the theme, so that a dark page does not flash white, and the first question to the
// manager, whose answer is the largest thing of all. Not a module itself: those run last.
(() => {
  let key = null;
  try {
    const chosen = localStorage.getItem("trial-keeper-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.setAttribute("data-theme", chosen);
    key = localStorage.getItem("trial-keeper-key");
  } catch {
    // Storage may be forbidden; then the system's theme holds, and nobody is let in.
  }
  if (key === null || location.pathname === "/enter") return;
  const asked = fetch("/api/v1/nni/changes", { cache: "no-store", signal: AbortSignal.timeout(30_000), credentials: "same-origin", headers: { "X-Trial-Keeper": key } });
  asked.catch(() => undefined); // who takes it up says so
  /** @type {any} */ (window).firstChanges = { key, asked };
})();
