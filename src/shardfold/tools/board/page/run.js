// One run: curves, memory and traffic, samples, ranks and logs, checkpoints, settings; and what may be done with it.

import { begun, get, isNone, ofRun, post, query, repeat } from "./asking.js";
import { Chart, Curves } from "./chart.js";
import { ago, ask, button, bytes, copied, count, duration, empty, heldOut, isOver, link, make, number, say, setState, stateBadge, table, tell,
  words } from "./parts.js";
import { runAddress } from "./runs.js";
import { MOST_KEYS, chartControls, samplesOf, shownKeys, tierRows, unitOf, view } from "./shared.js";

const EVERY = 1; // seconds
const MOST_LOG = 400_000; // characters that are shown, the last ones
const TABS = { curves: "Curves", memory: "Memory", samples: "Samples", ranks: "Ranks and logs", checkpoints: "Checkpoints",
  settings: "Settings" };
const TOGETHER = { held_out_loss: "loss", held_out_bits_per_byte: "bits_per_byte" };

export function runView(main, route, { entitle, trouble, title }) {
  const id = route.parts[1] || "", tab = TABS[route.parts[2]] ? route.parts[2] : "curves";
  entitle(id);
  const badge = stateBadge("unknown"), why = make("p", { class: "why" }), facts = make("dl", { class: "facts" });
  const acts = make("div", { class: "acts" }), refused = make("p", { class: "refused", role: "alert", hidden: true });
  const tabs = make("nav", { class: "tabs", "aria-label": "Parts of the run" }, Object.entries(TABS).map(([key, text]) =>
    link(runAddress(id, key), text, key === tab ? { "aria-current": "page" } : {})));
  const body = make("div", { class: "body" });
  main.append(make("div", { class: "over" }, badge, why), facts, acts, refused, tabs, body);
  title.before(make("p", { class: "path" }, link("#/runs", "Runs")));
  const part = { curves, memory, samples, ranks, checkpoints, settings }[tab](body, id, route, () => poll.once());
  const act = actions(id, acts, refused, () => poll.once());
  let before = null;
  const whole = (is) => { for (const each of [badge, why, facts, acts, tabs, body]) each.hidden = !is; };
  const poll = repeat(async (signal) => {
    let run;
    try { run = await get(ofRun(id), {}, signal); } catch (error) {
      if (isNone(error)) { entitle("No run"); whole(false); }
      throw error;
    }
    whole(true);
    entitle(run.name || id);
    if (before !== null && before !== run.state) say(`The run is ${run.state}${run.why ? ": " + run.why : ""}`);
    before = run.state;
    setState(badge, run.state);
    tell(why, run.why || "");
    told(facts, run);
    act(run);
    await part(run, signal);
  }, EVERY, trouble);
  return { end: poll.end };
}

function told(facts, run) {
  const over = isOver(run);
  const shown = {
    step: run.steps ? `${number(run.step)} of ${number(run.steps)}` : number(run.step),
    loss: number(run.loss), "mean loss of 32 steps": number(run.loss_mean),
    "held out": run.held_out ? `${heldOut(run.held_out)} at step ${number(run.held_out.step)}` : null,
    "tokens/s": count(run.rate), left: over ? null : duration(run.seconds_left),
    "last word": ago(run.age), ranks: run.ranks ? number(run.ranks) : null, layout: run.layout, recipe: run.recipe, folder: run.folder,
  };
  for (const [name, value] of Object.entries(shown)) {
    let cell = facts.querySelector(`[data-name="${name}"]`);
    if (!cell) {
      cell = make("dd", { "data-name": name });
      facts.append(make("div", {}, make("dt", {}, name), cell));
    }
    cell.parentElement.hidden = value === null || value === undefined || value === "" || value === "–";
    tell(cell, String(value ?? ""));
  }
}

// -- what may be done

