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

// Colours of lines: told apart by people who see colours differently (after Okabe and Ito), in both themes.
const LINES = {
  light: ["#1f6fd1", "#c4500c", "#12805c", "#a8327d", "#8a6d00", "#5b4bc4", "#0b7f93", "#6b7280"],
  dark: ["#6aa9ff", "#ff9a5a", "#4fd1a0", "#f18ac6", "#e3c04b", "#a99bff", "#4fd0e3", "#aab2bf"],
};
const theme = () => document.documentElement.dataset.theme || "light";
// Parts of a step: shades of one colour for sampling, of another for training.
const SHADES = {
  sample: ["#0b3d7a", "#1f6fd1", "#5b9bea", "#a9cdf7"],
  train: ["#7a2e04", "#c4500c", "#e88a4c", "#f5b98e", "#9a6a4a", "#d9c3b3"],
};
const lineColor = (i) => LINES[theme()][i % 8];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function translucent(hex, share) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${share})`;
}

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
