// Draws one blend: which tokens each layer computed, and when each layer was loaded and computed.
// All text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const CHART = { width: 860, left: 140, right: 20, row: 15, axis: 24, ticks: 8 };

export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// An element with attributes and children; strings become text nodes, and null is left out.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// d1 to d4 by quarters of the model's depth; empty for a token that was only loaded.
export function depthClass(depth, layers) {
  return depth && layers ? `d${Math.ceil((4 * depth) / layers)}` : "";
}

// The smallest of 1, 2 and 5 times a power of ten that gives at most CHART.ticks steps.
export function tickStep(end) {
  const magnitude = 10 ** Math.floor(Math.log10(end / CHART.ticks));
  return [1, 2, 5, 10].map((step) => step * magnitude).find((step) => step * CHART.ticks >= end * 0.999999);
}

// By position, the number of layers that computed it.
export function depthsOf(view) {
  const depths = new Map();
  for (const positions of view.layers) {
    for (const position of positions) depths.set(position, (depths.get(position) ?? 0) + 1);
  }
  return depths;
}

const DEPTHS = [
  ["", "loaded, not recomputed"],
  ["d1", "computed in up to a quarter of the layers"],
  ["d2", "up to half"],
  ["d3", "up to three quarters"],
  ["d4", "more layers, or a token outside stored chunks"],
];
const ONE_LAYER = [
  ["", "loaded"],
  ["d4", "computed in this layer"],
];

// Fills `root` with the drawing of a view; `view_of` in `gateway/console/comparison.py` says what a view holds.
export function renderBlend(root, view) {
  const layers = view.layers.length;
  const depths = depthsOf(view);
  const tokens = view.parts.reduce((sum, part) => sum + part.tokens.length, 0);
  const cells = [];
  const sections = drawParts(view, cells);
  const legend = el("ul", { class: "legend" });
  const summary = el("p", { class: "quiet", "aria-live": "polite" });
  const timeline = view.timeline.length ? drawTimeline(view) : null;
  const slider = el("input", { type: "range", id: "blend-layer", min: 0, max: layers, value: 0 });

  function show(chosen) {
    const computed = chosen ? new Set(view.layers[chosen - 1]) : null;
    cells.forEach((cell, position) => {
      const css = computed
        ? computed.has(position) ? "d4" : ""
        : position < view.cached ? "" : depthClass(depths.get(position) ?? 0, layers);
      if (cell.className !== css) cell.className = css;
    });
    const kinds = chosen ? ONE_LAYER : DEPTHS;
    legend.replaceChildren(...kinds.map(([css, text]) => el("li", {}, el("span", { class: `key ${css}` }, "Aa"), ` ${text}`)));
    const name = chosen ? `Layer ${chosen - 1}` : "All layers";
    slider.setAttribute("aria-valuetext", name);
    summary.textContent = chosen
      ? `${name}: ${count(computed.size, "token")} of ${tokens.toLocaleString("en")} computed, the KV of the rest was loaded.`
      : `${name}: the stronger the colour, the more layers computed the token again.`;
    timeline?.mark(chosen);
  }

  slider.addEventListener("input", () => show(Number(slider.value)));
  const parts = [];
  if (layers) {
    parts.push(
      el("div", { class: "layer-choice" }, el("label", { for: "blend-layer" }, "Layer"), slider,
        el("span", { class: "quiet" }, `all, then 0 to ${layers - 1}`)),
      summary,
    );
    if (timeline) parts.push(el("h3", {}, "Loading and computing"), timeline.node);
    parts.push(el("h3", {}, "Tokens"), legend);
  } else {
    parts.push(el("p", { class: "quiet" }, "No blend pass ran, so there is nothing to draw."));
  }
  root.replaceChildren(...parts, ...sections);
  if (layers) show(0);
}

function drawParts(view, cells) {
  const depths = depthsOf(view);
  const layers = view.layers.length;
  let position = 0;
  return view.parts.map((part) => {
    const text = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `Tokens of ${part.title}` });
    let deepest = 0;
    for (const token of part.tokens) {
      const depth = depths.get(position) ?? 0;
      const cell = el("span", position < view.cached || !layers ? {} : { title: `token ${position}: ${depth} of ${count(layers, "layer")}` });
      cell.textContent = token;
      deepest += layers > 0 && depth === layers;
      cells.push(cell);
      text.append(cell);
      position += 1;
    }
    const note = `${count(part.tokens.length, "token")}, ${deepest} computed in every layer`;
    return el("section", { class: "part" }, el("h4", {}, part.title, " ", el("span", {}, note)), text);
  });
}

// The time in which nothing is computed: before the first layer, and between layers.
export function waitedMs(timeline) {
  let end = 0;
  return timeline.reduce((sum, layer) => {
    const waited = Math.max(0, layer.compute_start_ms - end);
    end = layer.compute_end_ms;
    return sum + waited;
  }, 0);
}

function drawTimeline(view) {
  const rows = view.timeline;
  const end = Math.max(...rows.flatMap((layer) => Object.values(layer))) || 1;
  const scale = (CHART.width - CHART.left - CHART.right) / end;
  const x = (time) => Math.round((CHART.left + scale * time) * 10) / 10;
  const height = CHART.row * rows.length + CHART.axis;
  const summary =
    `${count(rows.length, "layer")} in ${end.toFixed(0)} ms. For ${waitedMs(rows).toFixed(0)} ms the pass computed ` +
    "nothing and waited for loads or for the engine's other requests.";
  const drawing = svg("svg", { viewBox: `0 0 ${CHART.width} ${height}`, role: "img", "aria-label": summary });
  const mark = svg("rect", { class: "mark", x: 0, width: CHART.width, height: CHART.row, visibility: "hidden" });
  drawing.append(mark);
  const step = tickStep(end);
  for (let time = 0; time <= end; time += step) {
    drawing.append(
      svg("line", { class: "grid", x1: x(time), x2: x(time), y1: 0, y2: height - 18 }),
      svg("text", { x: x(time), y: height - 4, "text-anchor": "middle" }, `${Number(time.toPrecision(6))} ms`),
    );
  }
  rows.forEach((layer, index) => {
    const bar = (kind, verb, from, to, top, tall) =>
      svg("rect", { class: kind, x: x(from), y: CHART.row * index + top, width: Math.max(0.5, scale * (to - from)).toFixed(1), height: tall },
        svg("title", {}, `layer ${index} ${verb} from ${from.toFixed(1)} to ${to.toFixed(1)} ms`));
    const tokens = view.layers[index] ? ` · ${count(view.layers[index].length, "token")}` : "";
    drawing.append(
      svg("text", { x: 0, y: CHART.row * index + 10 }, `layer ${index}${tokens}`),
      bar("load", "loads", layer.load_start_ms, layer.load_end_ms, 1, 4),
      bar("compute", "computes", layer.compute_start_ms, layer.compute_end_ms, 6, 6),
    );
  });
  const node = el("div", {},
    el("ul", { class: "legend" },
      el("li", {}, el("span", { class: "swatch load" }), "loading the layer's KV"),
      el("li", {}, el("span", { class: "swatch compute" }), "computing the layer")),
    el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Timeline by layer" }, drawing),
    el("p", { class: "quiet" }, summary));
  return {
    node,
    mark(chosen) {
      mark.setAttribute("visibility", chosen ? "visible" : "hidden");
      mark.setAttribute("y", CHART.row * (chosen - 1));
    },
  };
}
