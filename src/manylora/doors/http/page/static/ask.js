// Sends one question to several models at once; each answer has its own card.

import { ApiProblem, stream } from "./api.js";
import { colourOfName } from "./colours.js";
import { byId, count, make, setText, swatch } from "./dom.js";

// A browser opens six connections to a server: five for answers, one for polling.
const MAX_ANSWERS = 5;
const FILTER_FROM = 12;
const MAX_TOKENS = 256;
const AT_FIRST = 3; // models that are chosen when the page opens
const RANKS = { device: 1, host: 2 }; // of adapters in the cache: they are chosen before others

let base = "";
let names = [];
const chosen = new Set();
let running = null;
let hasTemplate = true; // whether the model has a chat template

const colour = (name) => (name === base ? "var(--ink)" : colourOfName(name));

export function setModels(models) {
  const first = names.length === 0;
  const known = models.filter((model) => model.parent !== null || model.root === model.id);
  base = known.find((model) => model.parent === null)?.id ?? "";
  const found = known.map((model) => model.id);
  if (!first && found.join("\n") === names.join("\n")) return;
  names = found;
  if (first) for (const name of firstChoice(known)) chosen.add(name);
  for (const name of [...chosen]) if (!names.includes(name)) chosen.delete(name);
  byId("filter").hidden = names.length <= FILTER_FROM;
  showChoices();
  if (first) showCards();
}

/** The base model, and adapters that can answer: first those in use. */
function firstChoice(models) {
  const rank = ({ parent, tier }) => (parent === null ? 0 : RANKS[tier] ?? 3);
  const able = models.filter((model) => !model.problem);
  return [...able].sort((a, b) => rank(a) - rank(b)).slice(0, AT_FIRST).map((model) => model.id);
}

export function init() {
  const question = byId("question");
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else ask(question.value.trim());
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  byId("filter").addEventListener("input", filter);
}

function showChoices() {
  byId("choices").replaceChildren(...names.map((name) => {
    const label = make("label", "chip");
    const box = make("input");
    box.type = "checkbox";
    box.value = name;
    box.checked = chosen.has(name);
    box.addEventListener("change", () => choose(name, box));
    const text = make("span");
    text.append(swatch(colour(name)), name);
    if (name === base) text.append(make("span", "base-mark", "base model"));
    label.append(box, text);
    return label;
  }));
  filter();
  showChosenCount();
}

function choose(name, box) {
  if (box.checked && chosen.size >= MAX_ANSWERS) {
    box.checked = false;
    setText(byId("chosen"), `${MAX_ANSWERS} at a time: leave one out first`);
    return;
  }
  if (box.checked) chosen.add(name);
  else chosen.delete(name);
  showChosenCount();
  if (!running) showCards();
}

function showChosenCount() {
  setText(byId("chosen"), `${chosen.size} of ${names.length}`);
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const label of byId("choices").children) {
    const box = label.firstChild;
    label.hidden = !box.checked && !box.value.toLowerCase().includes(wanted);
  }
}

function showCards() {
  const cards = new Map();
  for (const name of names.filter((one) => chosen.has(one))) {
    const article = make("article", "answer");
    article.style.setProperty("--owner", colour(name));
    const text = make("div", "text");
    text.append(make("span", "waiting", "No answer yet"));
    const meta = make("p", "small meta");
    const title = make("h3", "", name);
    if (name === base) title.append(make("span", "base-mark", " base model"));
    title.id = `answer-${cards.size}`;
    text.tabIndex = 0; // long answers scroll, by keys too
    text.setAttribute("role", "region");
    text.setAttribute("aria-labelledby", title.id);
    article.append(title, text, meta);
    cards.set(name, { article, text, meta });
  }
  byId("answers").replaceChildren(...[...cards.values()].map((card) => card.article));
  return cards;
}

async function ask(question) {
  if (!question || chosen.size === 0) {
    setText(byId("announce"), question ? "Choose who answers" : "Write a question");
    if (!question) byId("question").focus();
    return;
  }
  running = new AbortController();
  setText(byId("send"), "Stop");
  setText(byId("announce"), `Asking ${count(chosen.size, "model")}`);
  const cards = showCards();
  const { signal } = running;
  await Promise.all([...cards].map(([name, card]) => answer(name, question, card, signal)));
  running = null;
  setText(byId("send"), "Ask");
  setText(byId("announce"), signal.aborted ? "Stopped" : "All answers are complete");
}

async function answer(name, question, card, signal) {
  card.article.classList.add("running");
  card.text.textContent = "";
  const started = performance.now();
  let firstAt = 0;
  let usage = null;
  let thinks = false;
  try {
    for await (const event of events(name, question, signal)) {
      const choice = event.choices?.[0];
      const { reasoning, content } = choice?.delta ?? {};
      const piece = reasoning ?? (thinks && content ? `\n\n${content}` : content) ?? choice?.text ?? "";
      if (reasoning || content) thinks = Boolean(reasoning);
      if (piece && !firstAt) firstAt = performance.now();
      if (piece) {
        const atEnd = card.text.scrollHeight - card.text.scrollTop - card.text.clientHeight < 8;
        card.text.append(piece);
        if (atEnd) card.text.scrollTop = card.text.scrollHeight; // unless the reader has scrolled up
      }
      usage = event.usage ?? usage;
    }
    setText(card.meta, summary(firstAt, started, usage));
  } catch (problem) {
    card.meta.classList.toggle("problem", !signal.aborted);
    setText(card.meta, signal.aborted ? "Stopped" : problem.message);
  } finally {
    card.article.classList.remove("running");
  }
}

async function* events(name, question, signal) {
  const body = { model: name, stream: true, stream_options: { include_usage: true }, temperature: 0, max_tokens: MAX_TOKENS };
  if (hasTemplate) {
    try {
      yield* stream("v1/chat/completions", { ...body, messages: [{ role: "user", content: question }] }, signal);
      return;
    } catch (problem) {
      if (!(problem instanceof ApiProblem && problem.status === 400 && problem.param === "messages")) throw problem;
      hasTemplate = false;
    }
  }
  yield* stream("v1/completions", { ...body, prompt: question }, signal);
}

function summary(firstAt, started, usage) {
  const parts = firstAt ? [`first token ${Math.round(firstAt - started)} ms`] : ["no text"];
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens) parts.push(count(tokens, "token"));
  const seconds = (performance.now() - firstAt) / 1000;
  if (tokens > 1 && firstAt && seconds > 0.005) parts.push(`${Math.round((tokens - 1) / seconds)} tokens/s`);
  return parts.join(" · ");
}
