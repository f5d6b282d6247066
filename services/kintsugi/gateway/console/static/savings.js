// What Kintsugi would have saved on a log of requests. Pure: it runs in the page, and the log never leaves it.
//
// A log has one JSON object per line: an OpenAI request (`messages` or `prompt`, bare or under `request` or
// `body`), or `{"chunks": [...], "question": "..."}`. Texts are cut into passages: chunks as they are, other texts
// at blank lines. A passage that an earlier request had counts as stored. Tokens are estimated as a quarter of
// the characters.

export const LOG_BYTES_MAX = 64 << 20;
export const BROKEN_NAMED_MAX = 10;
export const PASSAGES_MAX = 500_000;
const PASSAGE_CHARS_MIN = 128;
const CHARS_PER_TOKEN = 4;

const textsOf = (content) => {
  if (typeof content === "string") return [content];
  if (Array.isArray(content)) return content.flatMap((part) => textsOf(part?.text ?? (typeof part === "string" ? part : null)));
  return [];
};

// The passages of one request, in order. Throws an Error that says what is wrong with it.
export function passagesOf(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("is no JSON object");
  const request = value.request ?? value.body ?? value;
  const chunks = request.chunks ?? request.segments ?? request.documents ?? [];
  if (!Array.isArray(chunks)) throw new Error("has chunks that are not a list");
  const marked = chunks.flatMap((chunk) => textsOf(typeof chunk === "string" ? chunk : chunk?.text ?? chunk?.content));
  const messages = Array.isArray(request.messages) ? request.messages.flatMap((message) => textsOf(message?.content)) : [];
  const free = [...messages, ...textsOf(request.prompt), ...textsOf(request.question)];
  const passages = [...marked, ...free.flatMap((text) => text.split(/\n\s*\n/))].map((text) => text.trim()).filter((text) => text);
  if (!passages.length) throw new Error("has no messages, prompt or chunks");
  return passages;
}

// A short name for a text: two 32-bit FNV-1a hashes.
function nameOf(text) {
  let first = 0x811c9dc5;
  let second = 0x01234567;
  for (let index = 0; index < text.length; index += 1) {
    const code = text.charCodeAt(index);
    first = Math.imul(first ^ code, 0x01000193);
    second = Math.imul(second ^ code, 0x5bd1e995) ^ (second >>> 15);
  }
  return `${(first >>> 0).toString(36)}.${(second >>> 0).toString(36)}.${text.length}`;
}

export class Savings {
  // `ratio`: the share of loaded tokens that a blend recomputes.
  constructor(ratio = 0.15) {
    this.ratio = ratio;
    this.lines = 0;
    this.requests = 0;
    this.tokens = 0;
    this.prefix = 0;
    this.loaded = 0;
    this.broken = 0;
    this.named = [];
    this.full = false;
    this.seen = new Set();
    this.prefixes = new Set();
  }

  addLine(line) {
    this.lines += 1;
    if (!line.trim()) return;
    try {
      let value;
      try {
        value = JSON.parse(line);
      } catch {
        throw new Error("is no JSON");
      }
      this.add(passagesOf(value));
    } catch (error) {
      this.broken += 1;
      if (this.named.length < BROKEN_NAMED_MAX) this.named.push({ line: this.lines, why: error.message });
    }
  }

  add(passages) {
    this.requests += 1;
    let chain = "";
    let inPrefix = true;
    for (const passage of passages) {
      const name = nameOf(passage);
      const tokens = Math.ceil(passage.length / CHARS_PER_TOKEN);
      chain = nameOf(chain + name);
      this.tokens += tokens;
      inPrefix &&= this.prefixes.has(chain);
      if (inPrefix) this.prefix += tokens;
      else if (passage.length >= PASSAGE_CHARS_MIN && this.seen.has(name)) this.loaded += tokens;
      if (this.seen.size < PASSAGES_MAX) {
        this.seen.add(name);
        this.prefixes.add(chain);
      } else this.full = true;
    }
  }

  get result() {
    const share = (tokens) => (this.tokens ? tokens / this.tokens : 0);
    const saved = this.loaded * (1 - this.ratio);
    return {
      lines: this.lines, requests: this.requests, broken: this.broken, named: this.named, full: this.full,
      tokens: this.tokens, prefix: share(this.prefix), loaded: share(this.loaded), saved: share(saved),
      left: 1 - share(this.prefix) - share(saved),
    };
  }
}

// Reads a Blob piece by piece and leaves the page responsive. `onProgress` gets a share from 0 to 1.
export async function readLog(blob, savings, onProgress = () => {}) {
  if (blob.size > LOG_BYTES_MAX) {
    throw new Error(`${blob.name ?? "The log"} has ${(blob.size / 2 ** 20).toFixed(0)} MiB; at most ${LOG_BYTES_MAX >> 20} MiB are read here. Take its last part: tail -c 60M FILE > part.jsonl`);
  }
  const reader = blob.stream().pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let read = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    read += value.length;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) savings.addLine(line);
    onProgress(Math.min(1, read / blob.size));
    await new Promise((resolve) => setTimeout(resolve));
  }
  if (rest) savings.addLine(rest);
  return savings.result;
}
