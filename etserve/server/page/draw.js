// Small drawings: curves and dials, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const TURN_NATS = 10;

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function svg(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

export const number = (value, digits = 2) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %` : "–");

/** A curve of values from 0 to `top`; gaps (null) are left out. */
export class Curve {
  constructor(label) {
    this.node = svg("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", class: "curve", role: "img" });
    this.node.setAttribute("aria-label", label);
    this.path = svg("path", { "vector-effect": "non-scaling-stroke" });
    this.node.append(this.path);
  }

  draw(values, top, width = values.length) {
    const step = 100 / Math.max(1, width - 1);
    const points = values
      .map((value, i) => (Number.isFinite(value) ? [i * step, 23 - 22 * Math.min(1, value / top)] : null))
      .filter(Boolean)
      .map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`);
    this.path.setAttribute("d", points.length ? `M${points.join("L")}` : "");
  }
}

/** A clock of entropic time. */
export class Dial {
  constructor() {
    this.node = svg("svg", { viewBox: "0 0 36 36", class: "dial", "aria-hidden": "true" });
    this.arc = svg("circle", { cx: 18, cy: 18, r: 15, class: "arc", pathLength: 100, transform: "rotate(-90 18 18)" });
    this.hand = svg("line", { x1: 18, y1: 18, x2: 18, y2: 6, class: "hand" });
    this.node.append(svg("circle", { cx: 18, cy: 18, r: 15, class: "face" }), this.arc, this.hand);
    this.set(0);
  }

  set(tau) {
    const turn = (tau % TURN_NATS) / TURN_NATS;
    this.arc.setAttribute("stroke-dasharray", `${(100 * turn).toFixed(1)} 100`);
    this.hand.setAttribute("transform", `rotate(${(360 * turn).toFixed(1)} 18 18)`);
  }
}
