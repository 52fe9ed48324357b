// The metrics of one run: what the server sent, and the rows that came since. Overview, metrics and compare draw them.
import { get, pathOf } from "./api.js";
import { h, visible } from "./dom.js";
import { count, duration, query, short } from "./format.js";
import { choice } from "./rows.js";

const POINTS = 500;
const MOST_POINTS = 3 * POINTS;

/** What the x axis can show: `of` returns its values of an answer of the server, `tick` and `at` write one of them. */
export const AXES = {
  step: { text: "step", of: ({ step }) => step, tick: (value) => (Number.isInteger(value) ? count(value) : ""), at: (value) => `step ${count(value)}` },
  tokens: { text: "tokens", of: ({ sums }) => sums.tokens, tick: short, at: (value) => `${short(value)} tokens` },
  time: { text: "time", of: ({ sums }) => sums.seconds, tick: duration, at: duration },
};
const SMOOTHING = { 0: ["none"], 0.6: ["weak"], 0.9: ["medium"], 0.97: ["strong"] };

/** How curves are drawn, from the address: `x`, `smooth`, `log`. */
export const drawing = (search) => ({
  x: Object.hasOwn(AXES, search.get("x")) ? search.get("x") : "step",
  smooth: Object.hasOwn(SMOOTHING, search.get("smooth")) ? Number(search.get("smooth")) : 0,
  log: search.get("log") === "1",
});

/** The controls of curves. `change`: called with the new drawing. The address gets it too, with `rest` behind it. */
export function drawingControls(now, change, rest = () => ({})) {
  const set = (values) => {
    Object.assign(now, values);
    history.replaceState(history.state, "", location.pathname + drawingQuery(now, rest()));
    change();
  };
  const log = h("input", { type: "checkbox", name: "log", checked: now.log, onchange: (event) => set({ log: event.target.checked }) });
  return h("div", { class: "controls" },
    choice("X axis", "x", Object.fromEntries(Object.entries(AXES).map(([name, { text }]) => [name, [text]])), now.x, set),
    choice("Smoothing", "smooth", SMOOTHING, String(now.smooth), ({ smooth }) => set({ smooth: Number(smooth) })),
    h("label", {}, log, " logarithmic"));
}

export const drawingQuery = (now, rest = {}) =>
  query({ ...rest, x: now.x === "step" ? "" : now.x, smooth: now.smooth || "", log: now.log ? "1" : "" });

/** Returns a moving mean in which each earlier point has `weight` times the weight of the next. Gaps stay gaps. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    [sum, total] = [sum * weight + value, total * weight + 1];
    return sum / total;
  });
}

/** Returns a line of a chart as it is drawn. A smoothed line has its values behind it. A log axis has no place for 0. */
export function drawn(line, { smooth, log }) {
  const shown = (values) => (log ? values?.map((value) => (value > 0 ? value : null)) : values);
  const [values, low, high] = [line.values, line.low, line.high].map((one) => shown(one && smoothed(one, smooth)));
  return { ...line, values, low, high, raw: smooth ? shown(line.values) : undefined };
}

export class Series {
  /** `names`: metrics, or groups of them such as `reward_parts.*`. `draw`: called when there is something new. */
  constructor(run, names, signal, draw) {
    this.path = pathOf(run, "series");
    this.signal = signal;
    this.draw = draw;
    this.choose(names);
    this.set({ step: [], sums: { tokens: [], seconds: [] }, series: {}, phases: {}, names: [] });
    this.waits = false;
    this.loads = null;
    /** Rows that came while the curves were loaded. */
    this.newer = [];
  }

  choose(names) {
    this.names = names;
    const exact = new Set(names);
    const groups = names.filter((name) => name.endsWith(".*")).map((name) => name.slice(0, -1));
    this.wants = (name) => exact.has(name) || groups.some((group) => name.startsWith(group));
  }

  set({ step, sums, series, phases, names }) {
    [this.step, this.sums, this.phases, this.known] = [step, sums, phases, names];
    this.columns = series;
    this.last = step.length ? step[step.length - 1] : -1;
  }

  /** Loads the curves. Rows that come meanwhile are added behind them. */
  async load() {
    const mine = this.loads = get(`${this.path}${query({ points: POINTS, name: this.names })}`, this.signal);
    try {
      const found = await mine;
      if (this.loads !== mine) return; // other metrics were chosen meanwhile
      this.set(found);
    } finally {
      if (this.loads === mine) this.loads = null;
    }
    this.draw();
    this.newer.splice(0).forEach((row) => this.add(row));
  }

  /** Loads the curves again: a trainer went back, or a tab that was open for long has more points than it can show. */
  async reload() {
    this.newer = [];
    try {
      await this.load();
    } catch (error) {
      if (error.name !== "AbortError") setTimeout(() => this.reload(), 10_000);
    }
  }

  /** Adds a row of the run's events. */
  add(row) {
    if (this.loads) this.newer.push(row);
    if (row.step <= this.last) return;
    this.last = row.step;
    this.step.push(row.step);
    const length = this.step.length;
    const push = (list, value) => { while (list.length < length - 1) list.push(null); list.push(value ?? null); };
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(row).filter(this.wants)])) {
      const column = (this.columns[name] ??= { mean: [] });
      push(column.mean, row[name]);
      if (column.min) { push(column.min, row[name]); push(column.max, row[name]); }
    }
    const spent = Object.entries(row).filter(([name]) => name.startsWith("seconds."));
    for (const name of new Set([...Object.keys(this.phases), ...spent.map(([name]) => name.slice(8))])) {
      push((this.phases[name] ??= []), row[`seconds.${name}`]);
    }
    this.sums.tokens.push((this.sums.tokens.at(-1) ?? 0) + (row.tokens ?? 0));
    this.sums.seconds.push((this.sums.seconds.at(-1) ?? 0) + spent.reduce((sum, [, value]) => sum + value, 0));
    if (length > MOST_POINTS && !this.loads) this.reload();
    // Several rows of one event, or a tab in the background: one drawing.
    if (!this.waits) {
      this.waits = true;
      requestAnimationFrame(() => { this.waits = false; this.draw(); });
    }
  }

  /** Returns the place of a step on the x axis. */
  place(step, now) {
    const at = this.step.findIndex((one) => one >= step);
    return now.x === "step" ? step : step ? AXES[now.x].of(this)[at] ?? null : 0;
  }

  /** Returns the data of a chart. `panel`: lines [[name, label]], or `group`, or `stacked` phases; and `spread`. */
  data(panel, drawing) {
    const now = { ...drawing, log: panel.log || (drawing.log && !panel.stacked) };
    const data = { x: AXES[now.x].of(this), steps: this.step, log: now.log };
    if (panel.stacked) return { ...data, lines: Object.entries(this.phases).map(([label, values], color) => ({ label, values, color })) };
    const names = panel.group
      ? Object.keys(this.columns).filter((name) => name.startsWith(panel.group)).map((name) => [name, visible(name.slice(panel.group.length))])
      : panel.lines.filter(([name]) => this.columns[name]);
    const spread = this.columns[panel.spread]?.mean;
    return { ...data, lines: names.map(([name, label]) => {
      const { mean, min, max } = this.columns[name];
      const edge = (sign) => mean.map((value, at) => (value === null || (spread[at] ?? null) === null ? null : value + sign * spread[at]));
      if (spread) return drawn({ label, values: mean, low: edge(-1), high: edge(1) }, now);
      return drawn({ label, values: mean, ...(min && names.length < 3 ? { low: min, high: max } : {}) }, now);
    }) };
  }
}
