// Before anything is drawn, so that a dark page does not flash white. Not a module: those wait.
(() => {
  try {
    const chosen = localStorage.getItem("trial-keeper-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.setAttribute("data-theme", chosen);
  } catch {
    // Storage may be forbidden; then the system's theme holds.
  }
})();
