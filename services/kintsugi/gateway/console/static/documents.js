// The documents of a question: added, dropped in, edited, shuffled and removed.

import { count, el } from "./blend.js";

export const FILE_BYTES_MAX = 1 << 20;
export const DOCUMENTS_MAX = 128;
const PIECE_CHARS = 2400;
const COUNT_AFTER_MS = 400;

// Cuts a text at paragraphs, or else at lines or words, into pieces that a model reads as chunks.
export function cut(text, most = PIECE_CHARS) {
  const pieces = [];
  let rest = text.trim();
  while (rest.length > most) {
    const head = rest.slice(0, most);
    const at = ["\n\n", "\n", " "].map((mark) => head.lastIndexOf(mark)).find((found) => found > most / 3) ?? most;
    pieces.push(rest.slice(0, at).trim());
    rest = rest.slice(at).trim();
  }
  if (rest) pieces.push(rest);
  return pieces.filter((piece) => piece);
}

// The documents in a file. Throws an Error whose message says what to do.
export async function readFile(file) {
  if (file.size > FILE_BYTES_MAX) {
    const size = `${(file.size / 2 ** 20).toFixed(0)} MiB`;
    throw new Error(`${file.name} has ${size}; a document here has at most 1 MiB. Cut out the part that you ask about, or use kintsugi precompute for a whole corpus.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not UTF-8 text. Save it as plain text first.`);
  }
  const pieces = cut(text);
  if (!pieces.length) throw new Error(`${file.name} holds no text. Choose another file.`);
  return pieces.map((piece, index) => ({ title: pieces.length > 1 ? `${file.name}, part ${index + 1}` : file.name, text: piece }));
}

export class Documents {
  // `tokensMax`: how many tokens the model reads. `countTokens` returns a promise of the texts' lengths.
  constructor(samples, tokensMax, countTokens) {
    this.samples = samples;
    this.tokensMax = tokensMax;
    this.countTokens = countTokens;
    this.items = samples.map((one) => ({ ...one }));
    this.list = el("ol", { class: "documents" });
    this.said = el("p", { class: "quiet", role: "status" });
    this.length = el("p", { class: "quiet", id: "documents-length" });
    this.problems = el("div", { role: "alert" });
    const files = el("input", { type: "file", id: "files", multiple: true, accept: "text/*,.md,.txt,.rst,.csv,.json",
      onchange: () => this.addFiles([...files.files]).then(() => { files.value = ""; }) });
    const button = (text, act) => el("button", { type: "button", onclick: act }, text);
    this.node = el("div", { class: "drop" },
      el("label", { for: "files" }, "Documents: drop text files here, or choose some"), files, this.problems, this.list, this.length, this.said,
      el("div", { class: "row" },
        button("Shuffle", () => this.shuffle()),
        button("Add a document", () => this.add({ title: "My document", text: "" }, true)),
        button("Use the samples", () => this.replace(this.samples.map((one) => ({ ...one })), "The samples are back.")),
        button("Remove all", () => this.replace([], "All documents were removed."))));
    this.node.addEventListener("dragover", (event) => { event.preventDefault(); this.node.classList.add("over"); });
    this.node.addEventListener("dragleave", () => this.node.classList.remove("over"));
    this.node.addEventListener("drop", (event) => {
      event.preventDefault();
      this.node.classList.remove("over");
      this.addFiles([...event.dataTransfer.files]);
    });
    this.draw();
  }

  async addFiles(files) {
    const problems = [];
    for (const file of files) {
      try {
        const found = await readFile(file);
        if (this.items.length + found.length > DOCUMENTS_MAX) throw new Error(`${file.name} makes more than ${DOCUMENTS_MAX} documents. Remove some first.`);
        this.items.push(...found);
      } catch (error) {
        problems.push(el("p", { class: "problem" }, error.message));
      }
    }
    this.problems.replaceChildren(...problems);
    this.draw();
  }

  add(document, open) {
    this.items.push(document);
    this.draw();
    if (open) {
      this.list.lastElementChild.querySelector("details").open = true;
      this.list.lastElementChild.querySelector("textarea").focus();
    }
  }

  replace(items, said) {
    this.items = items;
    this.problems.replaceChildren();
    this.draw();
    this.said.textContent = said;
  }

  shuffle() {
    for (let last = this.items.length - 1; last > 0; last -= 1) {
      const other = Math.floor(Math.random() * (last + 1));
      [this.items[last], this.items[other]] = [this.items[other], this.items[last]];
    }
    this.draw();
    this.said.textContent = "Shuffled. The stored chunks serve in any order: ask again.";
  }

  draw() {
    this.sizes = this.items.map(() => el("span", {}));
    this.list.replaceChildren(...this.items.map((item, index) => this.drawItem(item, index)));
    this.said.textContent = "";
    this.countSoon(0);
  }

  // Only the service has the model's tokenizer. Until it has answered, a length is not known.
  countSoon(afterMs) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.count(), afterMs);
    this.tellLengths();
  }

  async count() {
    const items = this.items.filter((one) => one.counted !== one.text);
    const texts = items.map((one) => one.text);
    if (!texts.length) return;
    let tokens = [];
    try {
      tokens = await this.countTokens(texts);
    } catch {
      // A comparison says what is wrong; here, lengths stay unknown.
    }
    items.forEach((one, index) => { one.counted = texts[index]; one.tokens = tokens[index]; });
    this.tellLengths();
  }

  tellLengths() {
    const known = this.items.filter((one) => one.counted === one.text && one.tokens !== undefined);
    this.items.forEach((one, index) => { this.sizes[index].textContent = known.includes(one) ? ` · ${count(one.tokens, "token")}` : ` · ${count(one.text.length, "character")}`; });
    const tokens = known.reduce((sum, one) => sum + one.tokens, 0);
    const all = known.length === this.items.length ? `, ${count(tokens, "token")} of the ${this.tokensMax.toLocaleString("en")} that the model reads` : "";
    const tooMany = tokens >= this.tokensMax ? " Remove some." : "";
    this.length.textContent = this.items.length
      ? `${count(this.items.length, "document")}${all}.${tooMany}`
      : "No documents yet. A blend needs some: use the samples, or drop text files.";
  }

  drawItem(item, index) {
    const title = el("input", { type: "text", id: `title-${index}`, maxlength: 200, oninput: () => { item.title = title.value; } });
    title.value = item.title;
    const text = el("textarea", { id: `text-${index}`, rows: 8, oninput: () => { item.text = text.value; this.countSoon(COUNT_AFTER_MS); } });
    text.value = item.text;
    const move = (by) => { this.items.splice(index, 1); this.items.splice(index + by, 0, item); this.draw(); };
    return el("li", {},
      el("details", {},
        el("summary", {}, `${index + 1}. ${item.title}`, this.sizes[index]),
        el("label", { for: `title-${index}` }, "Title"), title,
        el("label", { for: `text-${index}` }, "Text"), text,
        el("div", { class: "row" },
          el("button", { type: "button", disabled: index === 0, onclick: () => move(-1) }, "Move up"),
          el("button", { type: "button", disabled: index === this.items.length - 1, onclick: () => move(1) }, "Move down"),
          el("button", { type: "button", "aria-label": `Remove ${item.title}`, onclick: () => { this.items.splice(index, 1); this.draw(); } }, "Remove"))));
  }
}
