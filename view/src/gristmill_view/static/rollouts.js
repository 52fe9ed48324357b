// All completions of a run as a list. Every filter is in the address, so a link shows the same list.
import { get, pathOf, Problem, save } from "./api.js";
import { histogram } from "./charts.js";
import { amount, announce, cell, fill, h, NONE, small, visible } from "./dom.js";
import { count, duration, links, plural, query, reward, words } from "./format.js";
import { chip, choice, cursor, head, legend, NO_RECORDS, outcome, problemLine, start, table } from "./rows.js";

const PAGE = 50;
const FILTERS = ["text", "step", "outcome", "finish_reason", "reward_min", "reward_max", "part", "part_min", "part_max", "env", "group", "order", "offset"];
const ORDERS = {
  "-step": ["newest first"], step: ["oldest first"], reward: ["lowest reward"], "-reward": ["highest reward"],
  "-completion_tokens": ["longest"], completion_tokens: ["shortest"], "-staleness": ["most stale"], "-seconds": ["slowest"],
};
const OUTCOMES = ["trained", "dropped", "dead", "lost", "leased", "evaluation", "left_out"];

export async function view({ run, main, signal, search, go, title }) {
  title(`Rollouts · ${run}`);
  const path = pathOf(run);
  const filters = Object.fromEntries(FILTERS.map((name) => [name, search.get(name) ?? ""]));
  const list = h("div", { class: "list" });
  const chart = h("div", { class: "reserved" });
  const total = h("output", {}, "…");
  const problem = h("div", { role: "alert" });
  const marked = cursor(() => [...list.querySelectorAll("tbody tr")]);
  let answer = null;
  let asked = null;

  const load = async () => {
    asked?.abort();
    const mine = asked = new AbortController();
    signal.addEventListener("abort", () => asked.abort(), { once: true });
    list.setAttribute("aria-busy", "true");
    try {
      answer = await get(`${path}/rollouts${query({ ...filters, limit: PAGE })}`, asked.signal);
      fill(problem);
      draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Problem) || error.status === 404) throw error;
      fill(problem, problemLine(error));
    } finally {
      if (asked === mine) list.removeAttribute("aria-busy"); // a newer request keeps the list busy
    }
  };
  const change = (values, { replace = true } = {}) => {
    Object.assign(filters, { offset: "" }, values);
    go(location.pathname + query(filters), { replace, quiet: true });
    return load();
  };
  let later = null;
  const soon = (values) => { clearTimeout(later); later = setTimeout(() => change(values), 250); };

  const draw = () => {
    const { rows, total: all, histogram: bars } = answer;
    const offset = Number(filters.offset || 0);
    const range = filters.reward_min !== "" || filters.reward_max !== "" ? [Number(filters.reward_min || -Infinity), Number(filters.reward_max || Infinity)] : null;
    fill(chart, bars ? histogram(bars, { chosen: range, label: "rollouts", choose: (low, high) => {
      const same = range && Math.abs(low - range[0]) < 1e-6 && Math.abs(high - range[1]) < 1e-6;
      form.elements.reward_min.value = same ? "" : low;
      form.elements.reward_max.value = same ? "" : high;
      change({ reward_min: same ? "" : String(low), reward_max: same ? "" : String(high) });
    } }) : null);
    fill(total, all ? `${count(offset + 1)} to ${count(offset + rows.length)} of ${plural(all, "rollout")}` : "no rollouts");
    announce(total.textContent);
    marked.reset();
    const known = rows.map((row) => row.reward).filter(Number.isFinite);
    const low = bars?.length ? bars[0].low : Math.min(...known);
    const high = bars?.length ? bars[bars.length - 1].high : Math.max(...known);
    const filtered = FILTERS.some((name) => filters[name] && !["order", "offset"].includes(name));
    fill(scale, legend(low, high));
    fill(list, rows.length ? rolloutTable(run, rows, low, high) : h("p", { class: "empty" }, answer.recorded === false
      ? [NO_RECORDS, h("a", { href: links.rollouts(run) }, "Show all")] : filtered
      ? ["No rollout fits these filters. ", h("a", { href: links.rollouts(run) }, "Show all")]
      : "This run has no rollouts on disk yet, or the API keeps none (API_ARCHIVE_MAX_BYTES=0)."));
    const at = (to, text, rel) => h("button", { rel, disabled: to < 0 || to >= all || to === offset, onclick: () => page(to) }, text);
    fill(pages, all > PAGE ? [at(0, "first"), at(offset - PAGE < 0 && offset ? 0 : offset - PAGE, "← previous"), at(offset + PAGE, "next →")] : null);
  };
  const page = async (to) => { await change({ offset: to ? String(to) : "" }, { replace: false }); scrollTo(0, 0); };
  const scale = h("span", {});
  const pages = h("nav", { class: "pages", "aria-label": "Pages" });

  const input = (name, label, options = {}) => h("label", { class: options.class }, `${label} `, h("input", {
    name, value: filters[name], type: "text", autocomplete: "off", spellcheck: "false", ...options,
    oninput: (event) => soon({ [name]: event.target.value.trim() }),
  }));
  const select = (name, label, options) => choice(label, name, { "": ["anything"], ...options }, filters[name], change);
  const number = { inputmode: "decimal", class: "number" };
  const form = h("form", { class: "controls filters", role: "search", "aria-label": "Filter rollouts", onsubmit: (event) => { event.preventDefault(); change({}); } },
    input("text", "Find", { type: "search", class: "find", id: "find", placeholder: "in prompt or completion  ( / )" }),
    input("step", "Step", { placeholder: "12 or 10-20", class: "small" }),
    select("outcome", "Became", Object.fromEntries(OUTCOMES.map((name) => [name, [words(name)]]))),
    select("finish_reason", "Ended by", { stop: ["stop"], length: ["its limit"], turns: ["its turns"] }),
    input("reward_min", "Reward from", number), input("reward_max", "to", number),
    h("details", { class: "more-filters", open: Boolean(filters.part || filters.env || filters.group) }, h("summary", {}, "More"),
      h("div", {}, input("part", "Part", { placeholder: "accuracy", class: "small" }), input("part_min", "from", number), input("part_max", "to", number),
        input("env", "Environment", { class: "small" }), input("group", "Group", { class: "small" }))));
  const sort = choice("Sort", "order", ORDERS, filters.order || "-step", change);

  fill(main,
    head("Rollouts", run, null,
      h("span", { class: "downloads" }, "Download ",
        ["jsonl", "parquet"].map((format) => h("button", { class: "plain", onclick: (event) => download(event.target, format) }, format === "jsonl" ? "JSONL" : "Parquet")))),
    form, problem, chart,
    h("div", { class: "controls" }, total, scale, sort), list, pages);

  const download = async (button, format) => {
    button.disabled = true;
    try {
      await save(`${path}/download${query({ ...filters, offset: "", format })}`, `${run}-rollouts.${format}`);
    } catch (error) {
      fill(problem, problemLine(error));
    } finally {
      button.disabled = false;
    }
  };
  await load();
  return {
    end: () => { clearTimeout(later); asked?.abort(); },
    hash: (hash) => { if (hash === "#find") form.elements.text.focus(); },
    keys: {
      ...marked.keys, "/": () => form.elements.text.focus(), u: () => go(links.run(run)),
      n: () => answer && Number(filters.offset || 0) + PAGE < answer.total && page(Number(filters.offset || 0) + PAGE),
      p: () => Number(filters.offset || 0) > 0 && page(Math.max(0, Number(filters.offset) - PAGE)),
    },
  };
}

