// All runs that the server knows. At the root of a server with one run, that run is shown.
import { get } from "./api.js";
import { sparkline } from "./charts.js";
import { fill, h, NONE, visible } from "./dom.js";
import { count, links, moment, reward } from "./format.js";
import { cursor } from "./rows.js";

const AGAIN_MS = 2000;

export async function view({ main, signal, go, title }) {
  title("Runs");
  const runs = await get("runs", signal);
  if (location.pathname === "/" && runs.length === 1) {
    go(links.run(runs[0].run), { replace: true });
    return {};
  }
  const list = h("div", { class: "list" });
  const marked = cursor(() => [...list.querySelectorAll("tbody tr")]);
  fill(main, h("div", { class: "headline" }, h("h1", {}, "Runs")), list);
  fill(list, runs.length ? h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, ["run", "state", "step", "reward", "trend", "started"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, runs.map((line) => h("tr", {},
      h("td", {}, h("a", { href: links.run(line.run) }, visible(line.run)), h("small", {}, visible(line.config_name ?? ""))),
      h("td", {}, h("span", { class: `pill state-${line.state}` }, line.state), line.live ? h("small", {}, "live") : null),
      h("td", { class: "number" }, `${count(line.step)}${line.steps ? ` / ${count(line.steps)}` : ""}`),
      h("td", { class: "number" }, line.reward === null ? NONE : reward(line.reward)),
      h("td", {}, sparkline(line.rewards ?? [])),
      h("td", {}, moment(line.started_ms))))))
    : h("section", { class: "empty" }, h("p", {}, "No run is here yet."),
      h("p", {}, "Start one with ", h("code", {}, "docker compose up"), " or ", h("code", {}, "make local"), ". It appears here by itself.")));
  // Somebody who opened the page before the run began is waiting for it.
  const again = runs.length ? null : setTimeout(() => go(location.pathname, { replace: true }), AGAIN_MS);
  return { keys: marked.keys, end: () => clearTimeout(again) };
}
