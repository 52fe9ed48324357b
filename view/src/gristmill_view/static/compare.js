// Two or more runs on one axis, and the settings in which they differ.
import { get } from "./api.js";
import { Board, waiting } from "./charts.js";
import { amount, cell, fill, h, known, NONE, soft, visible } from "./dom.js";
import { count, duration, links, percent, query, reward } from "./format.js";
import { PANELS as OVERVIEW } from "./overview.js";
import { choice, picker, scrolling, table } from "./rows.js";
import { AXES, drawing, drawingControls, drawingQuery, drawn } from "./series.js";

const MOST = 24;
const MOST_PLACES = 1000;
const DIFFER = "Settings that differ";
const UNLIKE = /(^|\.)(seed|wandb_name)$/;
/** The first curve of each panel of the overview, for all runs. */
const PANELS = OVERVIEW.filter((panel) => panel.lines).map((panel) => {
  const [[name, label]] = panel.lines;
  return { ...panel, name, title: panel.lines.length > 1 ? `${panel.title}: ${label}` : panel.title };
});

export async function view({ main, signal, search, go, title }) {
  title("Compare");
  const chosen = [...new Set((search.get("runs") ?? "").split(",").filter(Boolean))].slice(0, MOST);
  const now = drawing(search);
  let seeds = search.get("by") === "seeds";
  const rest = (runs = chosen) => ({ runs: runs.join(","), by: seeds ? "seeds" : "" });
  const runs = await get("runs", signal);
  const top = [h("div", { class: "headline" }, h("h1", {}, "Compare")),
    picker(runs, chosen, MOST, (names) => go(links.compare() + drawingQuery(now, rest(names)), { replace: true }))];
  if (chosen.length < 2) {
    fill(main, top, h("p", { class: "empty" }, runs.length < 2 ? "There is one run only. Train another one, and compare the two here."
      : "Choose two or more runs: their curves appear on one axis, with the settings in which they differ."));
    return { keys: {} };
  }
  fill(main, top, waiting(PANELS));
  const names = PANELS.map((panel) => panel.name).join(",");
  const [comparison, overviews, series] = await Promise.all([
    get(`compare${query({ runs: chosen.join(",") })}`, signal),
    Promise.all(chosen.map((run) => get(`runs/${encodeURIComponent(run)}`, signal))),
    Promise.all(chosen.map((run) => get(`runs/${encodeURIComponent(run)}/series?points=500&names=${names}`, signal))),
  ]);
  // A fork counts its own steps from 1; its curve begins after the step that it continues from.
  series.forEach((one, at) => { one.step = one.step.map((step) => step + (comparison.after?.[chosen[at]] ?? 0)); });
  const differ = comparison.settings_diff ?? [];
  const alike = [...Map.groupBy(chosen.keys(), (at) => settingsKey(differ, chosen[at])).values()];
  const severalSeeds = alike.some((places) => places.length > 1);
  const groups = () => (seeds ? alike : chosen.map((_, at) => [at]));
  const board = new Board({ axis: AXES[now.x] });
  const panels = PANELS.filter((panel) => series.some((one) => one.series[panel.name]));
  const facts = h("div", { class: "run-facts" });
  const draw = () => {
    const shown = groups();
    fill(facts, summary(chosen, shown, overviews, series), difference(differ, chosen, shown));
    board.update((panel) => lines(panel, now, series, chosen, shown), AXES[now.x]);
  };
  const bySeeds = severalSeeds ? choice("Lines", "by", { runs: ["one for each run"], seeds: ["mean of the runs that differ in their seeds only"] }, seeds ? "seeds" : "runs", ({ by }) => {
    seeds = by === "seeds";
    history.replaceState(history.state, "", location.pathname + drawingQuery(now, rest()));
    draw();
  }) : null;
  const controls = drawingControls(now, draw, rest);
  if (bySeeds) controls.append(bySeeds);
  fill(main, top, facts, controls, h("div", { class: "curves" }, panels.map((panel) => board.add(panel))));
  draw();
  return { end: () => board.end(), keys: { j: () => board.move(1), k: () => board.move(-1) } };
}

/** Returns what two runs have in common that differ in their seeds and their names only. */
const settingsKey = (differ, run) => JSON.stringify(differ.filter(({ key }) => !UNLIKE.test(key)).map(({ values }) => values[run]));