function actions(id, place, refused, again) {
  let known = "", now = null;
  const note = make("p", { class: "muted", role: "status" });
  refused.after(note);
  async function done(what, given, meanwhile, then) {
    refused.hidden = true;
    tell(note, meanwhile);
    for (const each of place.querySelectorAll("button")) each.disabled = true;
    try {
      const said = await post(ofRun(id, what), given);
      then(said);
    } catch (error) {
      tell(note, "");
      refused.hidden = false;
      tell(refused, error.message);
    }
    again();
    for (const each of place.querySelectorAll("button")) each.disabled = false;
  }
  const all = {
    stop: ["Stop", "Ends after this step, evaluates and saves", () => done("stop", {}, "It was asked to stop: it ends after its "
      + "step, evaluates and saves.", () => {})],
    "stop-now": ["Stop now", "Ends at once: nothing is evaluated or saved", async () => {
      if (await ask("Stop now?", "The run ends at once. What it did since its last checkpoint is lost.", [], "Stop now"))
        await done("stop-now", {}, "It is ended.", () => {});
    }],
    resume: ["Resume", "The rest in a new folder, on other ranks or another layout", async () => {
      const before = now;
      await ask("Resume", "The rest of the run goes on in a new folder.", [
        { name: "procs", label: "Ranks", value: before.ranks || 1, inputmode: "numeric" },
        { name: "layout", label: "Layout", value: before.layout || "", help: "as ddp, zero1, zero2, zero3, hsdp, infinity" },
        { name: "steps", label: "Steps in all", value: before.steps || "", inputmode: "numeric",
          help: before.steps && before.step >= before.steps ? `all ${number(before.steps)} are done: give more` : null },
        { name: "name", label: "Name of its folder", placeholder: `as ${before.name.split("/").pop()}-rest` },
      ], "Resume", { act: async ({ name: called, ...given }, isOpen) => {
        const changed = Object.entries(given).filter(([name, value]) => name === "procs" || value.trim() !== String(before[name] || ""));
        const said = await post(ofRun(id, "resume"), { settings: Object.fromEntries(changed), name: called.trim() });
        await begun(said.id);
        if (isOpen()) location.hash = runAddress(said.id);
      } });
    }],
    repeat: ["Repeat with a change", "A new run from these settings", () => { location.hash = "#/new?from=" + encodeURIComponent(id); }],
    chat: ["Chat", "Starts a server of the newest checkpoint on this machine", () => done("chat", {}, "A server is started …", (said) => {
      tell(note, "");
      ask("Chat", "A server of the run's weights is up. It goes on when this page and the board end: to end it, end the process "
        + `shardfold serve ${now.folder}`, [], "Close", { no: null, inside: [
        make("p", {}, make("a", { class: "button main", href: safe(said.page), target: "_blank", rel: "noopener" }, "Open the chat"),
          " in another tab"),
        said.key ? copied("Key, for other clients", said.key).element : null] });
    })],
  };
  return (run) => {
    now = run;
    const can = Object.keys(all).filter((each) => (run.can || []).includes(each));
    if (can.join() === known) return;
    known = can.join();
    const latest = run.checkpoints.some((each) => each.is_latest);
    tell(note, !isOver(run) || !can.includes("repeat") ? "" : !can.includes("resume") && !latest
      ? "There is no Resume: the run has no finished checkpoint. --save-every writes them."
      : !can.includes("chat") && latest && !["lm", "face", "reward"].includes(run.recipe)
        ? "There is no Chat: the model has no chat template. shardfold generate goes on with a text." : "");
    const had = place.contains(document.activeElement);
    place.replaceChildren(...can.map((each) => button(all[each][0], all[each][2], { title: all[each][1],
      class: each === "stop-now" ? "danger" : null })));
    if (had) (place.querySelector("button") || place).focus?.();
  };
}

/** An address of the web: nothing that runs as script. */
function safe(address) {
  return /^https?:\/\//.test(address || "") ? address : "about:blank";
}

