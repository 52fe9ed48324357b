// One step: its metrics, its rewards, its groups.
import { get, pathOf } from "./api.js";
import { binned, histogram } from "./charts.js";
import { amount, announce, cell, fill, h, small, soft, visible } from "./dom.js";
import { count, figure, links, moment, plural, query, reward } from "./format.js";
import { chip, choice, cursor, ends, head, legend, NO_RECORDS, outcome, start, table } from "./rows.js";
import { timeline } from "./timeline.js";

const SHOWN = {
  all: ["all groups", () => true],
  mixed: ["rewards differ", (group) => !group.same],
  same: ["all rewards equal", (group) => group.same],
  lost: ["not trained on", (group) => group.outcome !== "trained"],
};
const mean = (group) => group.rewards.reduce((sum, value) => sum + value, 0) / Math.max(1, group.rewards.length);
const spread = (group) => { const [low, high] = ends(group.rewards); return high - low; };
const ORDERS = {
  row: ["as generated", () => 0],
  worst: ["worst first", (a, b) => mean(a) - mean(b)],
  best: ["best first", (a, b) => mean(b) - mean(a)],
  mixed: ["most mixed first", (a, b) => spread(b) - spread(a)],
};

export async function view({ run, step: text, main, signal, search, go, title }) {
  const step = Number(text);
  title(`Step ${step} · ${run}`);
  const found = await get(pathOf(run, "steps", step), signal);
  const all = found.groups.flatMap((group) => group.rewards);
  const [low, high] = ends(all);
  const filters = { show: search.get("show") ?? "all", order: search.get("order") ?? "row", low: search.get("low"), high: search.get("high") };
  const list = h("div", { class: "list" });
  const marked = cursor(() => [...list.querySelectorAll("tbody tr")]);
  const chart = h("div", {});
  const number = h("output", {});

  const change = (values) => {
    Object.assign(filters, values);
    go(location.pathname + query({ ...filters, show: filters.show === "all" ? "" : filters.show, order: filters.order === "row" ? "" : filters.order }), { replace: true, quiet: true });
    draw();
  };
  const draw = () => {
    const range = filters.low === null || filters.low === "" ? null : [Number(filters.low), Number(filters.high)];
    const inside = (group) => !range || group.rewards.some((value) => value >= range[0] - 1e-9 && value <= range[1] + 1e-9);
    const kept = found.groups.filter((group) => (SHOWN[filters.show] ?? SHOWN.all)[1](group) && inside(group));
    kept.sort((ORDERS[filters.order] ?? ORDERS.row)[1]);
    fill(chart, histogram(binned(all), { chosen: range, label: "completions",
      choose: (from, to) => change(range && Math.abs(from - range[0]) < 1e-9 ? { low: null, high: null } : { low: from, high: to }) }));
    fill(number, `${count(kept.length)} of ${plural(found.groups.length, "group")}`);
    announce(`${kept.length} groups`);
    marked.reset();
    fill(list, kept.length ? groupTable(run, kept, low, high) : h("p", { class: "empty" }, found.groups.length
      ? ["No group of this step is like that. ", h("button", { onclick: () => change({ show: "all", low: null, high: null }) }, "Show all groups")]
      : found.recorded === false ? [NO_RECORDS, h("a", { href: links.rollouts(run) }, "Show all rollouts")]
      : "No group of this step is on disk. Groups appear when a checkpoint covers the step, while the archive has room."));
  };

  fill(main,
    head(`Step ${count(step)}`, run, null,
      h("nav", { class: "around", "aria-label": "Steps" },
        h("a", { href: links.step(run, Math.max(1, step - 1)), rel: "prev", "aria-label": "previous step" }, "← previous"),
        h("a", { href: links.step(run, step + 1), rel: "next", "aria-label": "next step" }, "next →"))),
    warning(found.groups),
    h("div", { class: "columns" },
      h("section", {}, h("h2", {}, "Rewards"), chart),
      h("section", {}, h("h2", {}, "Metrics"), metrics(found.metrics ?? {}))),
    timeline(run, step, signal),
    h("div", { class: "controls" },
      choice("Show", "show", SHOWN, filters.show, change), choice("Sort", "order", ORDERS, filters.order, change),
      h("a", { class: "button", href: links.rollouts(run, { step }) }, "All rollouts of this step"),
      legend(low, high), number),
    list);
  draw();
  return {
    keys: {
      ...marked.keys, u: () => go(links.run(run)),
      n: () => go(links.step(run, step + 1)), p: () => step > 1 && go(links.step(run, step - 1)),
    },
  };
}

function warning(groups) {
  const same = groups.filter((group) => group.same).length;
  if (!groups.length || same < groups.length) return null;
  return h("section", { class: "banner trouble" }, h("p", {}, h("strong", {}, "Every group scored the same. "),
    "The step has no advantage to learn from. Look at the rewards: they may be too easy, too hard, or broken."));
}

function groupTable(run, groups, low, high) {
  return table(["group", "rewards", "mean", "became", "stale", "prompt"],
    groups.map((group) => h("tr", { class: group.same ? "same" : null },
      cell(h("a", { href: links.group(run, group.group_id) }, visible(group.group_id)), small(`row ${group.row ?? "–"} · ${visible(group.env_id ?? "")}`)),
      cell(h("div", { class: "chips" }, group.rewards.map((value, at) => h("a", { href: links.group(run, group.group_id, group.sequences?.[at] ?? at), tabindex: -1 }, chip(value, low, high))),
        group.same ? h("small", { class: "note" }, "all equal") : null)),
      amount(reward(group.rewards.length ? mean(group) : null)),
      cell(outcome(group.outcome, group.reason)),
      amount(group.staleness ?? "–"),
      h("td", { class: "text" }, start(group.prompt_start)))));
}

function metrics(values) {
  const rows = Object.entries(values).filter(([name]) => name !== "step");
  if (!rows.length) return soft("The step has no row in metrics.jsonl.");
  return h("div", { class: "metrics", tabindex: 0, role: "region", "aria-label": "Metrics of the step" }, h("dl", {}, rows.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)),
    h("dd", {}, name === "finished_at" ? moment(1000 * value) : typeof value === "number" ? figure(value) : visible(typeof value === "string" ? value : JSON.stringify(value)))))));
}