/** Returns the data of a chart: a line for each group of runs, with one standard deviation to each side of its mean. */
function lines(panel, drawing, series, runs, groups) {
  const now = { ...drawing, log: panel.log || drawing.log };
  const known = groups.map((places) => places.filter((at) => series[at].series[panel.name]));
  const x = grid(known.flat().map((at) => AXES[now.x].of(series[at])));
  const on = (at, values) => values && onGrid(x, AXES[now.x].of(series[at]), values);
  return { x, steps: x, log: now.log, lines: known.flatMap((places, group) => {
    if (!places.length) return [];
    const drawnRuns = places.map((at) => {
      const { values, raw } = drawn({ values: series[at].series[panel.name].mean }, now);
      return { values: on(at, values), raw: on(at, raw) };
    });
    const look = { color: group, dash: group + Math.floor(group / 7), named: true };
    if (places.length === 1) return [{ ...look, label: visible(runs[places[0]]), ...drawnRuns[0] }];
    const points = x.map((_, at) => drawnRuns.map(({ values }) => values[at]).filter((value) => value !== null)).map(spread);
    return [{ ...look, label: `${places.length} × ${visible(runs[places[0]])}`, values: points.map(({ mean }) => mean),
      low: points.map(({ low }) => (now.log && low <= 0 ? null : low)), high: points.map(({ high }) => high) }];
  }) };
}

/** Returns the mean of some values, and one sample standard deviation to each side of it. */
function spread(values) {
  if (!values.length) return { mean: null, low: null, high: null };
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const side = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, values.length - 1));
  return { mean, low: mean - side, high: mean + side };
}

/** Returns the places of several runs on the x axis, at most MOST_PLACES of them. */
function grid(axes) {
  const all = [...new Set(axes.flat())].sort((a, b) => a - b);
  const every = Math.ceil(all.length / MOST_PLACES);
  return every < 2 ? all : all.filter((_, at) => at % every === 0 || at === all.length - 1);
}

/** Returns the values of a run at the places of `x`, on straight lines between its points, and null outside of them. */
function onGrid(x, own, values) {
  const points = own.map((place, at) => [place, values[at]]).filter(([, value]) => Number.isFinite(value));
  let next = 0;
  return x.map((place) => {
    while (next < points.length && points[next][0] < place) next += 1;
    if (next === points.length || (next === 0 && points[0][0] > place)) return null;
    const [to, high] = points[next];
    if (to === place) return high;
    const [from, low] = points[next - 1];
    return low + (high - low) * (place - from) / (to - from);
  });
}

function summary(runs, groups, overviews, series) {
  const numbers = ["steps", "last reward", "held-out", "time per step"];
  return scrolling("Runs", table(["run", "state", ...numbers],
    groups.flatMap((places, group) => places.map((at) => {
      const point = overviews[at].evaluations?.at(-1);
      return h("tr", {}, h("th", { scope: "row" }, lineKey(group), h("a", { href: links.run(runs[at]) }, visible(runs[at]))),
        cell(overviews[at].state), amount(count(overviews[at].step)), amount(reward(series[at].series.reward_mean?.mean.at(-1))),
        amount(point ? `${percent(point.score)}${point.low === null ? "" : ` (${percent(point.low)} to ${percent(point.high)})`}` : NONE),
        amount(duration(series[at].sums.seconds.at(-1) / overviews[at].step)));
    })), numbers));
}

const lineKey = (group) => h("i", { class: `line-key line-${group % 7 + 1}` });

function difference(rows, runs, groups) {
  const title = h("h2", {}, DIFFER);
  if (!rows.length) return h("section", {}, title, soft("None: the runs have the same settings, or their settings are not known."));
  const text = (value) => (!known(value) ? NONE : visible(typeof value === "string" ? value : JSON.stringify(value)));
  return h("section", {}, title, scrolling(DIFFER, table(
    ["setting", ...runs.map((run, at) => [lineKey(groups.findIndex((places) => places.includes(at))), visible(run)])],
    rows.map(({ key, values }) => h("tr", {}, h("th", { scope: "row" }, visible(key)), runs.map((run) => cell(text(values[run]))))))));
}
