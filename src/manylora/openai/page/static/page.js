// The page: asks the server twice a second while somebody looks, and hands the news to its parts.

import { getJson, hasKey, keepKey, onKeyNeeded } from "./api.js";
import * as ask from "./ask.js";
import * as cache from "./cache.js";
import * as charts from "./charts.js";
import { enrol } from "./colours.js";
import { byId, count, dark, setText } from "./dom.js";

const EVERY_MS = 500;
const RETRY_MS = 3000;
const MODELS_EVERY_MS = 10000;

let feed = "";
let lastChange = 0;
let lastPoint = 0;
let modelsAt = -Infinity;

async function look() {
  if (performance.now() - modelsAt > MODELS_EVERY_MS) {
    const models = (await getJson("v1/models")).data;
    modelsAt = performance.now();
    const adapters = models.filter((model) => model.parent !== null);
    enrol(adapters.map((model) => model.id));
    ask.offer(models);
    const base = models.find((model) => model.parent === null);
    setText(byId("served"), `${base ? `${base.id} with ` : ""}${count(adapters.length, "adapter")}`);
  }
  let state = await getJson(`v1/cache?changes_after=${lastChange}&points_after=${lastPoint}`);
  if (feed && state.feed !== feed) {
    cache.forget();
    charts.forget();
    state = await getJson("v1/cache");
  }
  feed = state.feed;
  lastChange = state.last_change;
  lastPoint = state.points.at(-1)?.number ?? lastPoint;
  cache.show(state);
  charts.show(state);
  byId("change-key").hidden = !hasKey();
}

async function watch() {
  for (;;) {
    let pause = EVERY_MS;
    try {
      if (!document.hidden) {
        await look();
        tell("Live", "good");
      }
    } catch (problem) {
      tell(problem instanceof TypeError ? "No connection" : problem.message, "bad");
      pause = RETRY_MS;
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
  }
}

function tell(text, kind) {
  const status = byId("status");
  setText(status, text);
  status.className = `status ${kind}`;
}

/** Open the dialog until a key is given or it is left. needed: nothing goes on without one. */
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
      keepKey(field.value.trim());
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
ask.begin();
cache.begin();
getJson("version").then(({ version }) => setText(byId("version"), `manylora ${version}`), () => {});
watch();
