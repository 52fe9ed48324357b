// The turns of a conversation with their tool calls, and the tree of a rollout's branches.
import { fill, h, shown, small, soft, visible } from "./dom.js";
import { plural } from "./format.js";

const LONG = 12_000;
const CALLS = 50;
const NAME = 200;
/** Boxes inside each other. Deeper parts of a tree are one below the other in the deepest box. */
const DEEPEST = 5;
/** Parts of a tree that are open at first. */
const OPEN = 24;

/** A name that a model or a client chose: short, and without invisible characters. */
const brief = (name) => visible(name.length > NAME ? `${name.slice(0, NAME)}…` : name);

export function turn(message) {
  const { thinking, trained, answers } = message;
  const role = message.role ?? "", calls = message.tool_calls ?? [];
  const content = typeof message.content === "string" ? message.content
    : Array.isArray(message.content) ? message.content.map((part) => (typeof part?.text === "string" ? part.text : `[${part?.type ?? "part"}]`)).join("") : "";
  return h("div", { class: `turn by-${/^\w{1,40}$/.test(role) ? role : "other"}${trained === false ? " untrained" : ""}` },
    h("h3", {}, brief(role),
      answers ? small("result of ", h("code", {}, brief(answers.name))) : null,
      trained === undefined ? null : h("small", { class: "trained" }, trained ? "trained" : "not trained")),
    h("div", {}, thinking ? h("details", { class: "thinking" }, h("summary", {}, `thinking, ${thinking.length.toLocaleString("en")} characters`), text(thinking)) : null,
      content || !calls.length ? text(content) : null, some(calls, CALLS, call, "tool calls")));
}

function call({ name, arguments: given }) {
  return h("section", { class: "call", "aria-label": `tool call ${brief(name)}` },
    h("h4", {}, "calls ", h("code", {}, brief(name) || "an unknown tool"), given.length ? null : " without arguments"),
    given.length ? h("dl", {}, given.map(([key, value]) => h("div", {}, h("dt", {}, brief(key) || "arguments"), h("dd", {}, text(value))))) : null);
}

/** The first elements of a list. The others come on demand, because layout of very many is slow. */
function some(list, most, make, name) {
  if (list.length <= most) return list.map(make);
  const more = h("button", { class: "more", onclick: () => more.replaceWith(...list.slice(most).map(make)) },
    `Show all ${list.length.toLocaleString("en")} ${name}`);
  return [list.slice(0, most).map(make), more];
}

/** Text of a model. Beyond LONG characters the rest comes on demand, because layout of a very long text is slow. */
export function text(content) {
  if (!content) return h("pre", { class: "nothing" }, "empty");
  if (content.length <= LONG) return h("pre", scrolled(content), shown(content));
  const pre = h("pre", scrolled(content), shown(content.slice(0, LONG)));
  const more = h("button", { class: "more", onclick: () => { fill(pre, shown(content)); more.remove(); } },
    `Show all ${content.length.toLocaleString("en")} characters`);
  return [pre, more];
}

/** What a box needs that may scroll, so that the keyboard can scroll it too. */
export const scrolled = (content) => (content.length > 1200 || content.split("\n").length > 20 ? { tabindex: 0, role: "region", "aria-label": "text" } : {});

/**
 * The branches of a rollout. `nodes`: each after its parent. `end`: returns what stands in the heading of a branch's
 * last part, and what stands below its turns.
 */
export function tree(nodes, end) {
  const all = h("div", { class: "tree" });
  const made = [];
  nodes.forEach((node, at) => {
    const above = made[node.parent] ?? { depth: -1, inside: all };
    const several = node.sequences.length > 1;
    const [facts, below] = several ? [[], null] : end(node.sequences[0]);
    const part = h("details", { class: "branch", open: at < OPEN, "data-sequence": several ? null : node.sequences[0] },
      h("summary", {}, several ? h("b", {}, `${plural(node.sequences.length, "branch", "branches")} begin like this`) : facts,
        node.parent === null && !node.continues ? small("begins without the prompt above") : null),
      node.turns.length ? node.turns.map(turn) : soft("ends here"), below);
    above.inside.append(part);
    const depth = above.depth + 1;
    made.push({ depth, inside: depth + 1 < DEEPEST ? part : above.inside });
  });
  return all;
}
