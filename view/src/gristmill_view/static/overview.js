// The state of a run in ten seconds: how far, how good, who waits, what is wrong. Then the curves.
import { get, listen, moves, pathOf } from "./api.js";
import { Board, waiting } from "./charts.js";
import { announce, cell, fill, h, NONE, say, soft, visible } from "./dom.js";
import { count, duration, figure, links, moment, percent, plural, reward, signed, words } from "./format.js";
import { AXES, drawing, drawingControls, Series } from "./series.js";

export const PANELS = [
  { key: "reward", title: "Reward", wide: true, height: 250, format: reward, lines: [["reward_mean", "mean"]], spread: "reward_std", marks: true,
    note: "Mean over all completions of the step; the band is one standard deviation to each side" },
  { key: "parts", title: "Reward by part", height: 250, format: reward, group: "reward_parts.", note: "Mean of each reward before its weight" },
  { key: "sources", title: "Reward by source", height: 250, format: reward, group: "source_rewards.", note: "Mean reward of each source of the run" },
  { key: "length", title: "Completion length", lines: [["completion_tokens_mean", "tokens"]], zero: true, note: "Mean number of sampled tokens" },
  { key: "shares", title: "Shares", format: percent, zero: true, note: "Groups whose advantages are all zero; completions cut at max_tokens",
    lines: [["zero_advantage_share", "no signal"], ["cut_off_share", "cut off"]] },
  { key: "diff", title: "Log-probability difference", log: true, note: "|trainer − model server| on sampled tokens. More than rounding means wrong tokens, masks or weights",
    lines: [["rollout_logprob_diff_max", "largest"], ["rollout_logprob_diff_mean", "mean"]] },
  { key: "loss", title: "Loss", lines: [["loss", "loss"]] },
  { key: "entropy", title: "Entropy", zero: true, lines: [["entropy_mean", "nats per token"]] },
  { key: "kl", title: "KL divergence", lines: [["kl_rollout", "to the sampler"], ["kl_ref", "to the reference"]] },
  { key: "ratio", title: "Policy ratio", lines: [["ratio.p99", "99 %"], ["ratio.p50", "median"], ["ratio.p01", "1 %"]] },
  { key: "clip", title: "Clipped tokens", format: percent, zero: true, lines: [["clip_high_share", "high"], ["clip_low_share", "low"]] },
  { key: "norm", title: "Gradient norm", zero: true, lines: [["grad_norm", "before clipping"]] },
  { key: "staleness", title: "Staleness", zero: true, lines: [["staleness_mean", "steps"]], note: "Steps between the weights that sampled and the weights that were trained" },
  { key: "speed", title: "Tokens per second of training", zero: true, lines: [["tokens_per_second", "tokens"]],
    note: "Without the time in which the trainer waits, publishes and writes. The speed above the curves is of the whole step" },
  { key: "rate", title: "Learning rate", zero: true, lines: [["learning_rate", "rate"]] },
  { key: "memory", title: "Memory", zero: true, lines: [["memory_mb", "MB, peak"]], note: "Peak memory of the trainer so far: of the device on CUDA, else of the process" },
  { key: "phases", title: "Time per step", wide: true, stacked: true, format: duration, note: "Wall time by phase. A long `wait` means that the trainer starves" },
];
const LOOK = [
  ["the newest completions", {}], ["the lowest rewards", { order: "reward" }], ["completions that were cut off", { finish_reason: "length" }],
  ["the longest completions", { order: "-completion_tokens" }], ["dropped groups", { outcome: "dropped" }],
];
const QUEUE = {
  ready: "wait for the trainer",
  leased: "with the trainer: the groups of its next step, and of finished steps that no checkpoint covers yet",
  trained: "trained on, and covered by a checkpoint", dropped: "given up before they were trained on",
  dead: "leased again and again without an ack",
};
const NAMES = [...new Set(PANELS.flatMap((panel) => [...(panel.lines ?? []).map(([name]) => name), panel.spread, panel.group && `${panel.group}*`]))].filter(Boolean);

export async function view(context) {
  const { run, main, signal, go, title } = context;
  title(run);
  const page = new Page(context);
  fill(main, page.skeleton());
  const [overview] = await Promise.all([get(pathOf(run), signal), page.series.load()]);
  page.start(overview);
  page.connection(moves(overview) ? "connecting" : "still");
  const close = listen(overview, () => page.series.last, {
    step: (row) => page.series.add(row),
    services: (state) => page.state(state),
    trouble: (trouble) => page.trouble(trouble),
    reload: () => page.series.reload(),
    state: (state) => page.connection(state),
  });
  return {
    end: () => { close(); page.board.end(); },
    keys: {
      j: () => page.board.move(1), k: () => page.board.move(-1), Enter: () => page.board.choose(),
      u: () => go(links.runs()),
    },
  };
}

