"use strict";
const box = document.getElementById("groups");
const groups = Array.from(box.querySelectorAll("details.group"));
const control = (name) => document.getElementById(name);
const [sort, show, least, most, find, toggle, count] =
  ["sort", "show", "least", "most", "find", "toggle", "count"].map(control);

const value = (group, key) => group.dataset[key] === "" ? -Infinity : Number(group.dataset[key]);

function order() {
  const down = sort.value.startsWith("-");
  const key = sort.value.replace(/^-/, "");
  const by = (a, b) => (down ? value(b, key) - value(a, key) : value(a, key) - value(b, key)) || 0;
  box.append(...groups.slice().sort((a, b) => by(a, b) || value(a, "number") - value(b, "number")));
}

function wanted(group) {
  const data = group.dataset;
  switch (show.value) {
    case "mixed": return !data.same && Number(data.spread) > 0;
    case "same": return Boolean(data.same);
    case "cut": return Boolean(data.cut);
    case "failed": return Boolean(data.failed);
    default: return true;
  }
}

function choose() {
  const low = least.value === "" ? -Infinity : Number(least.value);
  const high = most.value === "" ? Infinity : Number(most.value);
  const bounded = low !== -Infinity || high !== Infinity;
  const words = find.value.toLowerCase();
  let groupsShown = 0, completionsShown = 0;
  for (const group of groups) {
    const found = !words || group.textContent.toLowerCase().includes(words);
    let inside = 0;
    const articles = group.querySelectorAll("article");
    for (const article of articles) {
      const text = article.dataset.score;
      const score = text === "" ? NaN : Number(text);
      article.hidden = bounded && !(score >= low && score <= high);
      inside += article.hidden ? 0 : Number(article.dataset.times);
    }
    group.hidden = !(wanted(group) && found && (inside > 0 || (articles.length === 0 && !bounded)));
    groupsShown += group.hidden ? 0 : 1;
    completionsShown += group.hidden ? 0 : inside;
  }
  count.value = `${groupsShown} of ${groups.length} groups, ${completionsShown} completions`;
}

sort.addEventListener("change", order);
for (const input of [show, least, most, find]) input.addEventListener("input", choose);
toggle.addEventListener("click", () => {
  const open = toggle.textContent === "Open all";
  for (const group of groups) group.open = open;
  toggle.textContent = open ? "Close all" : "Open all";
});
choose();