// -- its parts; each returns what is done with every answer

function curves(body, id, route, again) {
  const held = make("div", { class: "charts" }), shown = view(route);
  const found = new Curves(), charts = new Map(), seen = new Set();
  const zoom = (from = null, to = null) => { Object.assign(shown, { from, to }); route.put({ from, to }); again(); };
  const csv = make("a", { class: "button", download: true, hidden: true }, "CSV");
  body.append(make("div", { class: "tools" }, chartControls(route, shown, (asksAgain) => { if (asksAgain) again(); else redraw(); }), csv), held);
  let keys = [];

  function redraw() {
    for (const [key, chart] of charts) {
      const of = [key, ...keys.filter((each) => TOGETHER[each] === key)];
      const lines = of.map((each, slot) => ({ name: slot ? "held out" : of.length > 1 ? "training" : words(each), slot,
        points: found.of(id, each) })).filter((each, place) => !place || each.points.length);
      chart.set(lines, { axis: found.by, weight: shown.smooth, log: shown.log, zoomed: shown.from !== null });
      if (lines.some((each) => each.points.length)) seen.add(key);
      chart.element.hidden = !seen.has(key) && key !== "loss";
    }
  }

  return async (run, signal) => {
    const all = shownKeys(run.keys).slice(0, MOST_KEYS);
    if (all.join() !== keys.join()) {
      keys = all;
      csv.href = "api/csv?" + query({ id, key: keys });
      csv.hidden = !keys.length;
      for (const key of keys.filter((each) => !(TOGETHER[each] && keys.includes(TOGETHER[each]))))
        if (!charts.has(key)) {
          charts.set(key, new Chart(words(key), { unit: unitOf(key), onZoom: zoom }));
          held.append(charts.get(key).element);
        }
    }
    if (!keys.length) { if (!held.firstChild) held.append(empty("No steps yet.")); return; }
    held.querySelector(":scope > .empty")?.remove();
    if (await found.turn([id], keys, shown, signal)) redraw();
    if (found.share < 1) setTimeout(again);
  };
}

function memory(body) {
  let known = "";
  return async (run) => {
    const now = JSON.stringify([run.memory, run.traffic, run.moved]);
    if (now === known) return;
    known = now;
    const rows = tierRows(run), most = Math.max(...rows.map(([, size]) => size), 1), total = rows.reduce((sum, [, size]) => sum + size, 0);
    const held = rows.map(([title, size]) => [title, make("meter", { max: most, value: size, "aria-label": title }), bytes(size)]);
    if (rows.length > 1) held.push([make("b", {}, "all"), "", bytes(total)]);
    body.replaceChildren(make("h2", {}, "Memory between steps, rank 0"), rows.length
      ? table("Memory", [{ name: "state, tier" }, { name: "share" }, { name: "bytes", number: true }], held)
      : empty("Written when the run ends."), ...sent("Bytes sent in the last step, rank 0", run.traffic), ...sent("Bytes moved between tiers in the last step, rank 0", run.moved));
  };
}

function sent(title, rows) {
  if (!rows.length) return [];
  const columns = Object.keys(rows[0]).map((key) => ({ name: words(key), number: typeof rows[0][key] === "number" }));
  const cells = rows.map((row) => Object.keys(rows[0]).map((key) => Array.isArray(row[key]) ? row[key].join("+")
    : typeof row[key] === "number" ? Math.round(row[key]).toLocaleString("en") : String(row[key] ?? "–")));
  return [make("h2", {}, title), table(title, columns, cells)];
}

function samples(body, id) {
  const section = make("section");
  body.append(section);
  const found = samplesOf(section, [id], () => id);
  return (_run, signal) => found.turn(signal);
}

