// The settings of one run, and which of the server's entropic options they may use.

import { element } from "./draw.js";

const AS_SERVER = ["", "as the server is set"]; // the field is left out of the request
const FIELDS = [
  { name: "temperature", label: "Temperature", value: "0.7", min: 0, max: 2, step: 0.05 },
  { name: "max_tokens", label: "Max tokens", value: "128", min: 1, max: 1048576, step: 1 },
  { name: "seed", label: "Seed", value: "", min: 0, max: 2147483647, step: 1, hint: "random" },
];
const TARGET = { name: "target_entropy_nats", label: "Target entropy, nats", min: 0, max: 12, step: 0.1, hint: "server's" };
// The three scales of the control loop. `option` is the request's field; without one the server alone decides.
const SWITCHES = [
  { label: "Micro: warmth", option: "temperature_mode", values: ["off", "cool", "two_sided"] },
  { label: "Meso: what is read", option: "pruning", values: ["off", "on"] },
  { label: "Macro: who gets the step", reason: "The whole server has one order; a request cannot choose it." },
];
const UNKNOWN = "The server has not said that it takes this.";

let numControls = 0;

export class Controls {
  constructor(node) {
    this.inputs = new Map();
    this.node = node;
    for (const field of FIELDS) node.append(this.number(field));
    this.entropic = element("div", { class: "switches" });
    node.append(this.entropic);
    this.offer({});
  }

  /** Rebuild the entropic controls for what the server offers: options by name, as GET /v1/entropic tells them. */
  offer(options) {
    const switches = SWITCHES.map((one) => this.toggle(one, options[one.option]));
    const target = options[TARGET.name];
    const field = this.number({ ...TARGET, min: target?.minimum ?? TARGET.min, max: target?.maximum ?? TARGET.max });
    if (!target?.offered) this.refuse(field, this.inputs.get(TARGET.name), target?.reason ?? UNKNOWN);
    this.entropic.replaceChildren(...switches, field);
  }

  number({ name, label, value = "", min, max, step, hint = "" }) {
    const id = `control-${(numControls += 1)}`;
    const attributes = { id, type: "number", min, max, step, value, placeholder: hint, inputmode: "decimal" };
    const input = element("input", attributes);
    this.inputs.set(name, input);
    return element("div", { class: "field" }, element("label", { for: id }, label), input);
  }

  toggle({ label, option, values, reason }, offer) {
    const id = `control-${(numControls += 1)}`;
    const choices = [AS_SERVER, ...(offer?.enum ?? values ?? []).map((value) => [value, value])];
    const select = element("select", { id }, ...choices.map(([value, text]) => element("option", { value }, text)));
    const field = element("div", { class: "field" }, element("label", { for: id }, label), select);
    if (option) this.inputs.set(option, select);
    if (!offer?.offered) this.refuse(field, select, reason ?? offer?.reason ?? UNKNOWN);
    return field;
  }

  refuse(field, input, reason) {
    const id = `control-${(numControls += 1)}`;
    input.disabled = true;
    input.setAttribute("aria-describedby", id);
    field.append(element("small", { id, class: "reason" }, reason));
  }

  /** The fields of a request. Raises RangeError with a sentence where a number is out of its range. */
  request() {
    const body = {};
    for (const { name, label, min, max } of FIELDS) {
      const input = this.inputs.get(name);
      if (!input.checkValidity()) throw new RangeError(`${label}: a number from ${min} to ${max}, please.`);
      if (input.value !== "") body[name] = Number(input.value);
    }
    return { ...body, entropic: { trace: "tokens", ...this.entropicRequest() } };
  }

  entropicRequest() {
    const chosen = {};
    for (const { option } of SWITCHES) {
      const input = this.inputs.get(option);
      if (input && !input.disabled && input.value) chosen[option] = input.value;
    }
    const target = this.inputs.get(TARGET.name);
    if (!target.checkValidity()) throw new RangeError(`${TARGET.label}: a number in its range, please.`);
    if (!target.disabled && target.value !== "") chosen[TARGET.name] = Number(target.value);
    return chosen;
  }
}
