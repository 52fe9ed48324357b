// The tokens of a completion as a canvas: one row per measure, one column per token. Masked tokens are dimmed.
import { css, fill, h, visible } from "./dom.js";
import { figure } from "./format.js";

/** Measures of a token. `value`: larger means further from calm; the default is the measure. */
export const MEASURES = {
  sampler: { title: "log-probability", of: (token) => token.sampler, value: (token) => minus(token.sampler), note: "under the model server's weights; darker is less likely" },
  difference: { title: "difference to the server", of: (token) => less(token.trainer, token.sampler), note: "trainer − server; should be rounding only" },
  ratio: { title: "policy ratio", of: (token) => token.ratio, value: (token) => (known(token.ratio) && token.ratio > 0 ? Math.log(token.ratio) : null), note: "the trained weights' probability over the sampler's" },
  entropy: { title: "entropy", of: (token) => token.entropy, note: "nats; darker is less certain" },
  advantage: { title: "advantage", of: (token) => token.advantage, note: "as used in the step" },
};
const known = Number.isFinite;
const calm = (measure, token) => (measure.value ?? measure.of)(token);
const minus = (value) => (known(value) ? -value : null);
const less = (a, b) => (known(a) && known(b) ? a - b : null);

/** The measures that at least one token has. */
export const measured = (tokens) => Object.keys(MEASURES).filter((name) => tokens.some((token) => known(MEASURES[name].of(token))));

/** The limit of each measure's colours, from all tokens of a page: one scale for all completions. */
export function limits(tokens) {
  const found = {};
  for (const [name, measure] of Object.entries(MEASURES)) {
    const sizes = [];
    for (const token of tokens) {
      const value = calm(measure, token);
      if (known(value)) sizes.push(Math.abs(value));
    }
    sizes.sort((a, b) => a - b);
    // The 99 % quantile, so that one outlier does not leave the rest without colour.
    found[name] = sizes.length ? Math.max(sizes[Math.floor(0.99 * (sizes.length - 1))], 1e-12) : 1;
  }
  return found;
}

/** Returns where a token is on its measure's scale: −1 to 1, or 0 to 1; null without a value. */
export function place(name, token, limit) {
  const value = calm(MEASURES[name], token);
  return known(value) ? Math.max(-1, Math.min(1, value / limit)) : null;
}

const ROW = 14;
const LABEL = 3;

export class Strip {
  /** `choose`: called with the index of a token that a person chose. */
  constructor(tokens, scale, choose) {
    this.tokens = tokens;
    this.scale = scale;
    this.rows = measured(tokens);
    this.chosen = null;
    this.canvas = h("canvas", { tabindex: 0, role: "slider", "aria-label": "token", "aria-valuemin": 0, "aria-valuemax": tokens.length - 1, "aria-valuenow": 0, "aria-valuetext": `${tokens.length} tokens` });
    this.canvas.style.height = `${this.rows.length * (ROW + LABEL)}px`;
    this.readout = h("p", { class: "readout" }, this.hint());
    this.element = h("div", { class: "strip" },
      h("div", { class: "strip-rows" }, h("div", { class: "strip-names", "aria-hidden": "true" }, this.rows.map((name) => h("span", { title: MEASURES[name].note }, MEASURES[name].title))), this.canvas), this.readout);
    this.canvas.addEventListener("pointermove", (event) => this.read(this.under(event)));
    this.canvas.addEventListener("pointerleave", () => this.read(this.chosen));
    this.canvas.addEventListener("click", (event) => choose(this.under(event)));
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9 }[event.key];
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      choose(Math.max(0, Math.min(tokens.length - 1, (this.chosen ?? -1) + by)));
    });
    this.draw = this.draw.bind(this);
    this.watch = new ResizeObserver(this.draw);
    this.watch.observe(this.canvas);
    addEventListener("themechange", this.draw);
  }

  hint() {
    return `${this.tokens.length.toLocaleString("en")} tokens. Point at one, or use the arrow keys.`;
  }

  under(event) {
    const at = Math.floor(event.offsetX / this.canvas.clientWidth * this.tokens.length);
    return Math.max(0, Math.min(this.tokens.length - 1, at));
  }

  choose(at) {
    this.chosen = at;
    this.canvas.setAttribute("aria-valuenow", at);
    this.canvas.setAttribute("aria-valuetext", this.words(at));
    this.read(at);
    this.draw();
  }

  words(at) {
    const token = this.tokens[at];
    const values = this.rows.map((name) => `${MEASURES[name].title} ${figure(MEASURES[name].of(token))}`);
    return `token ${at}: ${quoted(token.name ?? token.text)}${token.mask ? "" : ", not trained"}; ${values.join(", ")}`;
  }

  /** Shows the values of a token on the line that is always there. */
  read(at) {
    if (at === null) { fill(this.readout, this.hint()); return; }
    const token = this.tokens[at];
    fill(this.readout, h("b", {}, `${at}`), " ", h("code", {}, quoted(token.name ?? token.text)), token.mask ? "" : h("i", {}, " not trained"),
      this.rows.map((name) => h("span", {}, ` ${MEASURES[name].title} `, h("b", {}, figure(MEASURES[name].of(token))))));
  }

  draw() {
    const { canvas, tokens, rows } = this;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    if (!width || !rows.length) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(rows.length * (ROW + LABEL) * ratio);
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const [low, high, empty] = [css("--low"), css("--high"), css("--grid")];
    const each = width / tokens.length;
    rows.forEach((name, row) => {
      const top = row * (ROW + LABEL);
      ctx.globalAlpha = 1;
      ctx.fillStyle = empty;
      ctx.fillRect(0, top, width, ROW);
      // With more tokens than pixels, a pixel shows the most extreme of its tokens.
      const columns = Math.min(tokens.length, Math.ceil(width));
      for (let column = 0; column < columns; column += 1) {
        const first = Math.floor(column * tokens.length / columns);
        const last = Math.max(first + 1, Math.floor((column + 1) * tokens.length / columns));
        let extreme = null;
        let masked = true;
        for (let at = first; at < last; at += 1) {
          masked = masked && !tokens[at].mask;
          const found = place(name, tokens[at], this.scale[name]);
          if (found !== null && (extreme === null || Math.abs(found) > Math.abs(extreme))) extreme = found;
        }
        if (extreme === null) continue;
        ctx.globalAlpha = (masked ? 0.25 : 1) * (0.06 + 0.94 * Math.abs(extreme));
        ctx.fillStyle = extreme < 0 ? low : high;
        const wide = width / columns;
        ctx.fillRect(column * wide, top, Math.max(0.75, wide - (wide > 4 ? 1 : 0)), ROW);
      }
    });
    ctx.globalAlpha = 1;
    if (this.chosen !== null) {
      ctx.strokeStyle = css("--ink");
      ctx.lineWidth = 1.5;
      ctx.strokeRect(this.chosen * each + 0.5, 0.75, Math.max(3, each - 1), canvas.clientHeight - LABEL - 1);
    }
  }

  end() {
    this.watch.disconnect();
    removeEventListener("themechange", this.draw);
  }
}

const quoted = (text) => visible(text ?? "").replaceAll("\n", "↵").replaceAll("\t", "→").replace(/^ | $/g, "·") || "∅";
