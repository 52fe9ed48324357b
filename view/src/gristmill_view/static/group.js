// One group side by side: the prompt, the completions with their rewards, and every token.
import { get, pathOf } from "./api.js";
import { announce, fill, h, known, NONE, shown, soft, visible } from "./dom.js";
import { links, plural, reward, signed, words } from "./format.js";
import { chip, choice, cursor, ends, head, legend, outcome } from "./rows.js";
import { limits, MEASURES, measured, place, Strip } from "./strip.js";
import { scrolled, text, tree, turn } from "./turns.js";

const SPANS = 3000;
const ORDERS = {
  sampled: ["as sampled", () => 0],
  best: ["best first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  worst: ["worst first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  long: ["longest first", (a, b) => length(b) - length(a)],
};
const sequences = (card) => card.branches ?? [card];
const length = (card) => sequences(card).reduce((sum, one) => sum + (one.tokens?.length ?? 0), 0);

export async function view({ run, group: id, main, signal, search, go, title }) {
  title(`${id} · ${run}`);
  const group = await get(pathOf(run, "groups", id), signal);
  // `at` is the sequence in links, `number` the rollout.
  const cards = group.completions.map((one, index) => ({ ...one, at: one.sequence ?? index, number: one.rollout ?? index }));
  const tokens = cards.flatMap(sequences).flatMap((one) => one.tokens ?? []);
  const scale = limits(tokens);
  const [low, high] = ends(cards.map((card) => card.reward));
  const state = { order: search.get("order") ?? "sampled", shade: search.get("shade") ?? "none" };
  const names = cards.some((card) => !card.branches) ? measured(tokens) : []; // the texts of a tree have no tokens
  const shades = { none: ["no shading"], ...Object.fromEntries(names.map((name) => [name, [MEASURES[name].title]])) };
  const context = { run, id, low, high, scale, answer: group.answer, choose: (sequence, token) => pick(sequence, token) };
  const made = cards.map((card) => new (card.branches ? TreeCard : Card)(card, context));
  const grid = h("div", { class: "cards" });
  const marked = cursor(() => [...grid.children]);

  const pick = (sequence, token) => {
    history.replaceState(history.state, "", `${location.pathname}${location.search}${links.group(run, id, sequence, token).replace(/^[^#]*/, "")}`);
    made.forEach((card) => card.pick(sequence, token));
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
    head(visible(id), run, [" · ",
      group.step ? h("a", { href: links.step(run, group.step) }, `step ${group.step}`) : "its step is not known", ` · row ${group.row ?? NONE}`,
      known(group.index) ? ` (${group.index} of the data${group.seen ?? ""})` : "", ` · ${visible(group.env_id ?? "")}`,
      group.staleness ? ` · ${plural(group.staleness, "step")} stale` : "",
      group.prompt ? [" · ", h("a", { href: links.prompt(run, id) }, "the prompt over all steps")] : ""],
    outcome(group.outcome, group.reason), h("nav", { class: "around", "aria-label": "Groups of the step" })),
    h("section", { class: "prompt" }, h("h2", {}, "Prompt"), prompt(group),
      known(group.answer) ? h("p", { class: "gold" }, h("b", {}, "Gold answer "), h("code", {}, shown(group.answer))) : null),
    group.error ? h("p", { class: "cut" }, shown(group.error)) : null,
    cards.length ? h("div", { class: "controls" }, choice("Sort", "order", ORDERS, state.order, change),
      Object.keys(shades).length > 1 ? choice("Shade tokens by", "shade", shades, state.shade, change) : null,
      Object.keys(shades).length > 1 ? h("span", { class: "scale" }, "lower ", h("i", { class: "low" }), h("i", { class: "mid" }), h("i", { class: "high" }), " higher") : null,
      legend(low, high)) : null,
    cards.length ? grid : h("p", { class: "empty" }, group.outcome === "lost"
      ? "The content of this group is gone: the archive let it go to keep its disk free. Its step and outcome are known."
      : group.error || group.prompt ? "This group has no completions."
      : "The content of this group was not kept."),
    group.left_out.map((one) => h("p", { class: "cut" }, outcome("left_out"), shown(` ${words(one.reason)}: ${one.error}`))));
  draw();

  const around = main.querySelector("nav.around");
  const ways = {};
  if (group.step) neighbours(group, run, id, signal).then(([before, after]) => {
    if (before) { ways.p = () => go(before); around.append(h("a", { href: before, rel: "prev" }, "← previous")); }
    if (after) { ways.n = () => go(after); around.append(h("a", { href: after, rel: "next" }, "next →")); }
  }).catch(() => {}); // without its step's list the group is complete all the same
  return {
    end: () => made.forEach((card) => card.end()),
    hash: (hash) => {
      const found = /^#s(\d+)(?:t(\d+))?$/.exec(hash);
      const sequence = Number(found?.[1]);
      const card = found && made.find(({ card: one }) => one.at === sequence || one.branches?.some((branch) => branch.sequence === sequence));
      if (!card) return;
      card.element.classList.add("named");
      marked.mark([...grid.children].indexOf(card.element));
      if (found[2] !== undefined) { card.pick(sequence, Number(found[2])); announce(`completion ${found[1]}, token ${found[2]}`); }
      (card.branch?.(sequence) ?? card.element).scrollIntoView({ block: "start" });
    },
    keys: {
      ...marked.keys, u: () => go(group.step ? links.step(run, group.step) : links.run(run)),
      n: () => ways.n?.(), p: () => ways.p?.(),
    },
  };
}

async function neighbours(group, run, id, signal) {
  const { groups } = await get(pathOf(run, "steps", group.step), signal);
  const at = groups.findIndex((one) => one.group_id === id);
  return [groups[at - 1], groups[at + 1]].map((one) => one && at >= 0 && links.group(run, one.group_id));
}

function prompt(group) {
  const raw = group.prompt ? h("details", {}, h("summary", {}, "as the model saw it"), text(group.prompt)) : null;
  if (group.messages?.length) return [group.messages.map(turn), raw];
  return group.prompt ? [text(group.question), raw] : soft(group.error ? "No prompt was made of the row."
    : "The prompt's text is not known: no tokenizer was found.");
}

/** The tokens of one sequence, drawn when they are opened. */
class Tokens {
  constructor(sequence, list, { scale, choose }, opened = () => {}) {
    this.list = list;
    this.strip = null;
    this.draw = () => new Strip(list, scale, (at) => choose(sequence, at));
    this.element = h("details", { class: "tokens" }, h("summary", {}, `Tokens (${list.length.toLocaleString("en")})`));
    this.element.addEventListener("toggle", () => { if (this.element.open) { this.open(); opened(); } });
  }

  open() {
    this.element.open = true;
    if (!this.strip) this.element.append((this.strip = this.draw()).element);
  }

  pick(at) {
    if (at !== null && at < this.list.length) {
      this.open();
      this.strip.choose(at);
    } else if (this.strip && this.strip.chosen !== null) {
      this.strip.chosen = null;
      this.strip.draw();
    }
  }

  end() {
    this.strip?.end();
  }
}

/** The entry of a rollout: its numbers, and a body. */
function entry(card, { run, id, low, high, answer }, ...body) {
  const parts = Object.entries(card.parts ?? {});
  const right = known(card.extracted) && card.extracted === answer;
  const name = `completion ${card.number}`;
  return h("article", { class: card.branches ? "card wide" : "card", id: `s${card.at}`, "aria-label": name },
    h("header", {},
      h("a", { class: "nth", href: links.group(run, id, card.at), title: "a link to this completion", "aria-label": name }, `#${card.number}`), chip(card.reward, low, high),
      parts.map(([part, value]) => h("span", { class: "part" }, `${visible(part)} `, h("b", {}, value === null ? "no score" : reward(value)))),
      h("span", { class: "part" }, "advantage ", h("b", { class: card.advantage > 0 ? "up" : card.advantage < 0 ? "down" : null }, signed(card.advantage)))),
    h("p", { class: "facts-line" },
      card.branches ? h("span", {}, plural(card.branches.length, "branch", "branches")) : null,
      // Without `extracted` nothing searched for an answer: another environment, or a reward without one.
      card.extracted === undefined ? null : h("span", {}, "answer ", card.extracted === null ? h("i", {}, "none found") : h("code", { class: right ? "right" : null }, shown(card.extracted))),
      card.branches ? null : fate(card)),
    card.error ? h("p", { class: "cut" }, shown(card.error)) : null, body);
}

/** How a sequence ended and what became of it. */
const fate = (one) => [
  h("span", { class: one.finish_reason === "length" ? "cut" : null }, one.finish_reason === "length" ? "cut off at its limit" : visible(one.finish_reason ?? "")),
  h("span", {}, one.version ? `weights ${visible(one.version)}` : ""),
  outcome(one.outcome, one.reason)];

/** A rollout of one sequence. */
class Card {
  constructor(card, context) {
    this.card = card;
    this.context = context;
    this.spans = null;
    this.body = h("div", { class: "body" });
    this.tokens = new Tokens(card.at, card.tokens ?? [], context, () => this.spans ?? this.write(true));
    this.element = entry(card, context, this.body, card.tokens?.length ? this.tokens.element : null);
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
        span.addEventListener("click", () => this.context.choose(card.at, at));
        return span;
      });
      fill(this.body, h("pre", { class: "spans", ...scrolled(card.text) }, this.spans));
      return;
    }
    fill(this.body, card.turns?.length ? card.turns.map(turn) : text(card.text));
  }

  shade(name) {
    if (name === "none") {
      if (this.spans && !this.tokens.element.open) this.write();
      this.spans?.forEach((span) => { span.style.background = ""; });
      return;
    }
    if (!this.spans) this.write(true);
    this.spans?.forEach((span, at) => {
      const found = place(name, this.card.tokens[at], this.context.scale[name]);
      span.style.background = found === null ? "" : `color-mix(in srgb, var(${found < 0 ? "--low" : "--high"}) ${Math.round(60 * Math.abs(found))}%, transparent)`;
    });
  }

  pick(sequence, token) {
    const at = sequence === this.card.at ? token : null;
    if (at !== null && at < this.tokens.list.length && !this.spans) this.write(true);
    this.tokens.pick(at);
    this.spans?.forEach((span, index) => span.classList.toggle("picked", index === at));
  }

  end() {
    this.tokens.end();
  }
}

