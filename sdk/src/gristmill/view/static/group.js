// One group side by side: the prompt, the completions with their rewards, and every token.
import { get } from "./api.js";
import { announce, fill, h, NONE, shown, visible } from "./dom.js";
import { links, plural, reward, signed } from "./format.js";
import { chip, cursor, ends, legend, outcome } from "./rows.js";
import { choice } from "./step.js";
import { limits, MEASURES, measured, place, Strip } from "./strip.js";

const LONG = 12_000;
const SPANS = 3000;
const ORDERS = {
  sampled: ["as sampled", () => 0],
  best: ["best first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  worst: ["worst first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  long: ["longest first", (a, b) => (b.tokens?.length ?? 0) - (a.tokens?.length ?? 0)],
};

export async function view({ run, group: id, main, signal, search, go, title }) {
  title(`${id} · ${run}`);
  const path = `runs/${encodeURIComponent(run)}`;
  const group = await get(`${path}/groups/${encodeURIComponent(id)}`, signal);
  const cards = group.completions.map((completion, at) => ({ ...completion, at }));
  const tokens = cards.flatMap((card) => card.tokens ?? []);
  const scale = limits(tokens);
  const [low, high] = ends(cards.map((card) => card.reward));
  const state = { order: search.get("order") ?? "sampled", shade: search.get("shade") ?? "none" };
  const shades = { none: ["no shading"], ...Object.fromEntries(measured(tokens).map((name) => [name, [MEASURES[name].title]])) };
  const made = cards.map((card) => new Card(card, { run, id, low, high, scale, answer: group.answer, choose: (at) => pick(card.at, at) }));
  const grid = h("div", { class: "cards" });
  const marked = cursor(() => [...grid.children]);

  const pick = (sequence, token) => {
    history.replaceState(history.state, "", `${location.pathname}${location.search}${links.group(run, id, sequence, token).replace(/^[^#]*/, "")}`);
    made.forEach((card) => card.pick(card.at === sequence ? token : null));
  };
  const change = (values) => {
    Object.assign(state, values);
    const kept = new URLSearchParams();
    if (state.order !== "sampled") kept.set("order", state.order);
    if (state.shade !== "none") kept.set("shade", state.shade);
    history.replaceState(history.state, "", `${location.pathname}${kept.size ? `?${kept}` : ""}${location.hash}`);
    draw();
  };
  const draw = () => {
    const order = (ORDERS[state.order] ?? ORDERS.sampled)[1];
    fill(grid, [...made].sort((a, b) => order(a.card, b.card)).map((card) => card.element));
    made.forEach((card) => card.shade(shades[state.shade] ? state.shade : "none"));
    marked.reset();
  };

  fill(main,
    h("div", { class: "headline" }, h("h1", {}, visible(id)), outcome(group.outcome, group.reason),
      h("nav", { class: "around", "aria-label": "Groups of the step" })),
    h("p", { class: "soft sub" }, h("a", { href: links.run(run) }, visible(run)), " · ",
      group.step ? h("a", { href: links.step(run, group.step) }, `step ${group.step}`) : "its step is not known", ` · row ${group.row ?? NONE}`,
      group.index === null || group.index === undefined ? "" : ` (${group.index} of the data)`, ` · ${visible(group.env_id ?? "")}`,
      group.staleness ? ` · ${plural(group.staleness, "step")} stale` : ""),
    h("section", { class: "prompt" }, h("h2", {}, "Prompt"), prompt(group),
      group.answer !== null && group.answer !== undefined ? h("p", { class: "gold" }, h("b", {}, "Gold answer "), h("code", {}, shown(group.answer))) : null),
    group.error ? h("p", { class: "cut" }, shown(group.error)) : null,
    cards.length ? h("div", { class: "controls" }, choice("Sort", "order", ORDERS, state.order, change),
      Object.keys(shades).length > 1 ? choice("Shade tokens by", "shade", shades, state.shade, change) : null,
      Object.keys(shades).length > 1 ? h("span", { class: "scale" }, "lower ", h("i", { class: "low" }), h("i", { class: "mid" }), h("i", { class: "high" }), " higher") : null,
      legend(low, high)) : null,
    cards.length ? grid : h("p", { class: "empty" }, group.outcome === "lost"
      ? "The content of this group is gone: the archive let it go to keep its disk free. Its step and outcome are known."
      : group.error || group.prompt ? "This group has no completions."
      : "The content of this group was not kept."));
  draw();

  const around = main.querySelector("nav.around");
  const ways = {};
  if (group.step) neighbours(path, group, run, id, signal).then(([before, after]) => {
    if (before) { ways.p = () => go(before); around.append(h("a", { href: before, rel: "prev" }, "← previous")); }
    if (after) { ways.n = () => go(after); around.append(h("a", { href: after, rel: "next" }, "next →")); }
  }).catch(() => {}); // without its step's list the group is complete all the same
  return {
    end: () => made.forEach((card) => card.end()),
    hash: (hash) => {
      const found = /^#s(\d+)(?:t(\d+))?$/.exec(hash);
      const card = found && made[Number(found[1])];
      if (!card) return;
      card.element.scrollIntoView({ block: "start" });
      card.element.classList.add("named");
      marked.mark([...grid.children].indexOf(card.element));
      if (found[2] !== undefined) { card.open(); card.pick(Number(found[2])); announce(`completion ${found[1]}, token ${found[2]}`); }
    },
    keys: {
      ...marked.keys, u: () => go(group.step ? links.step(run, group.step) : links.run(run)),
      n: () => ways.n?.(), p: () => ways.p?.(),
    },
  };
}

async function neighbours(path, group, run, id, signal) {
  const { groups } = await get(`${path}/steps/${group.step}`, signal);
  const at = groups.findIndex((one) => one.group_id === id);
  return [groups[at - 1], groups[at + 1]].map((one) => one && at >= 0 && links.group(run, one.group_id));
}

function prompt(group) {
  const raw = group.prompt ? h("details", {}, h("summary", {}, "as the model saw it"), text(group.prompt)) : null;
  if (group.messages?.length) return [group.messages.map(turn), raw];
  return group.prompt ? [text(group.question), raw] : h("p", { class: "soft" }, group.error ? "No prompt was made of the row."
    : "The prompt's text is not known: no tokenizer was found.");
}

function turn(message) {
  const content = typeof message.content === "string" ? message.content
    : Array.isArray(message.content) ? message.content.map((part) => (typeof part?.text === "string" ? part.text : `[${part?.type ?? "part"}]`)).join("") : "";
  const tools = message.tool_calls ? [h("h4", {}, "tool calls"), text(JSON.stringify(message.tool_calls, null, 1))] : null;
  return h("div", { class: `turn by-${/^\w+$/.test(message.role ?? "") ? message.role : "other"}` }, h("h3", {}, visible(message.role ?? "")),
    h("div", {}, message.thinking ? h("details", { class: "thinking" }, h("summary", {}, `thinking, ${message.thinking.length.toLocaleString("en")} characters`), text(message.thinking)) : null,
      text(content), tools));
}

/** Text of a model. Beyond LONG characters the rest comes on demand, because layout of a very long text is slow. */
function text(content) {
  if (!content) return h("pre", { class: "nothing" }, "empty");
  if (content.length <= LONG) return h("pre", scrolled(content), shown(content));
  const pre = h("pre", scrolled(content), shown(content.slice(0, LONG)));
  const more = h("button", { type: "button", class: "more", onclick: () => { fill(pre, shown(content)); more.remove(); } },
    `Show all ${content.length.toLocaleString("en")} characters`);
  return [pre, more];
}

/** What a box needs that may scroll, so that the keyboard can scroll it too. */
const scrolled = (content) => (content.length > 1200 || content.split("\n").length > 20 ? { tabindex: 0, role: "region", "aria-label": "text" } : {});

class Card {
  constructor(card, context) {
    this.card = card;
    this.at = card.at;
    this.context = context;
    this.strip = null;
    this.spans = null;
    const { run, id, low, high, answer } = context;
    const parts = Object.entries(card.parts ?? {});
    const right = card.extracted !== null && card.extracted !== undefined && answer !== null && card.extracted === answer;
    this.body = h("div", { class: "body" });
    this.tokens = h("details", { class: "tokens" }, h("summary", {}, `Tokens (${(card.tokens ?? []).length.toLocaleString("en")})`));
    this.tokens.addEventListener("toggle", () => this.tokens.open && this.open());
    this.element = h("article", { class: "card", id: `s${this.at}`, "aria-label": `completion ${this.at}` },
      h("header", {},
        h("a", { class: "nth", href: links.group(run, id, this.at), title: "a link to this completion", "aria-label": `completion ${this.at}` }, `#${this.at}`), chip(card.reward, low, high),
        parts.map(([name, value]) => h("span", { class: "part" }, `${visible(name)} `, h("b", {}, value === null ? "no score" : reward(value)))),
        h("span", { class: "part" }, "advantage ", h("b", { class: card.advantage > 0 ? "up" : card.advantage < 0 ? "down" : null }, card.advantage === null || card.advantage === undefined ? NONE : signed(card.advantage)))),
      h("p", { class: "facts-line" },
        // Without `extracted` nothing searched for an answer: another environment, or a reward without one.
        card.extracted === undefined ? null : h("span", {}, "answer ", card.extracted === null ? h("i", {}, "none found") : h("code", { class: right ? "right" : null }, shown(card.extracted))),
        h("span", { class: card.finish_reason === "length" ? "cut" : null }, card.finish_reason === "length" ? "cut off at its limit" : visible(card.finish_reason ?? "")),
        h("span", {}, card.version ? `weights ${visible(card.version)}` : ""),
        outcome(card.outcome, card.reason)),
      card.error ? h("p", { class: "cut" }, shown(card.error)) : null,
      this.body, card.tokens?.length ? this.tokens : null);
    this.write();
  }

  /** The text: turns if there are several, else one text, as spans per token while it is shaded or open. */
  write(spans = false) {
    const { card } = this;
    this.spans = null;
    const list = card.tokens ?? [];
    // Only if the tokens' texts make up the text: bytes of one character may be split between tokens.
    if (spans && list.length <= SPANS && list.map((token) => token.text).join("") === card.text) {
      this.spans = list.map((token, at) => {
        const span = h("span", { class: token.mask ? null : "masked" }, shown(token.text));
        span.addEventListener("click", () => this.context.choose(at));
        return span;
      });
      fill(this.body, h("pre", { class: "spans", ...scrolled(card.text) }, this.spans));
      return;
    }
    fill(this.body, card.turns?.length ? card.turns.map(turn) : text(card.text));
  }

  shade(name) {
    if (name === "none") {
      if (this.spans && !this.tokens.open) this.write();
      this.spans?.forEach((span) => { span.style.background = ""; });
      return;
    }
    if (!this.spans) this.write(true);
    this.spans?.forEach((span, at) => {
      const found = place(name, this.card.tokens[at], this.context.scale[name]);
      span.style.background = found === null ? "" : `color-mix(in srgb, var(${found < 0 ? "--low" : "--high"}) ${Math.round(60 * Math.abs(found))}%, transparent)`;
    });
  }

  open() {
    this.tokens.open = true;
    if (!this.strip) {
      this.strip = new Strip(this.card.tokens, this.context.scale, this.context.choose);
      this.tokens.append(this.strip.element);
    }
    if (!this.spans) this.write(true);
  }

  pick(at) {
    if (at === null) {
      if (this.strip && this.strip.chosen !== null) { this.strip.chosen = null; this.strip.draw(); }
    } else if (at < (this.card.tokens ?? []).length) {
      this.open();
      this.strip.choose(at);
    }
    this.spans?.forEach((span, index) => span.classList.toggle("picked", index === at));
  }

  end() {
    this.strip?.end();
  }
}
