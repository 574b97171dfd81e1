// The engine view: batch, queue, step time, KV blocks and one entropic clock per running sequence.

import { events, request } from "./api.js";
import { Curve, Dial, element, number, percent } from "./draw.js";
import { TOP_NATS, swatch } from "./tokens.js";

const HISTORY = 120; // points of a curve
const MAX_CELLS = 240;
const STRIP_CELLS = 64; // of one sequence
const RETRY_MS = [500, 1000, 2000, 5000];
const LINGER_MS = 4000; // how long a sequence that has ended stays in sight
const RATE_FRAMES = 20; // rates are means over this many frames

const at = (id) => document.getElementById(id);

export class EngineView {
  /** `nameOf` says which run of this page a request id belongs to, if any. */
  constructor(nameOf, onState) {
    this.nameOf = nameOf;
    this.onState = onState;
    this.clocks = new Map();
    this.recent = [];
    this.steps = [];
    this.curve = new Curve("Step time over the last frames");
    at("step-plot").append(this.curve.node);
    this.generation = 0;
    this.numOthers = 0;
    this.hasBlocks = false; // until a step has told
  }

  /** Read the stream for ever; calling it again (a new key) starts over. */
  async watch() {
    const generation = (this.generation += 1);
    for (let tries = 0; generation === this.generation; tries += 1) {
      try {
        const response = await request("/v1/entropic/stream");
        this.note(null);
        for await (const { name, data } of events(response)) {
          if (generation !== this.generation) return;
          tries = 0;
          if (name === "missed") this.note(`${data.num_frames} frames were left out: this page reads too slowly.`);
          else this.show(data);
        }
      } catch (error) {
        this.note(error.status === 401 ? "The engine view needs the API key." : error.message);
        this.onState(error.status === 401 ? "key needed" : "no connection");
        if (error.status === 401) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
    }
  }

  note(text) {
    at("engine-note").hidden = !text;
    at("engine-note").textContent = text ?? "";
  }

  show(frame) {
    this.onState(frame.state);
    at("running").textContent = frame.num_running;
    at("waiting").textContent = frame.num_waiting;
    this.showRates(frame);
    if (frame.num_steps) this.showSteps(frame);
    this.hasBlocks ||= Boolean(frame.kv_blocks);
    if (frame.kv_blocks) showBlocks(frame.kv_blocks);
    this.showClocks(frame);
  }

  showRates(frame) {
    this.recent = [...this.recent, frame].slice(-RATE_FRAMES);
    const sum = (name) => this.recent.reduce((total, one) => total + one[name], 0);
    const seconds = sum("interval_seconds");
    at("rate").textContent = number(sum("num_decode_tokens") / seconds, 1);
    at("tau-rate").textContent = number(sum("tau_nats") / seconds, 1);
  }

  showSteps(frame) {
    this.steps = [...this.steps, 1000 * frame.mean_step_seconds].slice(-HISTORY);
    const top = Math.max(...this.steps, 1);
    this.curve.draw(this.steps, top * 1.1, HISTORY);
    at("step-time").textContent = `${number(this.steps.at(-1), 1)} ms, at most ${number(top, 1)}`;
  }

  showClocks(frame) {
    const seen = new Set();
    for (const sequence of frame.sequences) {
      const key = `${sequence.id}#${sequence.choice}`;
      seen.add(key);
      let clock = this.clocks.get(key);
      if (!clock) {
        const run = this.nameOf(sequence.id);
        clock = new Clock(run ? `Run ${run}` : `Other ${(this.numOthers += 1)}`, Boolean(run));
        this.clocks.set(key, clock);
        const before = run ? at("clocks").querySelector("li:not(.own)") : null;
        at("clocks").insertBefore(clock.node, before);
      }
      clock.show(sequence);
      if (sequence.finish_reason) this.retire(key, clock);
    }
    for (const [key, clock] of this.clocks) if (!seen.has(key) && !frame.num_sequences_hidden) this.retire(key, clock);
    const hidden = frame.num_sequences_hidden ? `${frame.num_sequences_hidden} more are not shown.` : "";
    at("no-clocks").textContent = this.clocks.size ? hidden : "Nothing runs.";
  }

  retire(key, clock) {
    if (clock.isEnding) return;
    clock.isEnding = true;
    clock.node.classList.add("ended");
    setTimeout(() => {
      clock.node.remove();
      this.clocks.delete(key);
      if (!this.clocks.size) at("no-clocks").textContent = "Nothing runs.";
    }, LINGER_MS);
  }
}

class Clock {
  constructor(name, isOwn) {
    this.values = [];
    this.dial = new Dial();
    this.curve = new Curve("Entropy, token by token");
    this.tau = element("b", { class: "tau" });
    this.facts = element("span", { class: "quiet small" });
    this.strip = element("div", { class: "strip", role: "img", "aria-label": "Blocks not told yet" });
    this.dot = element("span", { class: "dot" });
    this.count = element("span", { class: "quiet small" });
    const title = element("span", { class: "title" }, this.dot, name, this.count, this.tau);
    const text = element("div", { class: "clock-text" }, title, this.curve.node, this.strip, this.facts);
    this.node = element("li", { class: isOwn ? "own" : "" }, this.dial.node, text);
  }

