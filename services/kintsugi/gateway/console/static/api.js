// Asks the gateway. The token is kept for this tab alone, until it is closed.

const KEY = "kintsugi-token";
const BASE = new URL("api/", import.meta.url);

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

function headers(more) {
  return token.get() ? { ...more, authorization: `Bearer ${token.get()}` } : more;
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers: headers(options.headers ?? {}), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The gateway does not answer. Check that it is running, then try again.");
  }
  if (response.ok) return response;
  let message = `The gateway answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not one of the gateway's own answers: a proxy's, perhaps.
  }
  throw new Refused(response.status, message);
}

export async function get(path) {
  return (await send(path, {})).json();
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// The length of each text, in tokens of the served model.
export async function countTokens(texts, namespace) {
  return (await (await post("count", { texts, namespace })).json()).tokens;
}

// Yields the JSON objects of a stream, one per line. Leaving the loop ends the work in the engine.
export async function* stream(path, body, signal) {
  const response = await post(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) yield JSON.parse(line);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
