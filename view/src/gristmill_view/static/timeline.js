// Who worked and who waited in a step: a lane for the trainer and for each environment.
import { get, pathOf } from "./api.js";
import { fill, h, soft, visible } from "./dom.js";
import { duration, links, percent } from "./format.js";

const PHASES = ["train", "publish", "checkpoint", "pack", "work"];
const ROW = 5;
const look = ({ what }) => (what === "wait" ? "wait" : `line-${PHASES.indexOf(what) + 1 || 7}`);

/** Returns a section that gets its lanes later. A step without times says so. */
export function timeline(run, step, signal) {
  const box = h("div", { "aria-busy": "true" });
  get(pathOf(run, "steps", step, "timeline"), signal)
    .then((found) => fill(box, found.lanes.map((one) => lane(one, run, found.seconds)), found.complete ? null : soft("More groups were in work.")))
    .catch(({ message, remedy }) => fill(box, soft(visible(message), " ", visible(remedy ?? ""))))
    .finally(() => box.removeAttribute("aria-busy"));
  return h("section", { class: "timeline" }, h("h2", {}, "Timeline"), box);
}

function lane({ name, waited, spans, groups }, run, length) {
  const place = (element, { start, end }) => {
    element.style.left = `${100 * start / length}%`;
    element.style.width = `${100 * (end - start) / length}%`;
    return element;
  };
  const told = ({ what, start, end }) => `${visible(what)} ${duration(end - start)}`;
  const work = h("div", { class: "bar groups", "aria-hidden": "true" }, groups.map((one) => {
    const link = place(h("a", { href: links.group(run, one.what), tabindex: -1, title: told(one) }), one);
    link.style.top = `${ROW * one.row}px`;
    return link;
  }));
  const key = groups.length ? work : soft(spans.map((one) => h("span", {}, h("i", { class: `line-key ${look(one)}` }), told(one), " ")));
  work.style.height = `${ROW * Math.max(0, ...groups.map((one) => one.row + 1))}px`;
  return h("div", { class: "lane" }, h("b", {}, visible(name)),
    h("div", {}, h("div", { class: "bar", role: "img", "aria-label": `${visible(name)}: ${spans.map(told).join(", ")}` },
      spans.map((one) => place(h("i", { class: look(one), title: told(one) }), one))), key),
    h("span", { class: "soft" }, `waited ${duration(waited)}, ${percent(waited / length)}`));
}
