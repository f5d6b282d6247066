// Live: the service as it is now. Rows are made once and then only their texts change, so that a page that
// stays open for days does not grow.

import { get } from "./api.js";
import { count, el, svg } from "./blend.js";

export const PERIOD_MS = 2000;
const POINTS = 60;
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(size) {
  let unit = 0;
  while (size >= 1024 && unit < SIZES.length - 1) { size /= 1024; unit += 1; }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toPrecision(3)} ${SIZES[unit]}`;
}

// A table whose rows are kept by name.
class Rows {
  constructor(caption, headings) {
    this.rows = new Map();
    this.body = el("tbody", {});
    this.node = el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
      el("table", {}, el("caption", {}, caption),
        el("thead", {}, el("tr", {}, ...headings.map((text) => el("th", { scope: "col" }, text)))), this.body));
    this.width = headings.length;
  }

  // `entries`: [name, cells] with one text for each heading.
  show(entries) {
    const seen = new Set();
    for (const [name, cells] of entries) {
      seen.add(name);
      let row = this.rows.get(name);
      if (!row) {
        row = el("tr", {}, el("th", { scope: "row" }), ...Array.from({ length: this.width - 1 }, () => el("td", {})));
        this.rows.set(name, row);
        this.body.append(row);
      }
      cells.forEach((text, index) => { if (row.children[index].textContent !== text) row.children[index].textContent = text; });
    }
    for (const [name, row] of this.rows) {
      if (!seen.has(name)) { row.remove(); this.rows.delete(name); }
    }
    this.node.hidden = !seen.size;
  }
}

export class Live {
  constructor(root, onRefused) {
    this.onRefused = onRefused;
    this.status = el("p", { class: "quiet" });
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.figures = new Map();
    this.list = el("dl", { class: "figures" });
    this.shards = new Rows("Shards", ["Shard", "State", "Chunks", "Hit rate", "Hits", "Misses", "Quarantined"]);
    this.tiers = new Rows("Tiers", ["Tier", "Used", "Capacity", "Filled", "Chunks", "Evictions", "Write queue", "State"]);
    this.tenants = new Rows("Tenants", ["Namespace", "Running", "Waiting", "Requests", "Tokens", "Refused"]);
    this.noTenants = el("p", { class: "quiet" }, "No namespace has limits, so no use is counted by tenant. Give some in the tokens file to see theirs.");
    this.rates = [];
    this.path = svg("polyline", { class: "line", points: "" });
    this.chart = svg("svg", { viewBox: "0 0 640 90", role: "img", "aria-label": "Share of chunk tokens that were loaded, over the last two minutes" },
      svg("line", { class: "grid", x1: 0, x2: 640, y1: 10, y2: 10 }), svg("line", { class: "grid", x1: 0, x2: 640, y1: 80, y2: 80 }),
      svg("text", { x: 0, y: 22 }, "100 %"), svg("text", { x: 0, y: 76 }, "0 %"), this.path);
    root.replaceChildren(this.status, this.problem, this.list,
      el("h2", {}, "Chunk tokens found in the store"), this.chart,
      el("h2", {}, "Store"), this.shards.node, this.tiers.node, el("h2", {}, "Tenants"), this.noTenants, this.tenants.node);
  }

  start() {
    this.running = true;
    this.tick();
  }

  stop() {
    this.running = false;
    clearTimeout(this.timer);
  }

  async tick() {
    if (!this.running) return;
    if (!document.hidden) {
      try {
        this.show(await get("live"));
        this.problem.hidden = true;
      } catch (error) {
        this.problem.textContent = error.message;
        this.problem.hidden = false;
        if (error.status === 401 || error.status === 403) {
          this.stop();
          this.onRefused(error);
          return;
        }
      }
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.tick(), PERIOD_MS);
  }

  figure(name, text) {
    let value = this.figures.get(name);
    if (!value) {
      value = el("dd", {});
      this.figures.set(name, value);
      this.list.append(el("div", {}, el("dt", {}, name), value));
    }
    if (value.textContent !== text) value.textContent = text;
  }

  show({ at_unix_s: now, store, gateway, tenants }) {
    this.status.textContent = `As of ${new Date(1000 * now).toLocaleTimeString("en-GB")}, updated every ${PERIOD_MS / 1000} seconds while this view is open.`;
    const number = (value) => Math.round(value).toLocaleString("en");
    const looked = gateway.tokens_hit + gateway.tokens_missed;
    this.figure("answers under way", number(gateway.answers_under_way));
    this.figure("answers", number(gateway.answers));
    this.figure("chunk tokens loaded", looked ? `${(100 * gateway.tokens_hit / looked).toFixed(0)} %` : "none yet");
    this.figure("chunks waiting to be stored", number(gateway.fill_queue_chunks));
    this.figure("known texts", number(gateway.known_chunks));
    if (gateway.tokens_discovered) this.figure("tokens hit in discovered chunks", number(gateway.tokens_discovered));
    if (store.problem) {
      this.figure("store", "no answer");
      this.problem.textContent = `The store does not answer: ${store.problem}. Prompts are prefilled in full until it does.`;
      this.problem.hidden = false;
    } else {
      this.figure("chunks stored", number(store.chunks));
      this.figure("store filled", store.bytes_capacity ? `${(100 * store.bytes_used / store.bytes_capacity).toFixed(1)} %` : "–");
    }
    this.draw(looked ? gateway.tokens_hit / looked : null);
    this.shards.show(store.shards.map((one) => [one.address, one.answers
      ? [one.address, one.draining ? "draining" : "serving", number(one.chunks), one.hits + one.misses ? `${(100 * one.hits / (one.hits + one.misses)).toFixed(0)} %` : "–", number(one.hits), number(one.misses), number(one.quarantined)]
      : [one.address, "does not answer", "–", "–", "–", "–", "–"]]));
    this.tiers.show(store.shards.flatMap((one) => one.tiers.map((tier) => [`${one.address}/${tier.name}`,
      [`${one.address} ${tier.name}`, bytes(tier.bytes_used), bytes(tier.bytes_capacity), `${(100 * tier.bytes_used / (tier.bytes_capacity || 1)).toFixed(1)} %`,
        number(tier.chunks), number(tier.evictions), bytes(tier.queue_bytes), tier.failure || "fine"]])));
    this.noTenants.hidden = tenants.length > 0;
    this.tenants.show(tenants.map((one) => [one.name, [one.name, number(one.in_flight), number(one.queued), number(one.requests), number(one.tokens), number(one.refused)]]));
  }

  draw(rate) {
    this.rates.push(rate);
    if (this.rates.length > POINTS) this.rates.shift();
    const points = this.rates.map((value, index) => (value === null ? null : `${(640 * index) / (POINTS - 1)},${80 - 70 * value}`));
    this.path.setAttribute("points", points.filter((point) => point).join(" "));
  }
}
