// The page: polls the server twice a second while it is visible, and updates its parts.

import { getJson, hasKey, storeKey, onKeyNeeded } from "./api.js";
import * as ask from "./ask.js";
import * as cache from "./cache.js";
import * as charts from "./charts.js";
import { assignColours } from "./colours.js";
import { byId, count, dark, setText } from "./dom.js";
import * as fleet from "./fleet.js";

const EVERY_MS = 500;
const RETRY_MS = 3000;
const MODELS_EVERY_MS = 10000;

let feed = "";
let lastChange = 0;
let lastPoint = 0;
let modelsAt = -Infinity;

async function poll() {
  if (performance.now() - modelsAt > MODELS_EVERY_MS) {
    const models = (await getJson("v1/models")).data;
    modelsAt = performance.now();
    const adapters = models.filter((model) => model.parent !== null);
    assignColours(adapters.map((model) => model.id));
    ask.setModels(models);
    const base = models.find((model) => model.parent === null);
    setText(byId("served"), `${base ? `${base.id} with ` : ""}${count(adapters.length, "adapter")}`);
  }
  let state = await getJson(`v1/cache?changes_after=${lastChange}&points_after=${lastPoint}`);
  if (feed && state.feed !== feed) {
    cache.reset();
    charts.reset();
    state = await getJson("v1/cache");
  }
  feed = state.feed;
  lastChange = state.last_change;
  lastPoint = state.points.at(-1)?.number ?? lastPoint;
  fleet.show(state);
  cache.show(state);
  charts.show(state);
  byId("change-key").hidden = !hasKey();
}

async function pollForever() {
  for (;;) {
    let pause = EVERY_MS;
    try {
      if (!document.hidden) {
        await poll();
        setStatus("Live", "good");
      }
    } catch (problem) {
      setStatus(problem instanceof TypeError ? "No connection" : problem.message, "bad");
      pause = RETRY_MS;
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
  }
}

function setStatus(text, kind) {
  const status = byId("status");
  setText(status, text);
  status.className = `status ${kind}`;
}

/** Show the dialog until a key is given or it is closed. needed: the server refuses requests without a key. */
function askForKey(needed, wrong) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  setText(byId("key-title"), needed ? "This server asks for a key" : "Another key");
  setText(byId("key-problem"), wrong ? "The server does not know this key." : "");
  byId("key-cancel").hidden = needed;
  return new Promise((resolve) => {
    dialog.onclose = resolve;
    byId("key-cancel").onclick = () => dialog.close();
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      storeKey(field.value.trim());
      field.value = "";
      modelsAt = -Infinity;
      dialog.close();
    };
    if (!dialog.open) dialog.showModal();
    field.focus();
  });
}

onKeyNeeded((wrong) => askForKey(true, wrong));
byId("change-key").addEventListener("click", () => askForKey(false, false));
dark.addEventListener("change", cache.redraw);
ask.init();
cache.init();
getJson("version").then(({ version }) => setText(byId("version"), `manylora ${version}`), () => {});
pollForever();
