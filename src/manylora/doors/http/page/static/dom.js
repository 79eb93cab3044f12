// Small helpers. Text from the server is inserted as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function swatch(colour) {
  const element = make("span", "swatch");
  element.style.setProperty("--owner", colour);
  element.setAttribute("aria-hidden", "true");
  return element;
}

export const still = window.matchMedia("(prefers-reduced-motion: reduce)");
export const dark = window.matchMedia("(prefers-color-scheme: dark)");

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}
