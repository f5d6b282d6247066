// Starts the console: asks what the service is, asks for a token where one is needed, and switches views.

import { get, token } from "./api.js";
import { el } from "./blend.js";
import { Compare } from "./compare.js";
import { Live } from "./live.js";
import { Log } from "./log.js";

const find = (id) => document.getElementById(id);
const TABS = ["compare", "live", "log"];
const views = {};

// Asks for a token. `why` says why: none was given, or the last one was refused.
function askToken(why) {
  const field = el("input", { type: "password", id: "token", autocomplete: "off" });
  const form = el("form", { class: "notice", onsubmit: (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    find("notice").replaceChildren();
    start();
  } }, el("p", {}, why), el("label", { for: "token" }, "Token"), field, el("p", {}, el("button", { type: "submit", class: "primary" }, "Use this token")));
  find("notice").replaceChildren(form);
}

function onRefused(error) {
  if (error.status !== 401) return;
  askToken(token.get() ? "The gateway no longer accepts your token. Enter another one; the page keeps its content." : "This gateway needs a token with the verb generate. To see which tokens were recomputed, the token also needs the verb list.");
}

function select(name, focus) {
  for (const one of TABS) {
    const isChosen = one === name;
    const tab = find(`tab-${one}`);
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    find(one).hidden = !isChosen;
    if (isChosen && focus) tab.focus();
  }
  if (name === "live") views.live?.start();
  else views.live?.stop();
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
}

function describe(service) {
  const { state, detail } = service.progress;
  const blending = `blending is ${state === "off" ? "on, and not tested" : state}`;
  find("service").textContent = `${service.model} · reads ${service.max_model_len.toLocaleString("en")} tokens · ${blending}`;
  find("service").title = detail;
}

async function start() {
  let service;
  try {
    service = await get("service");
  } catch (error) {
    find("service").textContent = "Not connected.";
    if (error.status === 401) onRefused(error);
    else find("notice").replaceChildren(el("div", { class: "problem" }, el("p", {}, error.message), el("p", {}, el("button", { type: "button", onclick: () => { find("notice").replaceChildren(); start(); } }, "Try again"))));
    return;
  }
  describe(service);
  if (!views.compare) views.compare = new Compare(find("compare"), service, onRefused);
  if (!views.live) views.live = new Live(find("live"), onRefused);
  const chosen = TABS.find((name) => find(`tab-${name}`).getAttribute("aria-selected") === "true");
  select(chosen);
}

for (const [index, name] of TABS.entries()) {
  const tab = find(`tab-${name}`);
  tab.addEventListener("click", () => select(name));
  tab.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = by ? (index + by + TABS.length) % TABS.length : { Home: 0, End: TABS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(TABS[to], true);
  });
}
views.log = new Log(find("log"));
if (TABS.includes(location.hash.slice(1))) select(location.hash.slice(1));
start();
