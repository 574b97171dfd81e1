// Puts the page together: what the server offers, the composer, one or two runs, and the engine view.

import { request, setKey } from "./api.js";
import { element } from "./draw.js";
import { EngineView, showBlocks } from "./engine.js";
import { Run } from "./run.js";
import { Inspector, TOP_NATS, swatch } from "./tokens.js";

const RETRY_MS = 1000;
const at = (id) => document.getElementById(id);
const inspector = new Inspector(at("inspector"));
const runs = [];
let server = { model: null, options: {} };

const engine = new EngineView(
  (id) => runs.find((run) => run.replyId && id.startsWith(run.replyId))?.name,
  (state) => {
    at("state").textContent = state;
    at("state").dataset.state = state;
  },
);

function addRun(name) {
  const run = new Run(at("run-template"), name, inspector);
  run.controls.offer(server.options);
  runs.push(run);
  at("runs").append(run.node);
}

function compare(isOn) {
  if (isOn) addRun("B");
  else {
    const run = runs.pop();
    run.stop();
    run.node.remove();
  }
  document.body.classList.toggle("comparing", isOn);
}

/** Ask the server what it is, again and again while its model loads. */
async function learn() {
  try {
    server = await (await request("/v1/entropic")).json();
  } catch (error) {
    if (error.status === 401) return askForKey();
  }
  if (!server.model) return setTimeout(learn, RETRY_MS);
  const { id, num_parameters: size, backend } = server.model;
  at("model").textContent = `${id} · ${Math.round(size / 1e6)} M parameters · ${backend}`;
  for (const run of runs) run.controls.offer(server.options);
  if (!engine.hasBlocks) showBlocks({ active: 0, cached: 0, free: server.model.num_kv_blocks - 1 }); // one is the null block
}

function askForKey() {
  at("key-box").open = true;
  at("key").focus();
}

async function send() {
  const prompt = at("prompt").value;
  if (!prompt.trim() || at("send").disabled) return;
  const mode = document.querySelector("input[name=mode]:checked").value;
  const seed = runs.length > 1 ? Math.floor(Math.random() * 2 ** 31) : undefined; // both draw alike
  at("prompt").value = "";
  setBusy(true);
  const asked = runs.map((run) => run.ask(prompt, { mode, model: server.model?.id, seed }));
  const errors = (await Promise.all(asked)).filter(Boolean);
  setBusy(false);
  if (errors.length === asked.length && !at("prompt").value) at("prompt").value = prompt;
  if (errors.some((error) => error.status === 401)) askForKey();
}

function setBusy(isBusy) {
  at("send").disabled = isBusy;
  at("stop").disabled = !isBusy;
  at("compare").disabled = isBusy;
  at("clear").disabled = isBusy;
}

function connect() {
  learn();
  engine.watch();
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("stop").addEventListener("click", () => runs.forEach((run) => run.stop()));
at("clear").addEventListener("click", () => {
  runs.forEach((run) => run.clear());
  at("prompt").focus();
});
at("compare").addEventListener("change", (event) => compare(event.target.checked));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-box").open = false;
  connect();
});

for (let nats = 0; nats <= TOP_NATS; nats += 1) {
  const sample = element("span", { class: "token" }, nats === TOP_NATS ? `${nats}+` : `${nats}`);
  swatch(sample, nats);
  document.querySelector(".scale").append(sample);
}
addRun("A");
connect();
