// Your log: what Kintsugi would have saved on requests that were sent before.

import { count, el, svg } from "./blend.js";
import { readLog, Savings } from "./savings.js";

const percent = (share) => `${(100 * share).toFixed(0)} %`;
const EXAMPLE = '{"messages": [{"role": "user", "content": "…"}]}';

export class Log {
  constructor(root) {
    const file = el("input", { type: "file", id: "log-file", accept: ".jsonl,.json,.log,.txt,text/*", onchange: () => { this.file = file.files[0]; this.read(); } });
    this.text = el("textarea", { id: "log-text", rows: 6, placeholder: EXAMPLE, spellcheck: "false", oninput: () => { this.file = null; } });
    this.ratio = el("input", { type: "number", id: "log-ratio", min: 0, max: 100, step: 1 });
    this.ratio.value = 15;
    this.progress = el("progress", { max: 1, value: 0, hidden: true, "aria-label": "Reading the log" });
    this.said = el("div", { role: "status" });
    this.problem = el("div", { role: "alert" });
    root.replaceChildren(
      el("p", {}, "Which share of your past prompts could have been loaded from the store? The log is read in this page and is not sent anywhere."),
      el("p", { class: "quiet" }, "One JSON request per line: OpenAI chat or text completions as your clients sent them, or objects with chunks and a question."),
      el("label", { for: "log-file" }, "A log file of at most 64 MiB"), file,
      el("label", { for: "log-text" }, "Or paste some lines"), this.text,
      el("div", { class: "fields" }, el("div", {}, el("label", { for: "log-ratio" }, "Share of loaded tokens that a blend recomputes, in percent"), this.ratio)),
      el("p", {}, el("button", { type: "button", class: "primary", onclick: () => this.read() }, "Work it out")),
      this.progress, this.problem, this.said);
  }

  // Reads what was given last: the file, or the pasted lines.
  async read() {
    const blob = this.file ?? new Blob([this.text.value]);
    this.problem.replaceChildren();
    this.said.replaceChildren();
    if (!blob.size) {
      this.fail("There are no lines to read. Choose a file or paste some first.");
      return;
    }
    this.progress.hidden = false;
    try {
      const savings = new Savings(Math.min(100, Math.max(0, Number(this.ratio.value) || 0)) / 100);
      this.show(await readLog(blob, savings, (share) => { this.progress.value = share; }));
    } catch (error) {
      this.fail(error.message);
    } finally {
      this.progress.hidden = true;
    }
  }

  fail(message) {
    this.problem.replaceChildren(el("p", { class: "problem" }, message));
  }

  show(found) {
    if (found.broken) {
      const named = found.named.map(({ line, why }) => `line ${line} ${why}`).join("; ");
      const rest = found.broken > found.named.length ? `; and ${found.broken - found.named.length} more` : "";
      this.fail(`${count(found.broken, "line")} of ${found.lines.toLocaleString("en")} could not be read and ${found.broken === 1 ? "was" : "were"} left out: ${named}${rest}.`);
    }
    if (!found.requests) {
      this.said.replaceChildren(el("p", {}, "No request was found. A line looks like this: ", el("code", {}, EXAMPLE)));
      return;
    }
    const parts = [["prefix caching alone saves", found.prefix, "load"], ["Kintsugi saves on top", found.saved, "compute"], ["is computed", found.left, "meter-back"]];
    let x = 0;
    const bar = svg("svg", { viewBox: "0 0 640 34", role: "img", "aria-label": parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ") },
      ...parts.map(([, share, css]) => {
        const part = svg("rect", { class: css, x, y: 2, width: Math.max(0, 640 * share), height: 30 });
        x += 640 * share;
        return part;
      }));
    this.said.replaceChildren(
      el("h2", {}, `Kintsugi would have saved ${percent(found.saved)} of the prefill work`),
      bar,
      el("dl", { class: "figures" }, ...parts.map(([name, share]) => el("div", {}, el("dt", {}, name), el("dd", {}, percent(share))))),
      el("p", {}, `${this.file ? `${this.file.name}: ` : ""}${count(found.requests, "request")}, about ${count(found.tokens, "prompt token")}. ${percent(found.loaded)} of them stand in passages that an earlier request had at another place; a blend loads these and recomputes ${this.ratio.value} % of them.`),
      el("p", { class: "quiet" }, "An estimate: four characters count as a token, passages end at blank lines, and nothing is evicted from the store.",
        found.full ? " The log has more passages than are remembered here, so the true share is higher." : ""));
  }
}
