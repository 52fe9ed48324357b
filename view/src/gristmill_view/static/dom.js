// Builds elements. Text becomes text nodes only: nothing here, or anywhere in the page, parses HTML.

// Control characters, characters that change the reading direction, and characters that nobody can see. Tab and line
// feed stay, and so do the joiners that emoji and some scripts need.
const UNSEEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u2069\\ufeff\\ufff9-\\ufffb]|[\\u{e0000}-\\u{e007f}]|\\p{Surrogate}", "gu");

export const known = (value) => value !== null && value !== undefined;

const code = (character) => "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

/** Returns text of a model with invisible characters as `[U+202E]`, for attributes and short labels. */
export const visible = (text) => String(text).replace(UNSEEN, (found) => `[${code(found)}]`);

/** Returns text of a model as nodes: invisible characters are marked elements. */
export function shown(text) {
  const parts = document.createDocumentFragment();
  let at = 0;
  for (const found of String(text).matchAll(UNSEEN)) {
    if (found.index > at) parts.append(text.slice(at, found.index));
    parts.append(h("span", { class: "control", title: "an invisible character" }, code(found[0])));
    at = found.index + found[0].length;
  }
  parts.append(text.slice(at));
  return parts;
}

const SVG = new Set(["svg", "path", "rect", "line", "polyline", "circle", "title"]);

/** Creates an element. `on…` properties are listeners; true and false set and omit attributes; strings are text. */
export function h(tag, properties = {}, ...children) {
  const drawn = SVG.has(tag);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (tag === "button") element.type = "button";
  for (const [name, value] of Object.entries(properties)) {
    if (!known(value) || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export const cell = (...content) => h("td", {}, content);
export const amount = (...content) => h("td", { class: "number" }, content);
export const soft = (...content) => h("p", { class: "soft" }, content);
export const small = (...content) => h("small", {}, content);

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (known(child) && child !== false) element.append(child);
  }
}

/** Replaces the content of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Sets the text of an element, if it is another text: a screen reader announces changes only. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Announces a change to screen readers. */
export const announce = (text) => say(document.getElementById("spoken"), text);

const probe = document.body.appendChild(h("i", { hidden: true }));

/** Returns a colour of style.css in the present theme, such as `--line-1`, as a canvas needs it. */
export function css(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** A table cell or fact whose value is unknown. */
export const NONE = "–";
