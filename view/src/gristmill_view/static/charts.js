// Line charts and stacked bars on one x axis, with uPlot. Charts of one board share the axis, the cursor and the zoom.
/* global uPlot */
import { announce, css, fill, h, known, say } from "./dom.js";
import { figure } from "./format.js";

const colors = () => [1, 2, 3, 4, 5, 6, 7].map((at) => css(`--line-${at}`));
const DOUBLE_CLICK_MS = 250;
const HEIGHT = 170;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 2], [10, 4], [4, 4]];
const faded = (color, share) => `color-mix(in srgb, ${color} ${share}%, transparent)`;

/** Charts without data: they take the place of the charts of a view that loads. */
export const waiting = (panels) => h("div", { class: "curves" }, panels.map((panel) => {
  const plot = h("div", { class: "plot" });
  plot.style.height = `${panel.height ?? HEIGHT}px`;
  return h("figure", { class: `panel waiting${panel.wide ? " wide" : ""}` }, h("figcaption", {}, h("span", { class: "name" }, panel.title)), plot);
}));

/** The charts of one view. `axis`: one of AXES in series.js. `open`: called with the step of a point that a person chose. */
export class Board {
  constructor({ open = () => {}, axis }) {
    this.open = open;
    this.axis = axis;
    this.charts = [];
    this.zoomed = null;
    this.at = null;
    this.sync = uPlot.sync(`board-${Math.random()}`);
    this.redraw = () => this.charts.forEach((chart) => chart.build());
    this.watch = new ResizeObserver((entries) => entries.forEach(({ target }) => target.chart?.fit()));
    addEventListener("themechange", this.redraw);
  }

  add(panel) {
    const chart = new Chart(this, panel);
    this.charts.push(chart);
    this.watch.observe(chart.box);
    return chart.figure;
  }

  /** Gives all charts new data: a function of each chart's panel. */
  update(data, axis = this.axis) {
    if (axis !== this.axis) this.zoomed = this.at = null;
    this.axis = axis;
    this.charts.forEach((chart) => chart.set(data(chart.panel)));
  }

  zoom(range) {
    this.zoomed = range;
    this.charts.forEach((chart) => chart.rescale());
  }

  /** Moves the cursor of all charts by points, for the keyboard. */
  move(by) {
    const first = this.charts.find((chart) => chart.plot);
    if (!first) return;
    const last = first.data.x.length - 1;
    this.at = Math.min(last, Math.max(0, this.at === null ? (by > 0 ? 0 : last) : this.at + by));
    this.charts.forEach((chart) => chart.point(this.at));
    announce(`${this.axis.at(first.data.x[this.at])}: ${first.spoken(this.at)}`);
  }

  choose() {
    const first = this.charts.find((chart) => chart.plot);
    if (first && this.at !== null) this.open(first.data.steps[this.at]);
  }

  end() {
    removeEventListener("themechange", this.redraw);
    this.watch.disconnect();
    this.charts.forEach((chart) => chart.plot?.destroy());
  }
}

/**
 * One chart. `panel`: title, note, wide, height, stacked, format.
 * Data: x, steps, log, lines [{label, values, low, high, raw, color, dash, dots, named}], marks [{x, y, low, high}].
 */
class Chart {
  constructor(board, panel) {
    this.board = board;
    this.panel = panel;
    this.format = panel.format ?? figure;
    this.legend = h("div", { class: "legend" });
    this.box = h("div", { class: "plot", role: "img" });
    this.box.style.height = `${panel.height ?? HEIGHT}px`;
    this.box.chart = this;
    this.figure = h("figure", { class: `panel${panel.wide ? " wide" : ""}` },
      h("figcaption", {}, h("span", { class: "name", title: panel.note }, panel.title), this.legend), this.box);
    this.data = { x: [], lines: [], marks: [] };
  }

