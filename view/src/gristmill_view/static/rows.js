// What views share: moving through rows by j and k, chips of rewards, outcomes, choices.
import { h, small, visible } from "./dom.js";
import { count, links, reward, shade, words } from "./format.js";

/** Marks one of the elements that `all` returns, and moves the mark. */
export function cursor(all) {
  let at = -1;
  const mark = (to) => {
    const elements = all();
    if (!elements.length) return;
    elements[at]?.removeAttribute("aria-current");
    at = Math.max(0, Math.min(elements.length - 1, to));
    elements[at].setAttribute("aria-current", "true");
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    elements[at].scrollIntoView({ block: "nearest", behavior: still ? "auto" : "smooth" });
    // Focus follows, so that Tab and a screen reader continue from here.
    elements[at].querySelector("a:not(.second)")?.focus({ preventScroll: true });
  };
  return {
    keys: {
      j: () => mark(at + 1),
      k: () => mark(at - 1),
      Enter: () => (all()[at]?.querySelector("a:not(.second)"))?.click(),
    },
    mark,
    get at() { return at; },
    reset() { at = -1; },
  };
}

/** A reward on the page's scale from `low` to `high`. */
export const chip = (value, low, high) => h("span", { class: `chip ${shade(value, low, high)}` }, reward(value));

/** The scale of all chips of a page. */
export function legend(low, high, name = "reward") {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return null;
  return h("span", { class: "scale" }, `${name} `, h("span", {}, reward(low)),
    [0, 1, 2, 3, 4].map((at) => h("i", { class: `shade-${at}` })), h("span", {}, reward(high)));
}

/** The least and the greatest of all rewards; the scale has the length 1 at least if all are equal. */
export function ends(values) {
  const known = values.filter((value) => Number.isFinite(value));
  return known.length ? [Math.min(...known), Math.max(...known)] : [NaN, NaN];
}

/** For a step of a run that does not know the step of its groups. */
export const NO_RECORDS = "This run has no records of the step that trained on a group: record_rollouts was off, or an older version trained it. Its groups are kept. ";

const OUTCOMES = {
  trained: "trained on in its step", ready: "waits for the trainer", leased: "its step is done; its content follows with the next checkpoint",
  dropped: "given up before it was trained on", dead: "a dead letter: no batch can hold it",
  lost: "trained on, but its content was not archived", evaluation: "an evaluation's completion",
  left_out: "it failed, and its group was trained without it",
};

export const outcome = (name, reason) => name ? [
  h("span", { class: `outcome is-${OUTCOMES[name] ? name : "other"}`, title: OUTCOMES[name] }, visible(words(name))),
  reason ? h("small", { title: visible(words(reason)) }, visible(words(reason))) : null] : "";

/** A table of a list. `numbers`: the columns that are aligned to the right. */
export const table = (columns, rows, numbers = []) => h("table", { class: "rows" },
  h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col", class: numbers.includes(name) ? "number" : null }, name)))),
  h("tbody", {}, rows));

/** A table that scrolls on a narrow screen. */
export const scrolling = (label, element) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, element);

/** The head of a view of a run. `rest`: behind the link to the run. */
export const head = (title, run, rest = null, ...beside) => [
  h("div", { class: "headline" }, h("h1", {}, title), beside),
  h("p", { class: "soft sub" }, h("a", { href: links.run(run) }, visible(run)), rest)];

/** A problem in a list that stays as it is. */
export const problemLine = ({ message, remedy }) =>
  h("p", { class: "banner trouble" }, h("strong", {}, visible(message)), " ", visible(remedy ?? ""));

/** Checkboxes of runs. `change`: called with the names of all chosen runs. */
export function picker(runs, chosen, most, change, title = "Runs") {
  const now = (run, on) => change(on ? [...chosen, run] : chosen.filter((name) => name !== run));
  return h("fieldset", { class: "picker" }, h("legend", {}, title), runs.map((line) => h("label", {},
    h("input", { type: "checkbox", value: line.run, checked: chosen.includes(line.run), disabled: !chosen.includes(line.run) && chosen.length >= most, onchange: (event) => now(line.run, event.target.checked) }),
    ` ${visible(line.run)}`, small(` ${count(line.step)}${line.steps ? ` / ${count(line.steps)}` : ""}`))));
}

/** A choice of one of `options`: {value: [text]}. `change`: called with {name: value}. */
export function choice(label, name, options, chosen, change) {
  return h("label", {}, `${label} `, h("select", { name, onchange: (event) => change({ [name]: event.target.value }) },
    Object.entries(options).map(([value, [text]]) => h("option", { value, selected: value === chosen }, text))));
}

/** The beginning of a text, on one line. */
export function start(text, length = 160) {
  const line = String(text ?? "").slice(0, length * 4).replace(/\s+/g, " ").trim();
  return visible(line.length > length ? `${line.slice(0, length)}…` : line);
}