class Page {
  constructor({ run, go, search, signal }) {
    this.run = run;
    this.drawing = drawing(search);
    this.board = new Board({ axis: AXES[this.drawing.x], open: (step) => go(links.step(run, step)) });
    this.series = new Series(run, NAMES, signal, () => this.draw());
    this.evaluations = [];
  }

  skeleton() {
    this.pill = h("span", { class: "pill" }, "…");
    this.link = h("span", { class: "connection" });
    this.sub = h("p", { class: "soft sub" }, "\u00a0");
    this.banner = h("section", { class: "banner calm", "aria-label": "State of the run" }, h("p", {}, "\u00a0"));
    this.facts = h("dl", { class: "facts" }, ["progress", "reward", "held-out score", "speed", "groups"].map((name) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, h("b", {}, "…"), h("span", {}, "\u00a0")))));
    this.curves = waiting(PANELS);
    this.services = h("div", { class: "services" });
    this.queue = h("div", { class: "queue" });
    this.settings = h("div", {});
    return [
      h("div", { class: "headline" }, h("h1", {}, visible(this.run)), this.pill, this.link),
      this.sub, this.banner, this.facts, drawingControls(this.drawing, () => this.draw()),
      h("div", { class: "board" }, this.curves, h("aside", { "aria-label": "Services and queue" },
        h("section", {}, h("h2", {}, "Services"), this.services),
        h("section", {}, h("h2", {}, "Groups"), this.queue),
        h("section", {}, h("h2", {}, "Look at"), h("ul", { class: "look" }, LOOK.map(([text, filters]) =>
          h("li", {}, h("a", { href: links.rollouts(this.run, filters) }, text))))),
        this.settings)),
    ];
  }

  start(overview) {
    this.evaluations = overview.evaluations ?? [];
    const names = new Set(Object.keys(this.series.columns));
    const panels = PANELS.filter((panel) => (panel.stacked ? Object.keys(this.series.phases).length
      : panel.group ? [...names].some((name) => name.startsWith(panel.group)) : panel.lines.some(([name]) => names.has(name))));
    this.showSettings(overview.settings ?? {});
    // A run without a step yet keeps all panels: it does not know yet which metrics it will have.
    fill(this.curves, (panels.length ? panels : PANELS).map((panel) => this.board.add(panel)));
    this.draw();
    this.state(overview);
    this.trouble(overview.trouble);
    if (overview.started_ms) say(this.sub, `started ${moment(overview.started_ms)}${overview.protocol === "atropos" ? " · Atropos' protocol" : ""}`);
  }

  draw() {
    this.board.update((panel) => this.lines(panel), AXES[this.drawing.x]);
    this.showReward();
  }

  lines(panel) {
    const data = this.series.data(panel, this.drawing);
    const places = this.evaluations.map((point) => this.series.place(point.step, this.drawing));
    const marks = panel.marks ? this.evaluations.map((point, at) => ({ x: places[at], y: point.score, low: point.low, high: point.high })) : [];
    return { ...data, from: Math.min(data.x[0], places[0] ?? data.x[0]), marks: marks.filter((mark) => mark.x !== null) };
  }

  state(state) {
    if (state.evaluations && state.evaluations.length !== this.evaluations.length) {
      this.evaluations = state.evaluations;
      this.draw();
    }
    this.now = { ...this.now, ...state };
    say(this.pill, state.state);
    this.pill.className = `pill state-${state.state}`;
    this.showFacts();
    this.showServices();
    this.showQueue();
    if (!this.troubled) this.calm();
  }

  fact(at, value, note) {
    const [b, span] = ["b", "span"].map((tag) => this.facts.children[at].querySelector(tag));
    say(b, value);
    if (typeof note === "string") say(span, note);
    else fill(span, note);
  }

  showFacts() {
    const { step, steps, seconds_left: left, tokens_per_second: speed, queue } = this.now;
    const share = steps ? Math.min(1, step / steps) : 0;
    if (!this.meter) this.meter = h("progress", { max: 1, "aria-label": "progress" });
    this.meter.value = share;
    const rest = this.now.state !== "finished" && Number.isFinite(left) ? `${duration(left)} left` : steps ? `${Math.round(100 * share)} %` : "no end set";
    this.fact(0, steps ? `${count(step)} / ${count(steps)}` : count(step), [this.meter, rest]);
    const newest = this.evaluations[this.evaluations.length - 1];
    const first = this.evaluations[0];
    this.fact(2, newest ? percent(newest.score) : NONE, newest
      ? `${first !== newest ? `from ${percent(first.score)}; ` : ""}step ${newest.step}, ${plural(newest.n, "prompt")}` : "no evaluation yet");
    this.fact(3, figure(speed), "tokens per second, last ten steps");
    const lost = (queue?.dropped ?? 0) + (queue?.dead ?? 0);
    this.fact(4, count(queue?.trained ?? null), lost ? [h("a", { href: links.rollouts(this.run, { outcome: queue.dropped ? "dropped" : "dead" }) }, `${count(lost)} not trained`)] : "trained, none dropped");
  }

  showReward() {
    const values = (this.series.columns.reward_mean?.mean ?? []).filter((value) => value !== null);
    if (!values.length) { this.fact(1, NONE, "no step yet"); return; }
    const [first, last] = [values[0], values[values.length - 1]];
    this.fact(1, reward(last), `${signed(last - first)} since the first step`);
  }

  showServices() {
    const { services } = this.now;
    if (!services?.length) { fill(this.services, soft("Read from files: no service reports.")); return; }
    fill(this.services, h("ul", {}, services.map((service) => h("li", {},
      h("i", { class: `dot ${service.state}` }), h("b", {}, visible(service.name)),
      h("span", { class: "seen" }, Number.isFinite(service.heartbeat_s) ? `${duration(service.heartbeat_s)} ago` : service.state),
      h("span", { class: "detail" }, [service.state, service.version && `weights ${service.version}`, service.detail].filter(Boolean).map(visible).join(" · "))))));
  }

  showQueue() {
    const { queue = {}, waiting = [], dropped = {} } = this.now;
    const total = Math.max(1, (queue.ready ?? 0) + (queue.leased ?? 0));
    const row = (name, note) => {
      const bar = h("i", {});
      bar.style.width = `${Math.min(100, 100 * (queue[name] ?? 0) / total)}%`;
      return h("tr", { title: QUEUE[name] }, h("th", { scope: "row" }, name), cell(count(queue[name] ?? 0)),
        h("td", { class: "fillbar" }, ["ready", "leased"].includes(name) ? bar : note));
    };
    const { receipts } = this.now;
    fill(this.queue,
      receipts ? h("p", { class: "soft receipts" }, `${count(receipts.proven)} of ${count(receipts.publications)} publications proven`) : null,
      receipts?.newest?.length ? h("ul", { class: "soft receipts" }, receipts.newest.map((one) => h("li", {}, visible(newestReceipt(one))))) : null,
      h("table", {}, h("tbody", {}, row("ready"), row("leased"), row("trained"),
        row("dropped", Object.entries(dropped).map(([reason, number]) => `${count(number)} ${visible(words(reason))}`).join(", ")), row("dead"))),
      h("p", { class: "waiting soft" }, waiting.length ? waiting.map((wait) => `${visible(wait.who)} waits for ${visible(wait.for)}.`).join(" ") : "No service waits."));
  }

  showSettings(settings) {
    const rows = Object.entries(settings);
    if (rows.length) fill(this.settings, h("details", { class: "settings" }, h("summary", {}, `Settings (${rows.length})`),
      h("dl", {}, rows.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, visible(typeof value === "string" ? value : JSON.stringify(value))))))));
  }

  trouble(trouble) {
    const was = this.troubled;
    this.troubled = trouble;
    if (!trouble) { if (this.now) this.calm(); return; }
    this.banner.className = "banner trouble";
    if (was?.code === trouble.code && was?.text === trouble.text) return;
    fill(this.banner, h("p", {}, h("strong", {}, visible(trouble.text)), " ", visible(trouble.remedy)), h("code", {}, visible(trouble.code)));
    announce(visible(trouble.text));
  }

  calm() {
    const { state, step, steps, waiting = [] } = this.now;
    this.banner.className = "banner calm";
    const text = state === "finished" ? `Finished after ${plural(step, "step")}.`
      : state === "suspended" ? "Suspended: another run works on the stack."
        : state === "open" ? (step ? `Training${waiting.length ? `: ${visible(waiting[0].who)} waits for ${visible(waiting[0].for)}.` : ", without trouble."}` : "Starting: the first step is not done yet.")
          : `Not running. Last step ${count(step)}${steps ? ` of ${count(steps)}` : ""}.`;
    if (this.banner.textContent !== text) fill(this.banner, h("p", {}, text));
  }

  connection(state) {
    const text = { live: "live", lost: "connection lost, trying again", connecting: "connecting", still: "read from files" }[state];
    this.link.className = `connection ${state}`;
    say(this.link, text);
  }
}

const newestReceipt = ({ server, version, state, difference, change, seconds }) => [
  [server, version, state].filter(Boolean).join(" "),
  difference === null ? "no log-probabilities" : `log-probabilities differ by ${figure(difference)} nats`,
  change === null ? null : `changed by ${figure(change)}`, `${figure(1000 * seconds)} ms`].filter(Boolean).join(", ");
