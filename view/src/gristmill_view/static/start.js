"use strict";
// Runs before the first paint, and before the page's other files load.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("gristmill-theme"); } catch { /* storage is off: the system decides */ }
  // A theme that was chosen does not flash. Without a choice the system decides.
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
(() => {
  // A file that did not arrive leaves the page empty. A browser ends requests when the machine's network changes, as
  // Docker does with each container, so the page loads again: three times, because a file may also be missing.
  const KEY = "gristmill-loads";
  let loads = 0;
  try { loads = Number(sessionStorage.getItem(KEY) ?? 0); } catch { return; }
  let failed = false;
  addEventListener("error", ({ target }) => {
    if (failed || loads >= 3 || !(target instanceof HTMLScriptElement || target instanceof HTMLLinkElement)) return;
    failed = true;
    sessionStorage.setItem(KEY, String(loads + 1));
    setTimeout(() => location.reload(), 500 * (loads + 1));
  }, true);
  addEventListener("load", () => { if (!failed) sessionStorage.removeItem(KEY); });
})();
