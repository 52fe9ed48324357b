// The frame of the page: the bar, the routes, the keyboard, the theme and the question for a token.
import { askTokenWith, forgetToken, hasToken, Problem } from "./api.js";
import { announce, fill, h, soft, visible } from "./dom.js";
import { links } from "./format.js";
import * as compare from "./compare.js";
import * as group from "./group.js";
import * as metrics from "./metrics.js";
import * as overview from "./overview.js";
import * as prompt from "./prompt.js";
import * as rollouts from "./rollouts.js";
import * as runs from "./runs.js";
import * as step from "./step.js";

const VIEWS = { compare, group, metrics, overview, prompt, rollouts, runs, step };
const ROUTES = [
  [/^\/(?:view\/?)?$/, "runs", []],
  [/^\/view\/compare$/, "compare", []],
  [/^\/view\/([^/]+)$/, "overview", ["run"]],
  [/^\/view\/([^/]+)\/step\/(\d+)$/, "step", ["run", "step"]],
  [/^\/view\/([^/]+)\/group\/([^/]+)$/, "group", ["run", "group"]],
  [/^\/view\/([^/]+)\/metrics$/, "metrics", ["run"]],
  [/^\/view\/([^/]+)\/prompt\/([^/]+)$/, "prompt", ["run", "group"]],
  [/^\/view\/([^/]+)\/rollouts$/, "rollouts", ["run"]],
];
const bar = document.getElementById("bar");
const main = document.getElementById("main");
let current = null;
let turn = 0;

function route(path) {
  for (const [pattern, name, keys] of ROUTES) {
    const found = pattern.exec(path);
    if (found) return { name, ...Object.fromEntries(keys.map((key, at) => [key, decodeURIComponent(found[at + 1])])) };
  }
  return { name: "missing" };
}

/** Shows the view of the address. `scroll`: where to scroll to when it is there. */
async function show(scroll = 0) {
  const mine = ++turn;
  const where = route(location.pathname);
  current?.end?.();
  current = null;
  drawBar(where);
  const stop = new AbortController();
  const context = {
    ...where, go, search: new URLSearchParams(location.search), signal: stop.signal, main,
    title: (text) => { document.title = `${text} · Gristmill`; },
  };
  main.setAttribute("aria-busy", "true");
  try {
    if (where.name === "missing") throw new Problem("no_page", "There is no page at this address.", "Choose a run from the list.", 404);
    const shown = await VIEWS[where.name].view(context);
    if (mine !== turn) { shown?.end?.(); return; }
    current = { ...shown, end: () => { stop.abort(); shown?.end?.(); } };
    if (location.hash && shown?.hash) shown.hash(location.hash);
    else scrollTo(0, scroll);
    announce(document.title);
  } catch (error) {
    if (mine === turn && error.name !== "AbortError") failed(error);
  } finally {
    if (mine === turn) main.removeAttribute("aria-busy");
  }
}

function failed(error) {
  if (!(error instanceof Problem)) console.error(error);
  fill(main, h("section", { class: "empty" },
    h("h1", {}, error.status === 404 ? "Not here" : "This could not be shown"),
    h("p", {}, visible(error.message)),
    error.remedy ? h("p", {}, visible(error.remedy)) : null,
    h("p", {}, h("button", { onclick: () => show() }, "Try again"), " ", h("a", { href: links.runs() }, "All runs"))));
}

/** Goes to an address of the page. `replace`: without a new entry in the history. */
function go(address, { replace = false, quiet = false } = {}) {
  history.replaceState({ scroll: scrollY }, "");
  history[replace ? "replaceState" : "pushState"]({ scroll: 0 }, "", address);
  if (!quiet) show();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const address = new URL(link.href);
  if (address.origin !== location.origin || !address.pathname.startsWith("/view") || address.pathname.startsWith("/view/api/")) return;
  if (address.pathname === location.pathname && address.search === location.search && address.hash) return;
  event.preventDefault();
  go(address.pathname + address.search + address.hash);
});
addEventListener("popstate", (event) => show(event.state?.scroll ?? 0));
addEventListener("hashchange", () => current?.hash?.(location.hash));
history.scrollRestoration = "manual";

