// A new run: a form made from the settings' own fields. Only what was changed is sent, and the command, the file and the
// plan of it are shown before anything starts.

import { Refused, begun, get, ofRun, post, repeat } from "./asking.js";
import { button, bytes, copied, duration, empty, link, make, say, table, tell } from "./parts.js";
import { runAddress } from "./runs.js";

const WAITS = 300; // milliseconds after the last key

export function startView(main, route, { entitle, trouble }) {
  entitle("New run");
  const place = make("div", { class: "start" });
  main.append(place);
  const control = new AbortController();
  let form = null;
  const poll = repeat(async (signal) => {
    if (form) return;
    const said = await get("forms", {}, signal), from = route.given.get("from");
    const earlier = from ? await get(ofRun(from), {}, signal) : null;
    form = new StartForm(place, route, said.recipes, earlier, control.signal);
  }, 3600, trouble);
  return { end: () => { poll.end(); control.abort(); } };
}

/** Text of a setting, as a form has it. */
function textOf(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

class StartForm {
  constructor(place, route, recipes, earlier, signal) {
    this.place = place;
    this.route = route;
    this.recipes = recipes;
    this.signal = signal;
    const names = Object.keys(recipes);
    if (!names.length) { place.replaceChildren(empty("This board starts no runs.")); return; }
    this.given = this._begin(earlier);
    const recipe = this.route.given.get("recipe") || earlier?.recipe;
    this.recipe = names.includes(recipe) ? recipe : names[0];
    this.choice = make("select", { change: () => { this.recipe = this.choice.value; this._build(); } },
      names.map((each) => make("option", { value: each }, each)));
    this.choice.value = this.recipe;
    this.find = make("input", { type: "search", autocomplete: "off", placeholder: "name or words", input: () => this._filter(),
      keydown: (event) => { if (event.key === "Enter") event.preventDefault(); } });
    this.unlike = empty("No setting is like that.");
    this.changed = make("p", { class: "muted", role: "status" });
    this.about = make("p", { class: "muted about", id: "about" });
    this.choice.setAttribute("aria-describedby", this.about.id);
    this.fields = make("div", { class: "groups" });
    this.command = copied("Command", "…");
    this.toml = copied("As a file for --config", "");
    this.refused = make("p", { class: "refused", role: "alert", hidden: true });
    this.plan = make("div", { class: "plan", "aria-live": "polite" });
    this.start = make("button", { class: "main" }, "Start");
    this.planner = button("Plan", () => this._plan());
    const form = make("form", { novalidate: true, submit: (event) => { event.preventDefault(); this._start(); } },
      make("div", { class: "tools" }, make("label", {}, "Recipe", this.choice), make("label", {}, "Find a setting", this.find), this.changed),
      this.about, this.unlike, this.fields);
    form.id = "settings";
    this.start.setAttribute("form", form.id);
    const other = () => { this._errors([]); this._later(); };
    const kept = (name) => this.route.given.get(name) || "";
    this.started = make("p", { class: "muted", role: "status" });
    this.name = make("input", { type: "text", form: form.id, input: other, autocomplete: "off", placeholder: "the time", spellcheck: "false" });
    this.hosts = make("input", { type: "text", form: form.id, input: other, autocomplete: "off", placeholder: "this machine", spellcheck: "false" });
    this.name.value = kept("name");
    this.hosts.value = kept("hosts");
    const side = make("aside", { class: "side", "aria-label": "What is started" },
      make("div", { class: "fields" }, make("label", {}, "Name of its folder", this.name), make("label", {}, "Host file", this.hosts)),
      make("div", { class: "acts" }, this.start, this.planner),
      this.started, this.refused, this.plan, this.command.element, this.toml.element);
    place.replaceChildren(...(earlier ? [make("p", { class: "muted" }, `Settings of ${earlier.name}.`)] : []),
      make("div", { class: "halves" }, form, side));
    this._build();
  }

  /** What was changed already: by the address, or in the run that is repeated. */
  _begin(earlier) {
    const given = {};
    Object.assign(given, earlier?.settings);
    try { Object.assign(given, JSON.parse(this.route.given.get("set") || "{}")); } catch { /* another page's address */ }
    return given;
  }

  _build() {
    this.inputs = new Map();
    tell(this.about, this.recipes[this.recipe].help || "");
    const groups = new Map();
    for (const field of this.recipes[this.recipe].fields) {
      const group = field.group || "Run";
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(this._field(field));
    }
    this.fields.replaceChildren(...[...groups].map(([name, fields], at) => {
      const details = make("details", { open: at === 0 || groups.size === 1 || fields.some((each) => each.dataset.changed || "needed" in each.dataset) },
        make("summary", {}, name, make("span", { class: "muted" }, ` ${fields.length}`)), make("div", { class: "fields" }, fields));
      return details;
    }));
    this._filter();
    this._later();
  }

  _field(field) {
    const id = "field-" + field.name, known = Object.hasOwn(this.given, field.name);
    const value = known ? this.given[field.name] : field.default;
    const changes = () => this._change(field);
    let input;
    if (field.kind === "bool") {
      input = make("input", { type: "checkbox", id, change: changes });
      input.checked = Boolean(value);
    } else if (field.choices?.length && field.kind === "choice") {
      const own = field.choices.map((each) => textOf(each));
      const empty_ = field.default === null || field.default === undefined ? [make("option", { value: "" }, "–")] : [];
      input = make("select", { id, change: changes }, empty_, own.map((each) => make("option", { value: each }, each)));
      input.value = textOf(value);
    } else {
      input = make("input", { type: "text", id, autocomplete: "off", spellcheck: "false", input: changes, placeholder: textOf(field.default),
        inputmode: field.kind === "int" ? "numeric" : field.kind === "float" ? "decimal" : null });
      input.value = known ? textOf(value) : "";
      if (field.choices?.length) {
        input.setAttribute("list", id + "-known");
      }
    }
    input.setAttribute("aria-describedby", `${id}-help ${id}-error`);
    if (field.required) input.setAttribute("aria-required", "true");
    const error = make("p", { class: "error", id: id + "-error" });
    const back = button("Back to default", () => { this._reset(field); }, { class: "small", "aria-label": `${field.name}: back to default` });
    const help = make("p", { class: "help", id: id + "-help" }, field.help || "");
    const label = make("label", { for: id }, field.name.replaceAll("_", " "));
    const element = make("div", { class: "field" + (field.kind === "bool" ? " flag" : ""), "data-name": field.name,
      "data-needed": field.required }, label, input, back, help, error,
      input.hasAttribute("list") ? make("datalist", { id: id + "-known" }, field.choices.map((each) => make("option", { value: textOf(each) }))) : null);
    this.inputs.set(field.name, { field, input, element, error, back });
    this._mark(field.name);
    return element;
  }

  _mark(name) {
    const { element, back, input, field } = this.inputs.get(name), on = Object.hasOwn(this.given, name)
      && textOf(this.given[name]) !== textOf(field.default);
    if (on) element.dataset.changed = "1"; else delete element.dataset.changed;
    back.hidden = !on;
    return input;
  }

  _change(field) {
    const { input } = this.inputs.get(field.name), value = input.type === "checkbox" ? input.checked : input.value.trim();
    const same = input.type === "checkbox" ? value === Boolean(field.default) : value === "" || value === textOf(field.default);
    if (same) delete this.given[field.name]; else this.given[field.name] = value;
    this.touched = true;
    this._mark(field.name);
    this._later();
  }

  _reset(field) {
    const { input } = this.inputs.get(field.name);
    delete this.given[field.name];
    if (input.type === "checkbox") input.checked = Boolean(field.default);
    else input.value = input.tagName === "SELECT" ? textOf(field.default) : "";
    this._mark(field.name);
    input.focus();
    this._later();
  }

  _filter() {
    const wanted = this.find.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { field, element } of this.inputs.values()) {
      const text = `${field.name} ${field.name.replaceAll("_", " ")} ${field.help || ""}`.toLowerCase();
      element.hidden = !wanted.every((each) => text.includes(each));
    }
    for (const group of this.fields.querySelectorAll("details")) {
      const left = [...group.querySelectorAll(".field")].filter((each) => !each.hidden).length;
      group.hidden = !left;
      if (wanted.length && left && !group.open) { group.open = true; group.dataset.found = "1"; }
      if (!wanted.length && group.dataset.found) { // what was changed there stays in sight
        group.open = Boolean(group.querySelector("[data-changed]"));
        delete group.dataset.found;
      }
    }
    this.unlike.hidden = [...this.inputs.values()].some(({ element }) => !element.hidden);
  }

  /** What differs from the defaults, of the fields that the recipe has. */
  get settings() {
    return Object.fromEntries(Object.entries(this.given).filter(([name, value]) => this.inputs.has(name)
      && textOf(value) !== textOf(this.inputs.get(name).field.default)));
  }

  _later() {
    clearTimeout(this.timer);
    this.plan.replaceChildren();
    this.timer = setTimeout(() => this._check(), WAITS);
  }

  async _check() {
    const settings = this.settings, asked = JSON.stringify([this.recipe, settings]), count = Object.keys(settings).length;
    this.asked = asked;
    this.route.put({ from: null, recipe: this.recipe, set: count ? JSON.stringify(settings) : null,
      name: this.name.value.trim(), hosts: this.hosts.value.trim() });
    tell(this.changed, `${count} changed`);
    try {
      const said = await post("check", { recipe: this.recipe, settings }, this.signal);
      if (this.asked !== asked) return true;
      this.measures = said.measures;
      this.command.set(said.command || "");
      this.toml.set(said.toml || "");
      this.toml.element.hidden = !said.toml?.trim();
      this._errors(this.touched ? said.errors : []); // who has said nothing yet is not told what is missing
      return !said.errors.length;
    } catch (error) {
      if (error instanceof Refused) this._errors([{ field: null, sentence: error.message }]);
      return false;
    }
  }

  /** Each at its field, and all beside what starts the run. */
  _errors(errors) {
    for (const { error, input } of this.inputs.values()) { tell(error, ""); input.removeAttribute("aria-invalid"); }
    for (const { field, sentence } of errors) {
      const at = this.inputs.get(field);
      if (!at) continue;
      tell(at.error, sentence);
      at.input.setAttribute("aria-invalid", "true");
      at.element.closest("details").open = true;
    }
    this.refused.hidden = !errors.length;
    tell(this.refused, errors.map(({ sentence }) => sentence).join(" "));
  }

  async _plan() {
    const control = new AbortController(), gives = () => control.abort();
    this.signal.addEventListener("abort", gives);
    this.planner.disabled = true;
    const cancel = button("Cancel", gives, { class: "small" });
    this.plan.replaceChildren(make("p", { class: "muted" }, this.measures
      ? "This machine is measured first, which takes some minutes and is kept for later plans. Other work on it makes its figures worse. "
      : "Planning … ", cancel));
    cancel.focus();
    try {
      const said = await post("plan", { recipe: this.recipe, settings: this.settings }, control.signal);
      this.measures = false;
      this._planned(said);
    } catch (error) {
      this.plan.replaceChildren(error instanceof Refused ? make("p", { class: "refused" }, error.message)
        : make("p", { class: "muted" }, "The plan was cancelled."));
    }
    this.signal.removeEventListener("abort", gives);
    this.planner.disabled = false;
    if (!cancel.isConnected && document.activeElement === document.body) this.planner.focus();
  }

  _planned(said) {
    const verdict = said.fits === true ? "It fits." : said.fits === false ? "It does not fit." : "";
    const layouts = (said.layouts || []).map((each) => [each.layout, each.fits === false ? "no" : each.fits ? "yes" : "–", bytes(each.bytes), duration(each.seconds)]);
    this.plan.replaceChildren(make("p", {}, make("b", {}, verdict)),
      layouts.length ? table("Layouts", [{ name: "layout" }, { name: "fits" }, { name: "bytes on a rank", number: true },
        { name: "time", number: true }], layouts) : "",
      said.text ? make("details", {}, make("summary", {}, "The whole plan"), make("pre", { tabindex: "0" }, said.text)) : "");
  }

  async _start() {
    clearTimeout(this.timer);
    this.touched = true;
    this.start.disabled = true;
    tell(this.start, "Starting …");
    if (await this._check()) {
      try {
        const said = await post("start", { recipe: this.recipe, settings: this.settings,
          ...(this.name.value.trim() ? { name: this.name.value.trim() } : {}),
          ...(this.hosts.value.trim() ? { hostfile: this.hosts.value.trim() } : {}) });
        this.started.replaceChildren("It is starting: ", link(runAddress(said.id), "its page"), " opens when it is under way.");
        await begun(said.id, this.signal);
        say("The run was started.");
        location.hash = runAddress(said.id);
      } catch (error) {
        this._errors([{ field: null, sentence: error.message }]);
      }
      this.started.replaceChildren();
    } else this.fields.querySelector("[aria-invalid]")?.focus();
    this.start.disabled = false;
    tell(this.start, "Start");
  }
}
