// Which view is shown: the address says it, so a reload or a second browser shows the same.

import { post } from "./asking.js";
import { compareView } from "./compare.js";
import { make, tell } from "./parts.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { startView } from "./start.js";

const VIEWS = { runs: runsView, run: runView, compare: compareView, new: startView };
const main = document.getElementById("main"), trouble = document.getElementById("trouble");
let shown = { end() {} };

/** What the address asks for: `#/run/ID/samples?by=tokens`. */
class Route {
  constructor(hash) {
    const [path, given] = hash.replace(/^#\/?/, "").split("?", 2);
    this.parts = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
    this.given = new URLSearchParams(given || "");
  }

  /** Write into the address what is shown now, without another entry in the browser's history. */
  put(changes) {
    for (const [name, value] of Object.entries(changes)) {
      this.given.delete(name);
      for (const each of Array.isArray(value) ? value : [value])
        if (each !== null && each !== undefined && each !== "" && each !== false) this.given.append(name, each);
    }
    const path = this.parts.map(encodeURIComponent).join("/"), given = String(this.given);
    history.replaceState(null, "", `#/${path}${given ? "?" + given : ""}`);
  }
}

function show() {
  const route = new Route(location.hash), view = VIEWS[route.parts[0]] ? route.parts[0] : "runs";
  shown.end();
  tellTrouble("");
  main.replaceChildren();
  for (const name of ["runs", "compare", "new"])
    document.getElementById("to-" + name).setAttribute("aria-current", name === view ? "page" : "false");
  const title = make("h1", { tabindex: "-1" });
  main.append(title);
  const entitle = (text) => { tell(title, text); document.title = `${text} – board`; };
  shown = VIEWS[view](main, route, { entitle, trouble: tellTrouble, title });
  if (moved) title.focus({ preventScroll: true });
  scrollTo(0, 0);
}

function tellTrouble(sentence) {
  trouble.hidden = !sentence;
  tell(trouble, sentence);
}

function scheme() {
  const choice = document.getElementById("scheme");
  const set = (value) => { document.documentElement.dataset.scheme = value; dispatchEvent(new Event("scheme")); };
  try { choice.value = localStorage.getItem("scheme") || ""; } catch { /* nothing is kept here */ }
  set(choice.value);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set(choice.value));
  choice.addEventListener("change", () => {
    set(choice.value);
    try { localStorage.setItem("scheme", choice.value); } catch { /* nothing is kept here */ }
  });
}

document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

/** The token of the address becomes a cookie that scripts cannot read, and leaves the address. */
async function enter() {
  const given = /^#token=(.+)$/.exec(location.hash);
  if (!given) return;
  history.replaceState(null, "", "#/runs");
  try { await post("session", { token: decodeURIComponent(given[1]) }); } catch (error) { return error.message; }
}

/** Also for an address with a token that is opened where the page is open already: that alone loads nothing anew. */
async function go() {
  const refused = await enter();
  show();
  if (refused) tellTrouble(refused);
}

let moved = false;
addEventListener("hashchange", () => { moved = true; go(); });
scheme();
go();
