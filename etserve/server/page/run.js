// One run: its settings, its conversation, and the answer that is coming in.

import { ApiError, events, request } from "./api.js";
import { Controls } from "./controls.js";
import { Curve, Dial, element, number } from "./draw.js";
import { TOP_NATS, TokenStrip, tokensOf } from "./tokens.js";

const NUM_TOP = 5;
const SPEAK_SECONDS = 2; // how often a screen reader gets what is new

export class Run {
  constructor(template, name, inspector) {
    this.node = template.content.cloneNode(true).firstElementChild;
    this.name = name;
    this.inspector = inspector;
    this.history = [];
    this.replyId = null;
    this.find(".run-name").textContent = `Run ${name}`;
    this.find(".turns").setAttribute("aria-label", `Conversation of run ${name}`);
    this.controls = new Controls(this.find(".fields"));
  }

  find(selector) {
    return this.node.querySelector(selector);
  }

  clear() {
    this.history = [];
    this.find(".turns").replaceChildren();
    this.find(".said").replaceChildren();
    this.fail(null);
  }

  stop() {
    this.abort?.abort();
  }

  fail(message) {
    const node = this.find(".error");
    node.hidden = !message;
    node.textContent = message ?? "";
  }

  /** Ask and show the answer as it comes. Never throws; returns the ApiError that ended it, if one did. */
  async ask(prompt, { mode, model, seed }) {
    this.fail(null);
    const answer = new Answer(this, prompt, mode);
    this.abort = new AbortController();
    try {
      const settings = this.controls.request();
      const body = this.body(prompt, mode, { ...(seed === undefined ? {} : { seed }), ...settings, model });
      this.find(".turns").append(answer.node);
      await this.receive(answer, mode, body);
      this.remember(prompt, answer.text);
    } catch (error) {
      answer.finish(error.name === "AbortError" ? "stopped" : "failed");
      if (error.name === "AbortError") return this.remember(prompt, answer.text);
      this.fail(error instanceof ApiError || error instanceof RangeError ? error.message : "The connection broke.");
      return error;
    } finally {
      this.replyId = null;
    }
    return null;
  }

  remember(prompt, text) {
    if (text) this.history.push({ role: "user", content: prompt }, { role: "assistant", content: text });
    return null;
  }

  body(prompt, mode, settings) {
    const common = { ...settings, stream: true, stream_options: { include_usage: true } };
    if (mode === "completion") return { ...common, prompt, logprobs: NUM_TOP };
    const messages = [...this.history, { role: "user", content: prompt }];
    return { ...common, messages, logprobs: true, top_logprobs: NUM_TOP };
  }

  async receive(answer, mode, body) {
    const path = mode === "chat" ? "/v1/chat/completions" : "/v1/completions";
    const response = await request(path, { body, signal: this.abort.signal });
    let isDone = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") isDone = true;
      else if (data.error) throw new ApiError(data.error.message, response.status, data.error.code);
      else this.take(answer, data);
    }
    if (!isDone) throw new ApiError("The answer broke off.", 0, "broken");
  }

  take(answer, { id, choices, usage }) {
    this.replyId = id;
    for (const choice of choices) {
      answer.add(tokensOf(choice), choice.delta?.content ?? choice.text ?? "");
      if (choice.finish_reason) answer.finish(choice.finish_reason, choice.entropic);
    }
    if (usage) answer.use(usage);
  }
}

/** What was asked and what came back. */
class Answer {
  constructor(run, prompt, mode) {
    this.turns = run.find(".turns");
    this.said = run.find(".said");
    this.unsaid = "";
    this.text = "";
    this.lastText = "";
    this.usage = null;
    this.began = performance.now();
    this.spoken = this.began;
    this.strip = new TokenStrip(run.inspector, `Tokens of run ${run.name}`);
    this.curve = new Curve("Entropy, token by token");
    this.dial = new Dial();
    this.facts = element("p", { class: "facts quiet" }, "waiting");
    const foot = element("div", { class: "foot" }, this.dial.node, this.curve.node, this.facts);
    const asked = element("p", { class: `asked ${mode}` }, prompt);
    this.node = element("section", { class: `turn ${mode}` }, asked, this.strip.node, foot);
  }

  add(tokens, text) {
    const isAtEnd = this.turns.scrollHeight - this.turns.scrollTop - this.turns.clientHeight < 80;
    this.firstAt ??= tokens.length ? performance.now() : undefined;
    for (const token of tokens) this.strip.add(token);
    if (tokens.length) this.lastText = text;
    this.text += text;
    this.unsaid += text;
    if (performance.now() - this.spoken > SPEAK_SECONDS * 1000) this.speak();
    this.measure();
    if (isAtEnd) this.turns.scrollTop = this.turns.scrollHeight;
  }

  measure() {
    const entropies = this.strip.tokens.map((token) => token.entropy_nats);
    this.curve.draw(entropies, TOP_NATS);
    const last = this.strip.tokens.at(-1);
    if (!last) return;
    this.dial.set(last.tau_nats ?? 0);
    const { entropy_nats: entropy, tau_nats: tau, temperature } = last;
    const numbers = `H ${number(entropy)} · τ ${number(tau, 1)} nats · T ${number(temperature)}`;
    this.facts.textContent = `${entropies.length} tokens · ${numbers}`;
  }

  /** Give screen readers what is new. */
  speak() {
    if (!this.unsaid) return;
    this.spoken = performance.now();
    this.said.append(element("span", {}, this.unsaid));
    this.unsaid = "";
  }

  finish(reason, summary) {
    this.speak();
    if (reason === "stop" && !this.lastText) this.strip.markEnd();
    const count = this.strip.tokens.length;
    const parts = [`${count} tokens`];
    if (summary) parts.push(`τ ${number(summary.tau_nats, 1)} nats`, `mean H ${number(summary.mean_entropy_nats)}`);
    if (summary) parts.push(`mean T ${number(summary.mean_temperature)}`);
    if (this.firstAt) parts.push(`first after ${number((this.firstAt - this.began) / 1000)} s`);
    const seconds = (performance.now() - this.firstAt) / 1000;
    if (count > 1 && seconds > 0) parts.push(`${number((count - 1) / seconds, 1)} tokens/s`);
    this.facts.textContent = [...parts, reason].join(" · ");
  }

  use({ prompt_tokens: prompt, prompt_tokens_details: details }) {
    const cached = details?.cached_tokens ? `, ${details.cached_tokens} cached` : "";
    this.facts.textContent += ` · prompt ${prompt}${cached}`;
  }
}
