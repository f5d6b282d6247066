// Compare: one question answered by full prefill and by a blend, with times, costs and what was lost.

import { countTokens, stream } from "./api.js";
import { count, el, renderBlend, svg } from "./blend.js";
import { Documents } from "./documents.js";

const NAMES = { full: "Full prefill", blend: "Blend" };
const ABOUT = { full: "computes every token of the prompt", blend: "loads the chunks' KV and recomputes a few tokens" };
const ms = (value) => (value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value).toLocaleString("en")} ms`);
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;

export class Compare {
  constructor(root, service, onRefused) {
    this.service = service;
    this.onRefused = onRefused;
    this.documents = new Documents(service.samples.documents, service.max_model_len,
      (texts) => countTokens(texts, this.namespace.value.trim()));
    this.status = el("p", { class: "quiet", role: "status", id: "progress" });
    this.problem = el("div", { role: "alert" });
    this.results = el("div", {});
    this.ask = el("button", { type: "submit", class: "primary" }, "Ask both ways");
    this.stop = el("button", { type: "button", hidden: true, onclick: () => this.abort?.abort() }, "Stop");
    const warning = "This is the small test model, trained on the sample documents alone. It cannot answer questions about other documents. To ask about your own, serve a real model: kintsugi serve --model smollm2-135m.";
    root.replaceChildren(
      ...(service.is_test_model ? [el("p", { class: "notice", id: "test-model" }, warning)] : []),
      el("p", { class: "quiet" }, "One question, answered twice: first by a full prefill, then by a blend of stored chunks. One after the other, so that neither slows the other down."),
      el("form", { onsubmit: (event) => { event.preventDefault(); this.run(); } }, ...this.drawForm()),
      this.problem, this.status, this.results);
  }

  drawForm() {
    const { samples, caller } = this.service;
    this.question = el("textarea", { id: "question", rows: 2 });
    this.question.value = samples.questions[0] ?? "";
    const choice = el("select", { id: "sample-question", onchange: () => { this.question.value = choice.value; } },
      ...samples.questions.map((text) => el("option", { value: text }, text.length > 90 ? `…${text.slice(-88)}` : text)));
    this.namespace = el("input", { type: "text", id: "namespace" });
    const named = caller.namespaces.find((name) => !name.endsWith("*"));
    this.namespace.value = named ?? (caller.namespaces.includes("*") ? "console" : caller.namespaces[0].replace("*", "console"));
    this.most = el("input", { type: "number", id: "max-tokens", min: 1, max: 256 });
    this.most.value = samples.max_tokens;
    return [
      ...(samples.questions.length > 1 ? [el("label", { for: "sample-question" }, "Sample questions"), choice] : []),
      el("label", { for: "question" }, "Question"), this.question,
      this.documents.node,
      el("div", { class: "fields" },
        ...this.drawOptions(),
        el("div", {}, el("label", { for: "max-tokens" }, "Longest answer, in tokens"), this.most),
        el("div", {}, el("label", { for: "namespace" }, "Namespace"), this.namespace)),
      this.gate,
      el("div", { class: "row" }, this.ask, this.stop),
    ];
  }

  drawOptions() {
    const { selectors, default: chosen, blending } = this.service;
    const allowed = (one) => one.ratio_min !== null;
    this.selector = el("select", { id: "selector", onchange: () => this.markGate() },
      el("option", { value: "" }, chosen.selector ? `the service's choice: ${chosen.selector}` : "the service's choice"),
      ...selectors.map((one) => el("option", { value: one.name }, `${one.name}: ${one.about}${allowed(one) ? "" : " (gate: not allowed)"}`)));
    this.ratio = el("input", { type: "range", id: "ratio", min: 0, max: 100, step: 1, oninput: () => { this.ownRatio = true; this.markGate(); } });
    this.ratio.value = Math.round(100 * (chosen.ratio ?? 0.15));
    this.ratioText = el("output", { for: "ratio" });
    this.gate = el("p", { class: "problem gentle", role: "status" });
    this.closed = blending !== "on" ? blending : "";
    this.markGate();
    return [
      el("div", {}, el("label", { for: "selector" }, "Which tokens to recompute"), this.selector),
      el("div", {}, el("label", { for: "ratio" }, "Share of chunk tokens to recompute: ", this.ratioText), this.ratio),
    ];
  }

  // Says whether the gate allows the chosen selector and ratio, as the engine last reported it. The engine decides.
  markGate() {
    const { selectors, default: chosen } = this.service;
    const name = this.selector.value || chosen.selector;
    const ratio = Number(this.ratio.value) / 100;
    this.ratioText.textContent = this.ownRatio || !this.service.default.ratio ? percent(ratio) : `${percent(ratio)} (the service's choice)`;
    const limit = selectors.find((one) => one.name === name)?.ratio_min;
    let said = "";
    if (this.closed) said = `The gate is closed, so the service answers by full prefill: ${this.closed}`;
    else if (limit === null) said = `The gate does not allow ${name}: it did not pass calibration at any share. The service will answer by full prefill.`;
    else if (limit !== undefined && ratio < limit) said = `The gate allows ${name} from ${percent(limit)} on. Below it the service answers by full prefill or refuses.`;
    this.gate.textContent = said;
    this.gate.hidden = !said;
  }

  say(text) {
    this.status.textContent = text;
  }

  fail(message) {
    this.problem.replaceChildren(el("p", { class: "problem" }, message));
  }

  async run() {
    this.problem.replaceChildren();
    if (!this.question.value.trim()) {
      this.fail("Write a question first.");
      this.question.focus();
      return;
    }
    if (!this.documents.items.some((one) => one.text.trim())) {
      this.fail("There are no documents to ask about. Use the samples, or drop a text file, then ask again.");
      return;
    }
    this.abort = new AbortController();
    this.ask.disabled = true;
    this.stop.hidden = false;
    this.ways = { full: this.drawWay("full"), blend: this.drawWay("blend") };
    this.verdict = el("div", {});
    this.blend = el("div", {});
    this.results.replaceChildren(el("div", { class: "ways" }, this.ways.full.node, this.ways.blend.node), this.verdict, this.blend);
    const body = {
      question: this.question.value,
      documents: this.documents.items.filter((one) => one.text.trim()).map(({ title, text }) => ({ title, text })),
      namespace: this.namespace.value.trim(),
      max_tokens: Number(this.most.value),
      selector: this.selector.value || null,
      ratio: this.ownRatio || this.selector.value ? Number(this.ratio.value) / 100 : null,
    };
    let complete = false;
    try {
      for await (const message of stream("compare", body, this.abort.signal)) {
        this.take(message);
        complete ||= message.event === "done" || message.event === "failed";
      }
      if (!complete) this.fail("The connection ended before the answer was complete. What arrived is shown; ask again.");
    } catch (error) {
      if (error.name === "AbortError") this.say("Stopped. The engine has ended this work.");
      else if (error.status !== undefined) { this.fail(error.message); this.onRefused(error); }
      else this.fail("The connection broke off. What arrived is shown; ask again.");
    } finally {
      this.ask.disabled = false;
      this.stop.hidden = true;
    }
  }

  drawWay(name) {
    const answer = el("div", { class: "answer" });
    const figures = el("dl", { class: "figures" });
    const more = el("dl", { class: "figures small" });
    const note = el("p", { class: "quiet" });
    const node = el("section", { class: `way ${name}`, "aria-label": NAMES[name] },
      el("h2", {}, NAMES[name], " ", el("span", { class: "quiet" }, ABOUT[name])), answer, figures, more, note);
    return { node, answer, figures, more, note, result: null };
  }

  take(message) {
    const way = this.ways[message.way];
    switch (message.event) {
      case "waiting": return this.say("Another comparison is running, in another tab perhaps. Yours begins when it ends, so that the times stay true.");
      case "storing": return this.say(`Storing ${count(message.chunks, "chunk")}…`);
      case "stored": return message.problem ? this.problem.replaceChildren(el("p", { class: "problem gentle" }, message.problem)) : null;
      case "begun": return this.say(`${NAMES[message.way]} of ${count(message.prompt_tokens, "token")}…`);
      case "text": return way.answer.append(message.text);
      case "answered": return this.finish(way, message);
      case "view": return this.drawView(message.view);
      case "scoring": return this.say("Measuring how likely the full prefill's answer is under the blend…");
      case "quality": return this.drawQuality(message);
      case "failed": this.say(""); this.fail(this.sentence(message)); if (message.kind === "Unauthenticated") this.onRefused({ status: 401 }); return;
      case "done": return this.say("Done. Shuffle, edit or remove documents and ask again.");
    }
  }

  sentence({ kind, message }) {
    return kind === "Unauthenticated" ? `${message}. What arrived before is still shown. Enter another token above, then ask again.` : message;
  }

  finish(way, message) {
    way.result = message;
    if (!message.text) way.answer.append(el("span", { class: "quiet" }, "(the answer is empty)"));
    const pairs = (list) => list.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    const cost = message.cost === null ? "not told" : percent(message.cost);
    way.figures.replaceChildren(...pairs([["first token after", ms(message.ttft_ms)], ["prompt computed", cost]]));
    const { accounting } = message;
    const more = [["whole answer after", ms(message.total_ms)]];
    if (accounting.outcome === "blended") {
      more.push(["chunks loaded", `${accounting.chunks_hit} of ${accounting.chunks_hit + accounting.chunks_missed}`],
        ["recomputed", count(accounting.tokens_recomputed, "token")],
        ["how", `${accounting.selector}, ${percent(accounting.ratio)}`],
        ["loaded", `${(accounting.bytes_loaded / 2 ** 20).toFixed(1)} MiB over ${accounting.transport}`]);
    }
    way.more.replaceChildren(...pairs(more));
    if (message.way === "blend" && accounting.outcome !== "blended") {
      way.note.textContent = `Not blended, this is a full prefill: ${accounting.reason ?? accounting.outcome ?? "your token does not allow you to see the reason"}`;
    }
    if (this.ways.full.result && this.ways.blend.result) this.drawVerdict();
  }

  drawVerdict() {
    const [full, blend] = [this.ways.full.result, this.ways.blend.result];
    const factor = full.ttft_ms / blend.ttft_ms;
    const saved = blend.cost === null ? "" : ` It computed ${percent(blend.cost)} of the prompt.`;
    const text = blend.accounting.outcome !== "blended" && blend.accounting.outcome !== undefined
      ? "Nothing was blended, so the two times are of the same work."
      : factor >= 1.05 ? `The blend's first token came ${factor.toFixed(1)} times sooner.${saved}`
      : `The blend was not sooner here.${saved} With a small model or a short prompt there is little to save.`;
    const rows = [["full", full.ttft_ms], ["blend", blend.ttft_ms]];
    const most = Math.max(full.ttft_ms, blend.ttft_ms);
    const chart = svg("svg", { class: "bars", viewBox: "0 0 640 64", role: "img", "aria-label": `Time to first token: full prefill ${ms(full.ttft_ms)}, blend ${ms(blend.ttft_ms)}` },
      ...rows.flatMap(([name, value], index) => {
        const width = Math.max(2, (370 * value) / most);
        return [
          svg("text", { x: 0, y: 32 * index + 19 }, NAMES[name]),
          svg("rect", { class: name === "full" ? "load" : "compute", x: 130, y: 32 * index + 5, width, height: 20, rx: 3 }),
          svg("text", { class: "value", x: 138 + width, y: 32 * index + 20 }, ms(value)),
        ];
      }));
    this.quality = el("div", {});
    this.verdict.replaceChildren(el("h2", {}, "Speed"), el("p", { class: "verdict" }, text), chart, el("h2", {}, "Quality"), this.quality);
    this.quality.replaceChildren(el("p", { class: "quiet" }, "Being measured…"));
  }

  drawQuality(message) {
    if (message.full === null || message.blend === null) {
      this.quality.replaceChildren(el("p", { class: "quiet" }, "Not measured: the engines did not report how likely the answer's tokens are."));
      return;
    }
    const said = message.same ? "Both ways gave the same answer, token for token." : "The two answers differ.";
    const kept = message.blend / message.full;
    const judged = kept >= 0.95 ? ["good", "Next to nothing was lost."] : kept >= 0.7 ? ["", "Something was lost."] : ["bad", "Much was lost: recompute a larger share."];
    const words = message.tokens.map((one) => {
      const known = one.full !== null && one.blend !== null;
      const share = known ? one.blend / one.full : 1;
      const css = share < 0.5 ? "gone" : share < 0.9 ? "lost" : "";
      return el("span", { class: css, title: known ? `full prefill ${percent(one.full)}, blend ${percent(one.blend)}` : "not measured" }, one.text);
    });
    this.quality.replaceChildren(
      el("p", { class: "verdict" }, `${said} `, el("span", { class: judged[0] }, judged[1])),
      el("p", {}, `How likely each token of the full prefill's answer is, on average: ${percent(message.full)} under the full prefill itself, ${percent(message.blend)} under the blend.`),
      el("p", { class: "likely", "aria-label": "The full prefill's answer, token by token" }, ...words),
      el("ul", { class: "legend likely-legend" },
        el("li", {}, el("span", { class: "key" }, "Aa"), " as likely under the blend"),
        el("li", {}, el("span", { class: "key d2" }, "Aa"), " less likely"),
        el("li", {}, el("span", { class: "key d4" }, "Aa"), " less than half as likely")));
  }

  drawView(view) {
    const drawing = el("div", {});
    renderBlend(drawing, view);
    this.blend.replaceChildren(el("h2", {}, "The blend, layer by layer"), drawing);
  }
}
