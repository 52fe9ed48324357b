// Any metric of a run: a list of all of them, and a chart of each that a person chose.
import { get, listen, pathOf } from "./api.js";
import { Board } from "./charts.js";
import { announce, fill, h, visible } from "./dom.js";
import { links, plural } from "./format.js";
import { head } from "./rows.js";
import { AXES, drawing, drawingControls, drawingQuery, Series } from "./series.js";

const MOST = 24;

export async function view({ run, main, signal, search, go, title }) {
  title(`Metrics · ${run}`);
  const now = drawing(search);
  let chosen = [...new Set(search.getAll("m"))].slice(0, MOST);
  const open = (step) => go(links.step(run, step));
  let board = new Board({ axis: AXES[now.x], open });
  const draw = () => board.update((panel) => series.data(panel, now), AXES[now.x]);
  const series = new Series(run, chosen, signal, draw);
  const curves = h("div", { class: "curves" });
  const list = h("ul", { class: "names" });
  const find = h("input", { type: "search", id: "find", autocomplete: "off", spellcheck: "false", oninput: () => filter() });

  const showCurves = () => {
    board.end();
    board = new Board({ axis: AXES[now.x], open });
    fill(curves, chosen.length ? chosen.map((name) => board.add({ title: visible(name), lines: [[name, visible(name)]] }))
      : h("p", { class: "empty" }, "Choose metrics from the list: each gets a chart, and the address keeps your choice."));
    draw();
  };
  const choose = async (name, on) => {
    chosen = on ? [...chosen, name] : chosen.filter((one) => one !== name);
    history.replaceState(history.state, "", location.pathname + drawingQuery(now, { m: chosen }));
    series.choose(chosen);
    limit();
    curves.setAttribute("aria-busy", "true");
    await series.reload();
    curves.removeAttribute("aria-busy");
    showCurves();
    announce(`${plural(chosen.length, "chart")}`);
  };
  const showList = () => {
    const names = [...new Set([...chosen, ...series.known])];
    fill(list, names.map((name) => h("li", {}, h("label", {}, h("input", {
      type: "checkbox", value: name, checked: chosen.includes(name), onchange: (event) => choose(name, event.target.checked),
    }), ` ${visible(name)}`))), h("li", { class: "soft", hidden: true }, "No metric has this in its name."));
    limit();
  };
  const limit = () => list.querySelectorAll("input").forEach((box) => { box.disabled = !box.checked && chosen.length >= MOST; });
  const filter = () => {
    const part = find.value.trim().toLowerCase();
    const [none, ...lines] = [...list.children].reverse();
    lines.forEach((line) => { line.hidden = !line.querySelector("input").value.toLowerCase().includes(part); });
    none.hidden = lines.some((line) => !line.hidden);
  };

  const [overview] = await Promise.all([get(pathOf(run), signal), series.load()]);
  fill(main, head("Metrics", run),
    drawingControls(now, draw, () => ({ m: chosen })),
    h("div", { class: "board" }, curves, h("aside", { "aria-label": "All metrics" },
      h("section", {}, h("h2", {}, h("label", { for: "find" }, "Find a metric")), find, list))));
  showList();
  showCurves();
  const close = listen(overview, () => series.last, { step: (row) => series.add(row), reload: () => series.reload(), state: () => {} });
  return {
    end: () => { close(); board.end(); },
    keys: {
      j: () => board.move(1), k: () => board.move(-1), Enter: () => board.choose(),
      "/": () => find.focus(), u: () => go(links.run(run)),
    },
  };
}
