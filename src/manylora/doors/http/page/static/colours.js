// One colour for each adapter, the same everywhere on the page. Consecutive numbers have very different hues.

import { dark } from "./dom.js";

const GOLDEN_ANGLE = 137.508;
const numbers = new Map();

/** Numbers follow the order of the names, so a reload gives the same colours. */
export function assignColours(names) {
  for (const name of names) if (!numbers.has(name)) numbers.set(name, numbers.size);
}

export function colourOfName(name) {
  assignColours([name]);
  const number = numbers.get(name);
  const hue = (250 + number * GOLDEN_ANGLE) % 360;
  const step = (number % 3) - 1; // three levels of lightness distinguish similar hues
  const lightness = dark.matches ? 0.74 + 0.07 * step : 0.6 + 0.09 * step;
  return `oklch(${lightness} ${dark.matches ? 0.13 : 0.15} ${hue.toFixed(1)})`;
}

/** Adapters without a visible name are grey. */
export function colourOf(owner) {
  if (owner.who === "named") return colourOfName(owner.name);
  const shade = (parseInt(owner.id.slice(0, 4), 16) || 0) % 4;
  return `oklch(${(dark.matches ? 0.5 : 0.62) + 0.05 * shade} 0.01 260)`;
}

const tenants = new Map();

export function labelOf(owner) {
  if (owner.who === "named") return owner.name;
  if (owner.who === "former") return "an earlier version";
  if (owner.who === "rest") return "all others";
  if (!tenants.has(owner.id)) tenants.set(owner.id, tenants.size + 1);
  return `tenant ${tenants.get(owner.id)}`;
}