/** A rollout of several sequences, its branches. */
class TreeCard {
  constructor(card, context) {
    this.card = card;
    this.tokens = new Map(card.branches.map((one) => [one.sequence, new Tokens(one.sequence, one.tokens ?? [], context)]));
    const end = (sequence) => {
      const at = card.branches.findIndex((one) => one.sequence === sequence);
      const one = card.branches[at], tokens = this.tokens.get(sequence);
      return [[h("b", {}, `branch ${at}`), fate(one)], [one.error ? h("p", { class: "cut" }, shown(one.error)) : null, tokens.list.length ? tokens.element : null]];
    };
    this.element = entry(card, context, h("div", { class: "body" }, tree(card.tree, end)));
  }

  shade() {} // the strips of its branches show the measures

  pick(sequence, token) {
    for (const [number, tokens] of this.tokens) {
      const picked = number === sequence && token !== null;
      // A strip is drawn in the width that it has, so the parts around it are open before.
      if (picked) for (let part = this.branch(number); part; part = part.parentElement.closest("details.branch")) part.open = true;
      tokens.pick(picked ? token : null);
    }
  }

  branch(sequence) {
    return this.element.querySelector(`details.branch[data-sequence="${sequence}"]`);
  }

  end() {
    this.tokens.forEach((tokens) => tokens.end());
  }
}
