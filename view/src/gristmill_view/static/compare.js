// Two or more runs on one axis, and the settings in which they differ.
import { get } from "./api.js";
import { Board } from "./charts.js";
import { fill, h, NONE, visible } from "./dom.js";
import { count, duration, figure, links, percent, reward } from "./format.js";
import { AXES } from "./series.js";

const MOST = 6;
const PANELS = [
  { name: "reward_mean", title: "Reward", wide: true, height: 280, format: reward },
  { name: "completion_tokens_mean", title: "Completion length", zero: true },
  { name: "entropy_mean", title: "Entropy", zero: true },
  { name: "loss", title: "Loss" },
  { name: "grad_norm", title: "Gradient norm", zero: true },
  { name: "rollout_logprob_diff_mean", title: "Log-probability difference", log: true },
  { name: "kl_rollout", title: "KL to the sampler" },
  { name: "zero_advantage_share", title: "Groups without signal", format: percent, zero: true },
  { name: "tokens_per_second", title: "Tokens per second of training", zero: true },
];

export async function view({ main, signal, search, go, title }) {
  title("Compare");
  const chosen = (search.get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST);
  const runs = await get("runs", signal);
  const choose = (run, on) => go(links.compare(on ? [...chosen, run] : chosen.filter((name) => name !== run)), { replace: true });
  const picker = h("fieldset", { class: "picker" }, h("legend", {}, "Runs"), runs.map((line) => h("label", {},
    h("input", { type: "checkbox", checked: chosen.includes(line.run), disabled: !chosen.includes(line.run) && chosen.length >= MOST, onchange: (event) => choose(line.run, event.target.checked) }),
    ` ${visible(line.run)}`, h("small", {}, ` ${count(line.step)}${line.steps ? ` / ${count(line.steps)}` : ""}`))));
  const top = [h("div", { class: "headline" }, h("h1", {}, "Compare")), picker];
  if (chosen.length < 2) {
    fill(main, top, h("p", { class: "empty" }, runs.length < 2 ? "There is one run only. Train another one, and compare the two here."
      : "Choose two or more runs: their curves appear on one axis, with the settings in which they differ."));
    return { keys: {} };
  }
  fill(main, top, h("div", { class: "curves waiting" }, PANELS.map((panel) => h("figure", { class: `panel${panel.wide ? " wide" : ""}` }, h("figcaption", {}, panel.title)))));
  const names = PANELS.map((panel) => panel.name).join(",");
  const [comparison, overviews, series] = await Promise.all([
    get(`compare${query(chosen)}`, signal),
    Promise.all(chosen.map((run) => get(`runs/${encodeURIComponent(run)}`, signal))),
    Promise.all(chosen.map((run) => get(`runs/${encodeURIComponent(run)}/series?points=500&names=${names}`, signal))),
  ]);
  // A fork counts its own steps from 1; its curve begins after the step that it continues from.
  series.forEach((one, at) => { one.step = one.step.map((step) => step + (comparison.after?.[chosen[at]] ?? 0)); });
  const board = new Board({ axis: AXES.step });
  const steps = [...new Set(series.flatMap((one) => one.step))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const panels = PANELS.filter((panel) => series.some((one) => one.series[panel.name]));
  const curves = h("div", { class: "curves" }, panels.map((panel) => board.add(panel)));
  fill(main, top, summary(chosen, overviews, series), difference(comparison.settings_diff ?? [], chosen), curves);
  board.update((panel) => ({
    x: steps,
    steps,
    log: panel.log,
    lines: series.flatMap((one, at) => {
      const column = one.series[panel.name]?.mean;
      if (!column) return [];
      const values = new Array(steps.length).fill(null);
      one.step.forEach((step, index) => { values[place.get(step)] = panel.log && !(column[index] > 0) ? null : column[index]; });
      return [{ label: visible(chosen[at]), values, color: at, dash: at, named: true }];
    }),
  }));
  return { end: () => board.end(), keys: { j: () => board.move(1), k: () => board.move(-1) } };
}

const query = (runs) => `?runs=${runs.map(encodeURIComponent).join(",")}`;

function summary(runs, overviews, series) {
  const last = (one) => { const values = one.series.reward_mean?.mean ?? []; return values[values.length - 1]; };
  const spent = (one) => Object.values(one.phases ?? {}).map((values) => values.filter(Number.isFinite)).reduce((sum, values) => sum + values.reduce((a, b) => a + b, 0) / Math.max(1, values.length), 0);
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Runs" }, h("table", { class: "rows facts-table" },
    h("thead", {}, h("tr", {}, ["run", "state", "steps", "last reward", "held-out", "time per step"].map((name, at) => h("th", { scope: "col", class: at > 1 ? "number" : null }, name)))),
    h("tbody", {}, runs.map((run, at) => {
      const point = overviews[at].evaluations?.at(-1);
      return h("tr", {}, h("th", { scope: "row" }, h("i", { class: `line-key line-${at + 1}` }), h("a", { href: links.run(run) }, visible(run))),
        h("td", {}, overviews[at].state), h("td", { class: "number" }, count(overviews[at].step)), h("td", { class: "number" }, reward(last(series[at]))),
        h("td", { class: "number" }, point ? `${percent(point.score)}${point.low === null ? "" : ` (${percent(point.low)} to ${percent(point.high)})`}` : NONE),
        h("td", { class: "number" }, duration(spent(series[at]) || null)));
    }))));
}

function difference(rows, runs) {
  const title = h("h2", {}, "Settings that differ");
  if (!rows.length) return h("section", {}, title, h("p", { class: "soft" }, "None: the runs have the same settings, or their settings are not known."));
  const text = (value) => (value === undefined || value === null ? NONE : visible(typeof value === "string" ? value : typeof value === "number" ? figure(value) : JSON.stringify(value)));
  return h("section", {}, title, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Settings that differ" }, h("table", { class: "rows diff" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), runs.map((run, at) => h("th", { scope: "col" }, h("i", { class: `line-key line-${at + 1}` }), visible(run))))),
    h("tbody", {}, rows.map(({ key, values }) => h("tr", {}, h("th", { scope: "row" }, visible(key)), runs.map((run) => h("td", {}, text(values[run])))))))));
}
