"use strict";
// Elements, numbers as people read them, and colours. Text from a run only ever becomes a text node.

// h("p.note", {id: "x", onclick: f}, "text", element, [more]): an element. Names with on... are listeners.
function h(selector, attributes, ...children) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

function fill(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

function swatch(color) {
  const element = h("span.swatch", { "aria-hidden": "true" });
  element.style.background = color;
  return element;
}

// Control characters and those that turn the direction of text are shown, not obeyed.
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
function visible(text) {
  return String(text).replace(INVISIBLE, (c) => {
    if (c === "\n") return "⏎\n";
    if (c === "\t") return "⇥";
    const code = c.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
  });
}

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

// A number with about three significant digits.
function number(x, unit) {
  if (x === Infinity || x === -Infinity) return x > 0 ? "∞" : "−∞";
  if (!isNumber(x)) return "–";
  if (unit === "bytes") return bytes(x);
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e6) return x.toLocaleString("en");
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return x.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  return x.toPrecision(3);
}
const fixed = (x) => (isNumber(x) ? x.toFixed(3) : "–");
// The mismatch: zero is written as 0.0, and only zero.
const exactly = (x) => (x === 0 ? "0.0" : number(x));
function bytes(x) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (x >= 1024 && i < units.length - 1) { x /= 1024; i += 1; }
  return `${x.toPrecision(3)} ${units[i]}`;
}
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 60) return `${seconds.toPrecision(2)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// Colours of lines, as the stylesheet has them.
const lineColor = (i) => `var(--l${i % 8})`;
// A colour of the stylesheet as a canvas takes it, in the theme of the moment.
const probe = h("i", { hidden: true });
function resolved(color, share = 1) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = color;
  return getComputedStyle(probe).color.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);
}

// The theme is the system's until a person chooses one. It is kept for all pages.
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("zerokl-theme", name); } catch { /* a page from a file may have no storage */ }
}
function firstTheme() {
  let kept = null;
  try { kept = localStorage.getItem("zerokl-theme"); } catch { /* as above */ }
  document.documentElement.dataset.theme = kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
firstTheme();
const bar = document.querySelector(".bar");
bar.append(h("button.quiet", { type: "button", onclick: () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  redrawCharts();
} }, "light / dark"));

// A table that sorts by a column's key when its heading is pressed, and the other way when it is pressed again.
// columns: [{name, cell(row), key(row) where it sorts, highFirst, num, title}].
function sortedTable(label, columns, rows) {
  const body = h("tbody"), shown = [...rows];
  let sorted = null, sign = 1;
  const show = () => fill(body, shown.map((row) => h("tr", null, columns.map(({ cell, num }) => h(num ? "td.num" : "td", null, cell(row))))));
  const sort = (i) => {
    sign = sorted === i ? -sign : columns[i].highFirst ? -1 : 1;
    sorted = i;
    const { key } = columns[i];
    shown.sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
    heads.forEach((head, j) => columns[j].key && head.setAttribute("aria-sort", j !== i ? "none" : sign > 0 ? "ascending" : "descending"));
    show();
  };
  const heads = columns.map(({ name, key, num, title }, i) => h(num ? "th.num" : "th", null,
    key ? h("button", { type: "button", title: title || null, onclick: () => sort(i) }, name) : name));
  show();
  return scrolled(label, h("table", null, h("thead", null, h("tr", null, heads)), body));
}

// What is wider than its card scrolls by itself, by keyboard too.
const scrolled = (label, ...children) => h("div.scroll", { tabindex: "0", role: "region", "aria-label": label }, children);

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page from a file may not use the clipboard in some browsers; a selection can be copied everywhere.
    const box = h("textarea", { value: text, "aria-hidden": "true" });
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  const before = button.textContent;
  button.textContent = "copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}

const copyButton = (text, name) =>
  h("button", { type: "button", "aria-label": `copy ${name}`, onclick: (e) => copy(text, e.currentTarget) }, "copy");
