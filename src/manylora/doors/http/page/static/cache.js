// The cache: counts, both maps, the adapters in it, and the last events.

import { colourOf, labelOf } from "./colours.js";
import { byId, count, make, setText, swatch } from "./dom.js";
import { LevelMap } from "./map.js";

const MAX_EVENTS = 60;
const HINT = "Point at a page, or choose an adapter below, to see where it lies.";
const LEVELS = ["device", "host"];

let maps = null;
let pressed = null;
let hits = null; // id -> hits in the last answer
const rows = new Map(); // id -> the adapter's row in the list

export function init() {
  maps = Object.fromEntries(
    LEVELS.map((level) => [level, new LevelMap(byId(`${level}-map`), (at) => point(level, at))]),
  );
}

export const redraw = () => {
  for (const level of LEVELS) maps[level].draw();
  for (const row of rows.values()) row.button.firstChild.style.setProperty("--owner", colourOf(row.owner));
};

export function show(state) {
  byId("unmapped").hidden = state.mapped;
  byId("cache").hidden = !state.mapped;
  if (!state.mapped) return;
  for (const [name, value] of Object.entries(state.counts)) {
    setText(byId(`count-${name}`), value.toLocaleString("en"));
  }
  const hit = newHits(state.adapters);
  for (const level of LEVELS) showLevel(level, state, hit);
  showResidents(state.adapters);
  showEvents(state, hit);
}

/** After a restart of the server. */
export function reset() {
  hits = null;
  byId("events").replaceChildren();
}

function newHits(adapters) {
  const found = new Map();
  for (const one of adapters) {
    const more = one.hits - (hits?.get(one.id) ?? 0);
    if (hits && more > 0) found.set(one.id, { owner: one, more });
  }
  hits = new Map(adapters.map((one) => [one.id, one.hits]));
  return found;
}

function showLevel(level, state, hit) {
  const here = state.adapters.filter((one) => one[level].length);
  const pages = state.levels[level].pages;
  const used = here.reduce((sum, one) => sum + size(one[level]), 0);
  const more = maps[level].update(pages, here.map((one) => [one, one[level]]), level === "device" ? hit : new Map());
  setText(byId(`${level}-more`), more ? `and ${count(more, "more page")}, free` : "");
  const mebibytes = Math.round((pages * state.page_bytes) / 2 ** 20).toLocaleString("en");
  const text = `${used.toLocaleString("en")} of ${count(pages, "page")} · ${count(here.length, "adapter")} · ${mebibytes} MiB`;
  setText(byId(`${level}-use`), text);
  byId(`${level}-map`).setAttribute("aria-label", `Pages of the ${level} level: ${text}`);
}

const size = (runs) => runs.reduce((sum, [first, end]) => sum + end - first, 0);

function showResidents(adapters) {
  const list = byId("residents");
  const seen = new Set(adapters.map((one) => one.id));
  for (const [id, row] of rows) {
    if (!seen.has(id)) {
      row.item.remove();
      rows.delete(id);
      if (pressed === id) press(null);
    }
  }
  const ordered = [...adapters].sort((a, b) => labelOf(a).localeCompare(labelOf(b), "en", { numeric: true }));
  ordered.forEach((one, place) => {
    const row = rows.get(one.id) ?? newRow(one);
    row.owner = one;
    row.item.className = one.device.length ? "on-device" : "on-host";
    setText(row.name, labelOf(one));
    const where = one.device.length ? "" : "host · ";
    const busy = one.in_use ? `${one.in_use} running · ` : "";
    setText(row.more, `${busy}${where}${count(size(one.host), "page")}`);
    if (list.children[place] !== row.item) list.insertBefore(row.item, list.children[place] ?? null);
  });
}

function newRow(owner) {
  const item = make("li");
  const button = make("button");
  const name = make("span", "name");
  const more = make("span", "small");
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  button.append(swatch(colourOf(owner)), name, more);
  button.addEventListener("click", () => press(pressed === owner.id ? null : owner.id));
  item.append(button);
  const row = { item, button, name, more, owner };
  rows.set(owner.id, row);
  return row;
}

function press(id) {
  pressed = id;
  for (const [one, row] of rows) row.button.setAttribute("aria-pressed", String(one === id));
  for (const level of LEVELS) maps[level].choose(id);
  setText(byId("pointed"), id && rows.has(id) ? describe(rows.get(id).owner) : HINT);
}

function describe(one) {
  const text = LEVELS.map((level) => (one[level].length ? `${level} pages ${ranges(one[level])}` : `not on the ${level}`));
  return `${labelOf(one)}: ${text.join(", ")}; ${count(one.hits, "hit")} since it came`;
}

function ranges(runs) {
  const shown = runs.slice(0, 6).map(([first, end]) => (end - first === 1 ? `${first}` : `${first}–${end - 1}`));
  return shown.join(", ") + (runs.length > 6 ? " …" : "");
}

function point(level, at) {
  if (at === null) {
    press(pressed);
    return;
  }
  for (const one of LEVELS) maps[one].choose(at.owner?.id ?? pressed);
  setText(byId("pointed"), at.owner ? `${level} page ${at.page}: ${labelOf(at.owner)}` : `${level} page ${at.page}: free`);
}

function showEvents(state, hit) {
  const list = byId("events");
  const news = state.changes.map((one) => event(one.age_s, one, changed(one)));
  const total = [...hit.values()].reduce((sum, one) => sum + one.more, 0);
  if (hit.size === 1) {
    const [{ owner }] = hit.values();
    news.push(event(0, owner, `found on the device${total > 1 ? ` × ${total}` : ""}`));
  } else if (hit.size) {
    news.push(event(0, null, `${total} found on the device, of ${hit.size} adapters`));
  }
  if (news.length === 0) return;
  list.prepend(...news.slice(-MAX_EVENTS).reverse());
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}

function changed(one) {
  if (one.loaded) return one.level === "host" ? "cold load to the host" : "copied to the device";
  return `evicted from the ${one.level}`;
}

function event(ageSeconds, owner, text) {
  const item = make("li");
  const at = new Date(Date.now() - 1000 * ageSeconds);
  const time = make("time", "", at.toLocaleTimeString("en-GB"));
  time.dateTime = at.toISOString();
  const what = make("span", "what");
  if (owner) what.append(make("b", "", labelOf(owner)), " ");
  what.append(text);
  item.append(time, swatch(owner ? colourOf(owner) : "var(--free)"), what);
  return item;
}
