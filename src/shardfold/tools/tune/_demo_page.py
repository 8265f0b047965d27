"""The page of the demo: what each recipe did to the same model, in figures, curves and answers to the same requests."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardfold.tools.observe.charts import ChartLine, line_chart
from shardfold.tools.observe.page_parts import page, scroll, table, tiles
from shardfold.tools.observe.readable import format_count, format_duration
from shardfold.tools.observe.run_page import series, smooth, step_rows

__all__ = ["demo_page"]

TITLE = "A small model, tuned here"

STYLE = """
.answers { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 11rem), 1fr)); }
.answer { background: var(--card); border-radius: .5rem; padding: .7rem .9rem; overflow-wrap: anywhere; }
.answer p { margin: .2rem 0 .5rem; } .answer small { color: var(--muted); }
.request { margin: 1.4rem 0 .5rem; font-weight: 600; }
mark { background: none; color: var(--held); font-weight: 600; }
.yes::before { content: "✓ "; } .no::before { content: "✗ "; } .yes, .no { margin-right: .8rem; white-space: nowrap; }
.stages { margin-top: 2.2rem; } section { border-top: 1px solid var(--line); min-width: 0; }
section h2 { margin-top: 1rem; }
section h2 small { color: var(--muted); font-weight: 400; float: right; }
code { overflow-wrap: anywhere; }
"""

CURVES = {
    "pt": ("loss", "loss, nats per token"),
    "sft": ("loss", "loss, nats per token"),
    "reward": ("accuracy", "share of pairs that are told apart"),
    "dpo": ("accuracy", "share of pairs that are told apart"),
    "grpo": ("reward", "share of answers with that thing alone, which ended"),
    "ppo": ("reward", "share of answers with that thing alone, which ended"),
}
"""Of each recipe the figure that its section draws."""


def demo_page(folder: Path) -> str:
    """The page as text, of a folder in which the demo has written ``demo.json``."""
    facts = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    stages: Mapping[str, Mapping[str, Any]] = facts["stages"]
    seconds = sum(facts["seconds"].values())
    sections = [
        f"<h1>{TITLE}</h1>",
        f'<p class="muted">{html.escape(_introduction(facts))}</p>',
        tiles([*_figures(facts), ("all of it", format_duration(seconds))]),
        "<h2>The same requests, after each recipe</h2>",
        "<p>Answers are drawn at temperature 1. Words that were asked for are marked.</p>",
        *(_answers(each, facts["models"]) for each in facts["samples"]),
        "<h2>Figures of each model</h2>",
        _measures(facts["models"], facts["measures"]),
        '<div class="charts stages">',
        *(_stage(folder, name, stage, facts["seconds"][name]) for name, stage in stages.items()),
        "</div>",
    ]
    return page(TITLE, sections, style=STYLE)


def _introduction(facts: Mapping[str, Any]) -> str:
    ranks = facts["procs"]
    return (
        f"A LLaMA of {format_count(facts['parameters'])} parameters and {facts['vocabulary']} tokens, from random "
        f"values on; {facts['layout']} over {ranks} rank{'s' * (ranks != 1)}, seed {facts['seed']}. Stories, requests "
        "and pairs were made on the spot from templates."
    )


def _figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The demo's targets: of each recipe one figure, before and after."""
    measures, held_out = facts["measures"], facts["held_out"]
    found = [("held-out loss, by sft", _change(measures, "pt", "sft", "loss", "{:.2f}"))]
    for name, words in (("reward", "pairs told apart, reward model"), ("dpo", "pairs told apart, dpo")):
        if "accuracy" in held_out.get(name, {}):
            found.append((words, f"{held_out[name]['accuracy']:.0%}"))
    found.append(("happy endings, by dpo", _change(measures, "sft", "dpo", "happy", "{:.0%}")))
    for name in ("grpo", "ppo"):
        found.append((f"word and end, by {name}", _change(measures, "dpo", name, "obeys", "{:.0%}")))
    return found


def _change(measures: Mapping[str, Any], before: str, after: str, name: str, form: str) -> str:
    values = [form.format(measures[each][name]) for each in (before, after) if each in measures]
    return " → ".join(values)


def _answers(sample: Mapping[str, Any], models: Sequence[str]) -> str:
    cards = "".join(_answer(name, sample["answers"][name], sample["word"]) for name in models)
    return f'<div class="request">{html.escape(sample["prompt"])}</div><div class="answers">{cards}</div>'


def _answer(name: str, given: Mapping[str, Any], word: str) -> str:
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    text, has = given["text"], bool(pattern.search(given["text"]))
    parts = [html.escape(each) for each in pattern.split(text)]
    shown = f"<mark>{html.escape(word)}</mark>".join(parts)
    signs = "".join(
        f'<span class="{"yes" if yes else "no"}">{words}</span>'
        for yes, words in ((has, "has the word"), (given["stopped"], "ended"))
    )
    return f'<div class="answer"><small>{html.escape(name)}</small><p>{shown}</p><small>{signs}</small></div>'


def _measures(models: Sequence[str], measures: Mapping[str, Mapping[str, float]]) -> str:
    head = ["model", "word and end", "happy", "ended", "held-out loss", "bits per byte"]
    rows = [
        [
            name,
            *(f"{found[each]:.0%}" for each in ("obeys", "happy", "ended")),
            *(f"{found[each]:.3f}" for each in ("loss", "bits_per_byte")),
        ]
        for name in models
        if (found := measures[name])
    ]
    return table(head, rows)


def _stage(folder: Path, name: str, stage: Mapping[str, Any], seconds: float) -> str:
    steps = step_rows(folder / name / "metrics.jsonl")
    figure, label = CURVES[name]
    points = series(steps, figure)
    lines = [ChartLine("", points, "faint"), ChartLine(name, smooth(points))]
    command = shlex.join(["shardfold", "tune", *stage["command"]])
    parts = [
        f"<h2>{html.escape(stage['title'])} <small>{format_duration(seconds)}</small></h2>",
        f"<p>{html.escape(stage['what'])}</p>",
        f'<p class="muted">{html.escape(label)}, over {len(steps)} steps</p>',
        scroll(line_chart(lines, label=f"{name}: {label}")),
        f"<p>Alone: <code>{html.escape(command)}</code></p>",
    ]
    return f"<section>{''.join(parts)}</section>"
