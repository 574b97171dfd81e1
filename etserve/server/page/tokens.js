// The tokens of an answer: spelled, coloured by entropy, and inspected by pointer, finger or keyboard.

import { element, number, percent } from "./draw.js";

export const TOP_NATS = 4; // the colour scale ends here
const NO_TEXT = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
const utf8 = new TextEncoder();

/** The tokens that one chunk of a stream carries, in one shape for both routes. */
export function tokensOf(choice) {
  const records = choice.entropic?.tokens ?? [];
  const spelled = choice.logprobs?.content
    ? choice.logprobs.content.map(fromChat)
    : (choice.logprobs?.tokens ?? []).map((_, i) => fromCompletion(choice.logprobs, i));
  return spelled.map((token, i) => ({ ...token, ...records[i] }));
}

function fromChat({ token, logprob, bytes, top_logprobs: top }) {
  return { name: token, logprob, bytes: Uint8Array.from(bytes), top: top.map((one) => [one.token, one.logprob]) };
}

function fromCompletion(logprobs, i) {
  const name = logprobs.tokens[i];
  const top = Object.entries(logprobs.top_logprobs[i] ?? {}).sort((a, b) => b[1] - a[1]);
  return { name, logprob: logprobs.token_logprobs[i], bytes: bytesOf(name), top };
}

function bytesOf(name) {
  const match = NO_TEXT.exec(name);
  return match ? Uint8Array.from(match[1].slice(2).split("\\x"), (hex) => parseInt(hex, 16)) : utf8.encode(name);
}

export function swatch(node, entropy) {
  node.style.setProperty("--x", Math.min(1, Math.max(0, entropy ?? 0) / TOP_NATS).toFixed(3));
}

const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥");

function describe(token) {
  const { name, entropy_nats: entropy, logprob } = token;
  return `${visible(name)}, entropy ${number(entropy)} nats, probability ${percent(Math.exp(logprob))}`;
}

/** One answer's tokens. One tab stop; the arrow keys, Home and End move within it. */
export class TokenStrip {
  constructor(inspector, label) {
    this.inspector = inspector;
    this.tokens = [];
    this.decoder = new TextDecoder();
    this.node = element("div", { class: "tokens", role: "toolbar", "aria-label": label });
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.node.addEventListener("focusin", (event) => this.show(event.target));
    this.node.addEventListener("focusout", () => inspector.hide());
    this.node.addEventListener("pointerover", (event) => event.pointerType !== "touch" && this.show(event.target));
    this.node.addEventListener("pointerleave", () => inspector.leave());
    this.node.addEventListener("click", (event) => event.target.closest(".token")?.focus());
  }

  /** Add a token; return the text that it completed. A character of several tokens shows with its last one. */
  add(token) {
    const text = this.decoder.decode(token.bytes, { stream: true });
    const index = this.tokens.push(token) - 1;
    const shown = text.replace(/^ (?=\S)/, ""); // the space before a word stays uncoloured, also at a line's end
    if (shown !== text) this.node.append(" ");
    const node = element("span", { class: "token", role: "button", tabindex: index ? "-1" : "0" }, shown || "·");
    node.classList.toggle("partial", !text);
    node.dataset.index = index;
    node.setAttribute("aria-label", describe(token));
    swatch(node, token.entropy_nats);
    this.node.append(node);
    return text;
  }

  /** The last token ended the answer and is not part of its text. */
  markEnd() {
    const last = this.node.lastElementChild;
    if (!last) return;
    last.classList.add("end");
    last.textContent = this.tokens.at(-1).name;
  }

  show(target) {
    const node = target.closest(".token");
    if (node) this.inspector.show(node, this.tokens[Number(node.dataset.index)]);
  }

  onKey(event) {
    const nodes = this.node.children;
    const here = Number(event.target.dataset.index);
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (event.key === "Escape") this.inspector.hide();
    if (next === undefined || !nodes[next]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    nodes[next].tabIndex = 0;
    nodes[next].focus();
  }
}

/** The card beside a token. It stays while the pointer is on it. */
export class Inspector {
  constructor(node) {
    this.node = node;
    this.timer = 0;
    node.addEventListener("pointerenter", () => clearTimeout(this.timer));
    node.addEventListener("pointerleave", () => this.leave());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    document.addEventListener("scroll", () => this.follow(), { capture: true, passive: true });
  }

  /** After scrolling: stay with the token that has the focus, else go. */
  follow() {
    if (this.node.hidden) return;
    if (document.activeElement === this.anchor) this.place(this.anchor.getClientRects()[0]);
    else this.hide();
  }

  show(anchor, token) {
    clearTimeout(this.timer);
    this.anchor?.classList.remove("chosen");
    this.anchor = anchor;
    anchor.classList.add("chosen");
    this.node.replaceChildren(...cardOf(token));
    this.node.hidden = false;
    this.place(anchor.getClientRects()[0] ?? anchor.getBoundingClientRect());
  }

  place(box) {
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const below = box.bottom + 6 + height <= window.innerHeight;
    const left = Math.max(8, Math.min(box.left, window.innerWidth - width - 8));
    this.node.style.left = `${left}px`;
    this.node.style.top = `${Math.max(8, below ? box.bottom + 6 : box.top - height - 6)}px`;
  }

  leave() {
    this.timer = setTimeout(() => this.hide(), 200);
  }

  hide() {
    clearTimeout(this.timer);
    this.anchor?.classList.remove("chosen");
    this.node.hidden = true;
  }
}

function cardOf(token) {
  const facts = [
    ["H, nats", number(token.entropy_nats)],
    ["varentropy", number(token.varentropy)],
    ["τ, nats", number(token.tau_nats)],
    ["temperature", number(token.temperature)],
    ["kept share", percent(token.kept_fraction)],
  ];
  const list = element("dl", {}, ...facts.flatMap(([k, v]) => [element("dt", {}, k), element("dd", {}, v)]));
  const rows = token.top.map(([name, logprob]) => alternative(name, logprob, name === token.name));
  if (!token.top.some(([name]) => name === token.name)) rows.push(alternative(token.name, token.logprob, true));
  return [element("strong", { class: "name" }, visible(token.name)), list, element("ol", {}, ...rows)];
}

function alternative(name, logprob, isDrawn) {
  const bar = element("span", { class: "bar" });
  bar.style.setProperty("--p", Math.exp(logprob).toFixed(4));
  const label = element("span", { class: "alternative" }, visible(name) || "∅");
  const share = element("span", {}, percent(Math.exp(logprob)));
  const row = element("li", { class: isDrawn ? "drawn" : "" }, label, bar, share);
  if (isDrawn) label.append(element("span", { class: "mark" }, " ← drawn"));
  return row;
}