function ranks(body, id, route) {
  const list = make("div"), log = make("pre", { class: "log", tabindex: "0", "aria-label": "Log", role: "log", "aria-live": "off" });
  const which = make("select", { change: () => { route.put({ rank: which.value }); log.textContent = ""; after = null; fetchLog(); } });
  const follow = make("input", { type: "checkbox", checked: true });
  body.append(make("h2", {}, "Ranks"), list, make("div", { class: "over" }, make("h2", {}, "Log"), make("label", {}, "Of", which),
    make("label", { class: "tick" }, follow, "Follow")), log);
  let after = null, known = null, under = false;

  async function fetchLog(signal) {
    if (under || !which.value) return;
    under = true;
    try {
      const asked = which.value, said = await get(ofRun(id, "log"), { rank: asked, after }, signal);
      if (asked !== which.value) return;
      after = said.after;
      if (said.text) log.append(said.text);
      if (log.textContent.length > MOST_LOG) log.textContent = "…\n" + log.textContent.slice(-MOST_LOG / 2);
      if (follow.checked) log.scrollTop = log.scrollHeight;
    } finally { under = false; }
  }

  return async (run, signal) => {
    const all = run.status, logs = run.logs.map(String);
    if (logs.join() !== known) {
      known = logs.join();
      which.replaceChildren(...logs.map((each) => make("option", { value: each }, "rank " + each)));
      if (logs.includes(route.given.get("rank"))) which.value = route.given.get("rank");
      which.parentElement.hidden = logs.length < 2;
      if (!logs.length) log.dataset.none = "None is kept: the run was started elsewhere."; else delete log.dataset.none;
    }
    const columns = [{ name: "rank" }, { name: "state" }, { name: "step", number: true }, { name: "last word", number: true },
      { name: "last words" }, { name: "host" }, { name: "process", number: true }];
    const rows = all.map((each) => [each.rank < 0 ? "launcher" : String(each.rank), stateBadge(each.state || "unknown"), each.rank < 0 ? "–" : number(each.step), ago(each.age),
      make("span", { class: each.words ? "words" : null }, each.words || ""), each.host || "–", each.pid ? String(each.pid) : "–"]);
    if (!list.contains(document.activeElement)) list.replaceChildren(all.length ? table("Ranks", columns, rows) : empty("No rank has said anything."));
    await fetchLog(signal);
  };
}

function checkpoints(body) {
  let known = "";
  return async (run) => {
    const now = JSON.stringify([run.checkpoints, run.files]);
    if (now === known) return;
    known = now;
    const rows = run.checkpoints.map((each) => [each.name + (each.is_latest ? " (latest)" : ""), bytes(each.bytes)]);
    const files = run.files.map((each) => [each.name, bytes(each.bytes)]);
    body.replaceChildren(make("h2", {}, "Checkpoints"), rows.length
      ? table("Checkpoints", [{ name: "name" }, { name: "size", number: true }], rows)
      : empty("None: --save-every writes them."),
    make("h2", {}, "Files"), files.length ? table("Files", [{ name: "name" }, { name: "size", number: true }], files) : empty("None."));
  };
}

function settings(body) {
  let known = "";
  return async (run) => {
    const now = JSON.stringify([run.config, run.command, run.toml, run.summary]);
    if (now === known) return;
    known = now;
    const plain = (value) => value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
    const rows = Object.entries(run.config || {}).map(([name, value]) => [name, plain(value)]);
    const ends = Object.entries(run.summary || {}).filter(([, value]) => !Array.isArray(value)).map(([name, value]) => [words(name), plain(value)]);
    body.replaceChildren(
      run.command ? copied("The same run again", run.command).element : "", run.toml ? copied("As a file for --config", run.toml).element : "",
      make("h2", {}, "Settings"), rows.length ? table("Settings", [{ name: "setting" }, { name: "value" }], rows) : empty("It has no config.json."),
      ...(ends.length ? [make("h2", {}, "Summary"), table("Summary", [{ name: "figure" }, { name: "value" }], ends)] : []));
  };
}
