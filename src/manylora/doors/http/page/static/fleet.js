// The replicas of a fleet: their state, their load, and the adapters that each holds.

import { colourOf, labelOf } from "./colours.js";
import { byId, count, make, setText, swatch } from "./dom.js";

const cards = new Map(); // replica -> its card

/** A single server has no replicas: it shows the map of its cache instead. */
export function show({ replicas, states, missing }) {
  byId("fleet").hidden = !replicas;
  byId("cache-section").hidden = Boolean(replicas);
  if (!replicas) return;
  const known = Object.entries(states).filter(([, number]) => number);
  const parts = known.map(([state, number]) => `${number} ${state.toLowerCase()}`);
  setText(byId("fleet-states"), [...parts, ...missing.map((name) => `${name} does not answer`)].join(", "));
  const box = byId("replicas");
  for (const [name, card] of cards) {
    if (!replicas.some((one) => one.replica === name)) {
      card.item.remove();
      cards.delete(name);
    }
  }
  for (const one of replicas) update(cards.get(one.replica) ?? newCard(one.replica, box), one);
}

function newCard(name, box) {
  const item = make("article", "replica");
  const card = { item, load: make("p", "small"), counts: make("p", "small"), list: make("ul", "residents"), held: "" };
  card.list.tabIndex = 0;
  card.list.setAttribute("aria-label", `Adapters that ${name} holds`);
  item.append(make("h3", "", name), card.load, card.counts, card.list);
  box.append(item);
  cards.set(name, card);
  return card;
}

function update(card, one) {
  setText(card.load, `${one.running} running, ${one.waiting} waiting · room for ${one.capacity}`);
  const { hits, cold_loads: loads } = one.counts;
  setText(card.counts, `${count(one.adapters.length, "adapter")} · ${count(hits, "hit")} · ${count(loads, "cold load")}`);
  const held = JSON.stringify(one.adapters);
  if (held === card.held) return;
  card.held = held;
  card.list.replaceChildren(...one.adapters.map(resident));
}

function resident(one) {
  const item = make("li", one.level === "device" ? "on-device" : "on-host");
  const where = one.level === "device" ? "" : "host";
  const busy = one.in_use ? `${one.in_use} running` : "";
  item.append(swatch(colourOf(one)), make("span", "name", labelOf(one)));
  item.append(make("span", "small", [busy, where].filter(Boolean).join(" · ")));
  return item;
}
