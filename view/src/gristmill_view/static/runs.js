// All runs that the server knows. At the root of a server with one run, that run is shown.
import { get } from "./api.js";
import { sparkline } from "./charts.js";
import { amount, cell, fill, h, NONE, small, visible } from "./dom.js";
import { count, links, moment, reward } from "./format.js";
import { cursor, table } from "./rows.js";

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
  fill(list, runs.length ? table(["run", "state", "step", "reward", "trend", "started"],
    runs.map((line) => h("tr", {},
      cell(h("a", { href: links.run(line.run) }, visible(line.run)), small(visible(line.config_name ?? ""))),
      cell(h("span", { class: `pill state-${line.state}` }, line.state), line.live ? small("live") : null),
      amount(`${count(line.step)}${line.steps ? ` / ${count(line.steps)}` : ""}`),
      amount(line.reward === null ? NONE : reward(line.reward)),
      cell(sparkline(line.rewards ?? [])),
      cell(moment(line.started_ms)))))
    : h("section", { class: "empty" }, h("p", {}, "No run is here yet."),
      h("p", {}, "Start one with ", h("code", {}, "docker compose up"), " or ", h("code", {}, "make local"), ". It appears here by itself.")));
  // Somebody who opened the page before the run began is waiting for it.
  const again = runs.length ? null : setTimeout(() => go(location.pathname, { replace: true }), AGAIN_MS);
  return { keys: marked.keys, end: () => clearTimeout(again) };
}