function drawBar(where) {
  const run = where.run;
  const tab = (name, href, text) => h("a", { href, "aria-current": where.name === name ? "page" : null }, text);
  fill(bar,
    h("a", { class: "brand", href: links.runs(), "aria-label": "Gristmill, all runs" },
      h("img", { src: "/view/static/icon.svg", alt: "", width: 22, height: 22 }), h("span", {}, "Gristmill")),
    h("nav", { "aria-label": "Views" },
      run ? [tab("overview", links.run(run), "Overview"), tab("metrics", links.metrics(run), "Metrics"), tab("rollouts", links.rollouts(run), "Rollouts")] : null,
      tab("compare", links.compare(run ? [run] : []), "Compare"),
      tab("runs", links.runs(), "Runs")),
    h("span", { class: "gap" }),
    hasToken() ? h("button", { class: "plain", onclick: () => { forgetToken(); location.reload(); } }, "Forget token") : null,
    h("button", { class: "plain icon help-button", onclick: help, title: "Keyboard (?)", "aria-label": "Keyboard shortcuts" }, "?"),
    h("button", { class: "plain icon", onclick: turnTheme, title: "Light or dark (t)", "aria-label": "Change between light and dark" }, "◐"));
}

const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function turnTheme() {
  const next = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("gristmill-theme", next); } catch { /* storage is off: the choice ends with the page */ }
  dispatchEvent(new Event("themechange"));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));

const KEYS = [
  ["j, k", "next and previous row, completion or point"],
  ["Enter", "open it"],
  ["n, p", "next and previous step, group or page"],
  ["/", "search the rollouts of the run"],
  ["o, m, r, c", "overview, metrics, rollouts, compare"],
  ["u", "up: from a group to its step, from a step to the overview"],
  ["t", "light or dark"],
  ["?", "this list"],
];

function help() {
  const box = h("dialog", { class: "help", "aria-labelledby": "help-title" },
    h("h2", { id: "help-title" }, "Keyboard"),
    h("dl", {}, KEYS.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)))),
    soft("On a chart: click a point to open its step, drag to zoom, double-click to see all."),
    h("button", { onclick: () => box.close() }, "Close"));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey || document.querySelector("dialog[open]")) return;
  const target = event.target;
  if (target.closest("input, select, textarea, [contenteditable]")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (event.key === "Enter" && target.closest("a, button, summary")) return;
  const where = route(location.pathname);
  const common = {
    "?": help, t: turnTheme,
    "/": () => (current?.keys?.["/"] ? current.keys["/"]() : where.run && go(links.rollouts(where.run) + "#find")),
    o: () => where.run && go(links.run(where.run)),
    m: () => where.run && go(links.metrics(where.run)),
    r: () => where.run && go(links.rollouts(where.run)),
    c: () => go(links.compare(where.run ? [where.run] : [])),
  };
  const action = current?.keys?.[event.key] ?? common[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

askTokenWith((refused) => new Promise((resolve) => {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: true });
  const form = h("form", { method: "dialog" },
    h("h2", { id: "token-title" }, "This API needs a token"),
    h("p", { id: "token-text" }, refused ? "The API does not know that token. " : "", "Any role can read. ",
      h("code", {}, "make secure"), " wrote the tokens to ", h("code", {}, ".secrets"), "."),
    h("label", { for: "token" }, "Token"), field,
    soft("The token stays in this tab and is forgotten when you close it."),
    h("button", { type: "submit" }, "Open"));
  const box = h("dialog", { class: "token", "aria-labelledby": "token-title" }, form);
  box.addEventListener("cancel", (event) => event.preventDefault());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = field.value.trim();
    // A header cannot hold other characters: fetch would throw.
    if (!/^[\x21-\x7e]+$/.test(given)) { field.value = ""; return; }
    box.close();
    box.remove();
    resolve(given);
  });
  document.body.append(box);
  box.showModal();
}));

show();