  set(data) {
    const form = JSON.stringify([data.log, this.board.axis.text, data.lines.map((line) => [line.label, !line.low, !line.raw])]);
    const same = this.plot && this.form === form;
    this.form = form;
    this.data = data;
    if (same) {
      this.rescale();
      this.values(this.plot.cursor.idx);
    } else this.build();
    this.box.setAttribute("aria-label", `${this.panel.title}: ${this.spoken(data.x.length - 1) || "no data yet"}`);
  }

  /** Returns uPlot's columns: x, each line, the two edges of each band, and the values of each smoothed line. */
  table() {
    const { x, lines } = this.data;
    const rows = this.panel.stacked ? stacked(lines, x.length) : lines.map((line) => line.values);
    const bands = lines.flatMap((line) => (line.low ? [line.high, line.low] : []));
    return [x, ...rows, ...bands, ...lines.flatMap((line) => (line.raw ? [line.raw] : []))];
  }

  build() {
    this.plot?.destroy();
    this.plot = null;
    const { x, lines } = this.data;
    const palette = colors();
    lines.forEach((line, at) => { line.shown = line.color === undefined ? palette[at % 7] : palette[line.color % 7]; });
    this.keys();
    if (!x.length || !lines.length) {
      fill(this.box, h("p", { class: "nodata" }, "no data yet"));
      return;
    }
    fill(this.box);
    const series = [{}, ...lines.map((line, at) => this.line(line, at))];
    const bands = [];
    for (const line of lines) {
      if (!line.low) continue;
      const edge = { stroke: "transparent", width: 0, points: { show: false } };
      series.push({ ...edge }, { ...edge });
      bands.push({ series: [series.length - 2, series.length - 1], fill: faded(line.shown, 16) });
    }
    for (const line of lines) {
      if (line.raw) series.push({ stroke: faded(line.shown, 35), width: 1, spanGaps: true, points: { show: false } });
    }
    this.plot = new uPlot({
      ...this.size(), series, bands,
      legend: { show: false },
      padding: [8, 20, 0, 0],
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: this.data.log ? 3 : 1, range: this.data.log ? undefined : (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis(), size: 26, values: (_, ticks) => ticks.map(this.board.axis.tick) },
        { ...axis(), size: 54, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.format(tick))) },
      ],
      cursor: {
        sync: { key: this.board.sync.key, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7, fill: (plot, at) => plot.series[at].stroke?.() ?? "transparent" },
      },
      hooks: {
        setCursor: [(plot) => this.values(plot.cursor.idx)],
        setSelect: [(plot) => this.selected(plot)],
        draw: [(plot) => this.marks(plot)],
      },
    }, this.table(), this.box);
    this.clicks();
    this.rescale();
    this.values(null);
  }

  line(line, at) {
    const bars = this.panel.stacked;
    return {
      label: line.label, stroke: line.shown, width: bars ? 0 : 1.75, spanGaps: true,
      fill: bars ? line.shown : undefined,
      dash: bars ? undefined : DASHES[(line.dash ?? at) % DASHES.length],
      paths: bars ? uPlot.paths.bars({ size: [0.92, 40], gap: 0 }) : undefined,
      points: { show: !bars && (line.dots || this.data.x.length < 3), size: 6, fill: line.shown },
    };
  }

  size() {
    return { width: Math.max(120, this.box.clientWidth), height: this.box.clientHeight };
  }

  fit() {
    const { width, height } = this.size();
    if (this.plot && this.box.clientWidth && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }

  range(low, high) {
    let [bottom, top] = [low ?? 0, high ?? 1];
    for (const mark of this.data.marks ?? []) {
      bottom = Math.min(bottom, mark.low ?? mark.y);
      top = Math.max(top, mark.high ?? mark.y);
    }
    if (this.panel.zero || this.panel.stacked) bottom = Math.min(0, bottom);
    if (bottom === 0 && top === 0) return [0, 1];
    if (bottom === top) return [bottom - Math.max(Math.abs(bottom) * 0.1, 1e-9), top + Math.max(Math.abs(top) * 0.1, 1e-9)];
    const space = (top - bottom) * 0.06;
    return [this.panel.zero || this.panel.stacked ? bottom : bottom - space, top + space];
  }

  rescale() {
    if (!this.plot) return;
    const { x } = this.data;
    const [low, high] = this.board.zoomed ?? [this.data.from ?? x[0], x[x.length - 1]];
    const side = this.panel.stacked ? 0.5 * (high - low) / Math.max(1, x.length - 1) : 0;
    this.plot.setData(this.table(), false);
    this.plot.setScale("x", { min: low - side, max: high + side });
  }

  clicks() {
    const { over } = this.plot;
    let pressed = 0;
    let opening = null;
    over.addEventListener("mousedown", (event) => { pressed = event.clientX; this.pressed = true; });
    over.addEventListener("click", (event) => {
      const at = this.plot.cursor.idx;
      clearTimeout(opening);
      if (Math.abs(event.clientX - pressed) >= 4 || !known(at)) return;
      const step = this.data.steps[at];
      opening = setTimeout(() => this.board.open(step), DOUBLE_CLICK_MS);
    });
    over.addEventListener("dblclick", () => {
      clearTimeout(opening);
      this.board.zoom(null);
    });
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    // The selection reaches every chart of the board; the one under the pointer zooms all.
    if (this.pressed && width >= 6) this.board.zoom(range);
    this.pressed = false;
  }

  point(at) {
    if (!this.plot) return;
    this.plot.setCursor({ left: this.plot.valToPos(this.data.x[at], "x"), top: this.plot.over.clientHeight / 2 });
  }

  /** Draws points with an interval, such as evaluations: a diamond, and a line from low to high. */
  marks(plot) {
    if (!this.data.marks?.length) return;
    const { ctx } = plot;
    const unit = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left - 6 * unit, plot.bbox.top, plot.bbox.width + 12 * unit, plot.bbox.height);
    ctx.clip();
    ctx.strokeStyle = css("--line-2");
    ctx.fillStyle = css("--card");
    ctx.lineWidth = 1.75 * unit;
    for (const mark of this.data.marks) {
      const x = plot.valToPos(mark.x, "x", true);
      const y = plot.valToPos(mark.y, "y", true);
      if (known(mark.low)) {
        ctx.beginPath();
        ctx.moveTo(x, plot.valToPos(mark.low, "y", true));
        ctx.lineTo(x, plot.valToPos(mark.high, "y", true));
        ctx.stroke();
      }
      const size = 4.5 * unit;
      ctx.beginPath();
      ctx.moveTo(x, y - size); ctx.lineTo(x + size, y); ctx.lineTo(x, y + size); ctx.lineTo(x - size, y); ctx.closePath();
      ctx.fill();
      ctx.stroke();
    }
    ctx.restore();
  }

  keys() {
    this.place = h("span", { class: "place" });
    this.numbers = this.data.lines.map(() => h("b", {}));
    fill(this.legend, this.place, this.data.lines.map((line, at) => h("span", { class: "key" },
      swatch(line, this.panel.stacked, at), this.data.lines.length > 1 || line.named ? h("span", { class: "label" }, line.label) : null, this.numbers[at])),
    this.data.marks?.length ? h("span", { class: "key" }, diamond(), "held-out, 95 %") : null);
  }

  /** Shows the numbers at a point; without a point, the newest. The place for them is always there. */
  values(at) {
    const { x, lines } = this.data;
    const shown = at ?? x.length - 1;
    say(this.place, x.length && known(at) ? this.board.axis.at(x[at]) : "");
    lines.forEach((line, number) => say(this.numbers[number], this.format(line.values[shown])));
  }

  spoken(at) {
    return this.data.lines.map((line) => `${line.label} ${this.format(line.values[at])}`).join(", ");
  }
}