  show(sequence) {
    this.dial.set(sequence.tau_nats ?? 0);
    this.tau.textContent = `τ ${number(sequence.tau_nats, 1)}`;
    this.values = [...this.values, ...sequence.entropies_nats].slice(-HISTORY);
    this.curve.draw(this.values, TOP_NATS);
    swatch(this.dot, sequence.entropy_nats);
    if (sequence.blocks) showStrip(this.strip, sequence.blocks);
    const kept = sequence.kept_fraction === null ? "" : ` · kept ${percent(sequence.kept_fraction)}`;
    const end = sequence.finish_reason ? ` · ${sequence.finish_reason}` : "";
    const numbers = `H ${number(sequence.entropy_nats)} · T ${number(sequence.temperature)}`;
    this.count.textContent = `${sequence.num_tokens} tokens${end}`;
    this.facts.textContent = `${numbers}${kept}`;
  }
}

/** A sequence's blocks, the read ones first; a state that exists has at least one cell. */
export function showStrip(strip, { read, skipped, evicted }) {
  const perCell = Math.max(1, Math.ceil((read + skipped + evicted) / STRIP_CELLS));
  const counts = { active: read, skipped, evicted };
  const states = Object.entries(counts).flatMap(([state, count]) => Array(Math.ceil(count / perCell)).fill(state));
  while (strip.childElementCount < states.length) strip.append(element("span"));
  while (strip.childElementCount > states.length) strip.lastChild.remove();
  [...strip.children].forEach((cell, i) => {
    if (cell.className !== `cell ${states[i]}`) cell.className = `cell ${states[i]}`;
  });
  const scale = perCell > 1 ? `; one cell is ${perCell} blocks` : "";
  const label = `${read} blocks read, ${skipped} skipped, ${evicted} evicted${scale}`;
  if (strip.title !== label) {
    strip.title = label;
    strip.setAttribute("aria-label", label);
  }
}

/** One cell stands for one block, or for several where there are many; a state that exists has at least one cell. */
export function showBlocks({ active, cached, free }) {
  const total = active + cached + free;
  const perCell = Math.max(1, Math.ceil(total / MAX_CELLS));
  const count = Math.ceil(total / perCell);
  const numActive = Math.ceil(active / perCell);
  const numCached = Math.min(count - numActive, Math.ceil(cached / perCell));
  const map = at("kv-map");
  while (map.childElementCount < count) map.append(element("span"));
  while (map.childElementCount > count) map.lastChild.remove();
  [...map.children].forEach((cell, i) => {
    const state = i < numActive ? "active" : i < numActive + numCached ? "cached" : "free";
    if (cell.className !== `cell ${state}`) cell.className = `cell ${state}`;
  });
  map.setAttribute("aria-label", `${active} blocks active, ${cached} cached, ${free} free`);
  at("kv-active").textContent = active;
  at("kv-cached").textContent = cached;
  at("kv-free").textContent = free;
  at("kv-scale").textContent = perCell > 1 ? `One cell is ${perCell} blocks.` : "";
}
