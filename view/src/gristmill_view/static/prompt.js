// One prompt over the steps of a run, and of other runs: the reward of each of its groups, its best and its worst completion.
import { get, pathOf } from "./api.js";
import { Board } from "./charts.js";
import { cell, fill, h, NONE, shown, small, visible } from "./dom.js";
import { count, links, plural, query, reward } from "./format.js";
import { chip, cursor, ends, head, legend, outcome, picker, start, table } from "./rows.js";
import { AXES } from "./series.js";

const MOST = 7;
const PANEL = { title: "Reward of the prompt", wide: true, height: 250, format: reward, note: "The mean of each group. The band is from its lowest to its highest reward" };
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

export async function view({ run, group: id, main, signal, search, go, title }) {
  title(`Prompt of ${id} · ${run}`);
  const others = (search.get("runs") ?? "").split(",").filter((name) => name && name !== run);
  const chosen = [...new Set([run, ...others])].slice(0, MOST);
  const address = (runs) => links.prompt(run, id) + query({ runs: runs.filter((name) => name !== run).join(",") });
  const path = pathOf(run, "groups", id, "prompt");
  const [runs, ...found] = await Promise.all([get("runs", signal), ...chosen.map((name) => get(path + query({ in: name }), signal))]);
  const rows = found.flatMap(({ groups }, at) => groups.map((group) => ({ ...group, run: chosen[at] })));
  const [low, high] = ends(rows.flatMap((row) => row.rewards));
  const list = h("div", { class: "list" });
  const marked = cursor(() => [...list.querySelectorAll("tbody tr")]);
  const board = new Board({ axis: AXES.step, open: (step) => go(links.step(run, step)) });
  const chart = board.add(PANEL);
  fill(main,
    head("One prompt", run, [" · ", h("a", { href: links.group(run, id) }, visible(id))]),
    h("section", { class: "prompt" }, h("h2", {}, "Prompt"), h("pre", { tabindex: 0 }, shown(found[0].question))),
    picker(runs.filter((line) => line.run !== run), chosen, MOST, (names) => go(address(names), { replace: true }), "Also in"),
    h("div", { class: "curves" }, chart),
    h("div", { class: "controls" }, h("output", {}, found.map(({ groups, total }, at) =>
      `${visible(chosen[at])}: ${total > groups.length ? `the last ${count(groups.length)} of ` : ""}${plural(total, "group")}`).join(", ")), legend(low, high)),
    list);
  fill(list, rows.length ? groupTable(rows, chosen, low, high) : h("p", { class: "empty" }, "No group with this prompt is on disk."));
  board.update(() => lines(found, chosen));
  return { end: () => board.end(), keys: { ...marked.keys, u: () => go(links.group(run, id)) } };
}

/** Returns a line for each run, with a point for each step that trained on the prompt. Several groups of a step are one. */
function lines(found, runs) {
  const steps = found.map(({ groups }) => Map.groupBy(groups.filter((one) => one.step !== null && one.outcome !== "evaluation" && one.rewards.length), (one) => one.step));
  const x = [...new Set(steps.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  return { x, steps: x, lines: steps.flatMap((of, at) => {
    if (!of.size) return [];
    const values = x.map((step) => of.get(step)?.flatMap((one) => one.rewards) ?? null);
    const each = (value) => values.map((one) => (one ? value(one) : null));
    return [{ label: visible(runs[at]), named: true, dots: true, color: at, dash: at, values: each(mean),
      ...(runs.length === 1 ? { low: each((one) => Math.min(...one)), high: each((one) => Math.max(...one)) } : {}) }];
  }) };
}

function groupTable(rows, runs, low, high) {
  const ordered = rows.map((row, at) => [row, at]).sort(([a, one], [b, other]) => (a.step ?? Infinity) - (b.step ?? Infinity) || one - other);
  const text = (value) => (value === null ? h("i", { class: "soft" }, NONE) : h("span", {}, start(value, 140) || h("i", {}, "empty")));
  return table(["step", "group", "rewards", "became", "best", "worst"],
    ordered.map(([row]) => h("tr", {},
      h("td", { class: "number left" }, row.step === null ? NONE : h("a", { href: links.step(row.run, row.step), tabindex: -1, class: "second" }, count(row.step))),
      cell(h("a", { href: links.group(row.run, row.group_id) }, visible(row.group_id)),
        runs.length > 1 ? small(h("i", { class: `line-key line-${runs.indexOf(row.run) + 1}` }), visible(row.run)) : null),
      cell(h("div", { class: "chips" }, row.rewards.map((value) => chip(value, low, high)))),
      cell(outcome(row.outcome, row.reason)),
      h("td", { class: "text half" }, text(row.best)), h("td", { class: "text half" }, text(row.worst)))));
}