function swatch(line, block, at) {
  if (block) return h("svg", { width: 10, height: 10, "aria-hidden": "true" }, h("rect", { width: 10, height: 10, rx: 2, fill: line.shown }));
  const dash = DASHES[(line.dash ?? at) % DASHES.length].join(" ");
  return h("svg", { width: 18, height: 8, "aria-hidden": "true" },
    h("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke: line.shown, "stroke-width": 2.5, "stroke-dasharray": dash || null }));
}

const diamond = () => h("svg", { width: 12, height: 12, "aria-hidden": "true" },
  h("path", { d: "M6 1 L11 6 L6 11 L1 6 Z", fill: "none", stroke: css("--line-2"), "stroke-width": 1.75 }));

const axis = () => ({
  stroke: css("--soft"), font: "11px system-ui, sans-serif", gap: 4,
  grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false },
});

/** Returns sums from the first line to each line. uPlot draws the highest first, so the lines come in reverse. */
function stacked(lines, length) {
  const sums = new Array(length).fill(0);
  return lines.slice().reverse().map((line) => line.values.map((value, at) => (sums[at] += value ?? 0))).reverse();
}

/** A small line without axes, for tables. */
export function sparkline(values, { width = 120, height = 26 } = {}) {
  const known = values.filter((value) => Number.isFinite(value));
  if (known.length < 2) return h("span", { class: "soft" }, "");
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = values.map((value, at) => Number.isFinite(value)
    ? `${(2 + at / (values.length - 1) * (width - 4)).toFixed(1)},${(height - 3 - (value - low) / span * (height - 6)).toFixed(1)}` : null);
  return h("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `from ${figure(known[0])} to ${figure(known[known.length - 1])}` },
  h("polyline", { points: points.filter(Boolean).join(" ") }));
}

/** Bars over rewards. `choose`: called with low and high of a bar that a person chose. `chosen`: its low and high. */
export function histogram(bars, { choose, chosen = null, label = "rewards" } = {}) {
  const top = Math.max(1, ...bars.map((bar) => bar.count));
  const total = bars.reduce((sum, bar) => sum + bar.count, 0);
  if (!total) return h("div", { class: "histogram" }, h("p", { class: "nodata" }, "no rewards to count"));
  return h("div", { class: "histogram" },
    h("div", { class: "bars", role: "group", "aria-label": `Histogram of ${label}` }, bars.map((bar) => {
      const inside = chosen && bar.low < chosen[1] + 1e-9 && bar.high > chosen[0] - 1e-9;
      const button = h("button", {
        class: inside ? "chosen" : null, disabled: !bar.count,
        "aria-pressed": inside ? "true" : "false",
        "aria-label": `${figure(bar.low)} to ${figure(bar.high)}: ${bar.count}`,
        title: `${figure(bar.low)} to ${figure(bar.high)}: ${bar.count.toLocaleString("en")}`,
        onclick: () => choose(bar.low, bar.high),
      }, h("i", {}));
      button.firstChild.style.height = bar.count ? `${Math.max(4, 100 * bar.count / top)}%` : "0";
      return button;
    })),
    h("div", { class: "ends" }, h("span", {}, figure(bars[0].low)), h("span", {}, `${total.toLocaleString("en")} ${label}`), h("span", {}, figure(bars[bars.length - 1].high))));
}

/** Counts values into bars of equal width. */
export function binned(values, bars = 20) {
  const known = values.filter((value) => Number.isFinite(value));
  if (!known.length) return [];
  const low = Math.min(...known);
  const high = Math.max(...known);
  if (high - low < 1e-9) return [{ low, high, count: known.length }];
  const width = (high - low) / bars;
  const counts = new Array(bars).fill(0);
  known.forEach((value) => { counts[Math.min(bars - 1, Math.floor((value - low) / width))] += 1; });
  return counts.map((count, at) => ({ low: low + at * width, high: low + (at + 1) * width, count }));
}