function rolloutTable(run, rows, low, high) {
  return table(["step", "completion", "reward", "tokens", "time", "became", "text"],
    rows.map((row) => h("tr", {},
      h("td", { class: "number left" }, row.step === null ? NONE : h("a", { href: links.step(run, row.step), tabindex: -1, class: "second" }, count(row.step))),
      cell(h("a", { href: links.group(run, row.group_id, row.sequence ?? undefined) }, `${visible(row.group_id)}${row.sequence === null || row.sequence < 0 ? "" : ` #${row.rollout ?? row.sequence}`}`),
        row.branches > 1 ? small(plural(row.branches, "branch", "branches")) : null),
      cell(row.reward === null ? NONE : chip(row.reward, low, high), small(Object.entries(row.reward_parts ?? {}).map(([name, value]) => `${visible(name)} ${reward(value)}`).join(" · "))),
      amount(count(row.completion_tokens), row.finish_reason === "length" ? h("small", { class: "cut" }, "cut off") : null),
      amount(row.seconds === null ? NONE : duration(row.seconds)),
      cell(outcome(row.outcome, row.outcome_reason)),
      h("td", { class: "text" }, row.error ? h("span", { class: "cut", title: visible(row.error) }, start(row.error, 140)) : null,
        row.completion === null && row.prompt === null ? row.error ? null : h("span", { class: "soft" }, "content not kept")
          : [row.completion === null ? h("i", { class: "soft" }, row.outcome === "dropped" ? "no completion" : "content not kept") : h("span", {}, start(row.completion, 140) || h("i", {}, "empty")), small(start(row.prompt, 110))]))), ["tokens", "time"]);
}
