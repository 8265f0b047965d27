"""What the rows of the study say of the report's order: sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from shardfold.tools.recipes.face.cards import PUBLISHED, RATES
from shardfold.tools.recipes.face.row import StudyRow

__all__ = ["StudyFinding", "batch_orders", "findings"]

NEAR = 0.03
"""Rates that differ by less count as equal."""

WHY_BATCH = {
    (
        "stage 2",
        "stage 3",
    ): "stage 3 gathers each unit whole before it computes with it, and the largest unit counts. The "
    "report's head stayed outside of ZeRO, so that nothing gathered it",
    (
        "stage 2 + offload",
        "stage 3",
    ): "stage 3 keeps 1 / N of all states on the device, and whole units for a while; stage "
    "2 with offload keeps the parameters whole, whatever N is. By ZeRO's formulas for 16 bits the former is less on "
    "more than 8 ranks only",
    (
        "stage 2 + offload",
        "stage 3 + offload",
    ): "what both have moved to the host is the same but for the parameters, and "
    "those of a unit come back whole, beside the part that came from the host, when it is used",
    ("base", "stage 3"): "what stage 3 gathers is more than what it saves on so few ranks",
}
"""Why one setting fits no more images than another that in the report had the smaller batch, where it is known."""

HEADS = {"replicated": "the head on every rank", "sharded": "classes split"}

Batches = Mapping[tuple[str, str], Mapping[str, int]]
"""By (budget, head): of each setting its batch."""


class StudyFinding(NamedTuple):
    """A title, and what there is to say."""

    title: str
    text: str


def findings(rows: Sequence[StudyRow], ten: Sequence[tuple[str, str, int]]) -> list[StudyFinding]:
    """What the rows say of the report's order."""
    batches: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        batches.setdefault((row.budget, row.head), {})[row.setting] = row.batch
    return [*batch_orders(batches, ten), *rate_orders(rows), head_ratios(rows)]


def batch_orders(batches: Batches, ten: Sequence[tuple[str, str, int]]) -> list[StudyFinding]:
    """Whether the report's order of batches is here, else what is not, and why."""
    wrong: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for place, mine in batches.items():
        for a, b in permutations(PUBLISHED, 2):
            if PUBLISHED[a].batch < PUBLISHED[b].batch and mine[a] > mine[b]:
                wrong.setdefault((a, b), []).append(place)
    text = "In the report base = stage 2 < stage 2 + offload < stage 3 < stage 3 + offload. "
    text += "Here " + ("it is so but for what follows." if wrong else "no two settings are in the other order.")
    found = [StudyFinding("Largest batches", text)]
    for (a, b), places in wrong.items():
        where = "; ".join(f"{budget} budget, {HEADS[head]}" for budget, head in places)
        text = "Under no budget, with neither head" if len(places) == len(batches) else f"Not so: {where}"
        text += f". The reason: {WHY_BATCH.get((a, b), 'the report does not say what it tuned')}."
        for head in dict.fromkeys(head for _, head in places):
            computed = {name: batch for name, each, batch in ten if each == head}
            if computed:
                there = "so it would be there" if computed[a] <= computed[b] else "nor would it be there"
                text += f" On 10 ranks, computed, {HEADS[head]}: {a} {computed[a]}, {b} {computed[b]}; {there}."
        found.append(StudyFinding(f"Not reproduced: {b} above {a}", text))
    return found


def rate_orders(rows: Sequence[StudyRow]) -> list[StudyFinding]:
    """Whether the report's order of images/s is here, else what is not, and why."""
    lines: list[str] = []
    wrong: dict[str, list[str]] = {}
    for budget in dict.fromkeys(row.budget for row in rows):
        rates = {r.setting: r.images_per_s for r in rows if (r.budget, r.head) == (budget, "replicated")}
        lines.append(f"{budget} budget: " + ", ".join(f"{name} {rates[name] / rates['base']:.2f}" for name in rates))
        for a, b in permutations(RATES, 2):
            if RATES[a] < RATES[b] * (1 - NEAR) and rates[a] > rates[b] * (1 + NEAR):
                wrong.setdefault(f"{b} above {a}", []).append(budget)
    theirs = ", ".join(f"{name} {rate / RATES['base']:.2f}" for name, rate in RATES.items())
    text = f"By the base's, the head on every rank. Report: {theirs}. Here, {'; '.join(lines)}. "
    if not wrong:
        text += f"No two settings that the report has more than {NEAR:.0%} apart are in the other order."
        return [StudyFinding("Images/s", text)]
    listed = "; ".join(f"{pair} ({' and '.join(budgets)})" for pair, budgets in wrong.items())
    return [
        StudyFinding("Images/s", text),
        StudyFinding(
            "Not reproduced in images/s",
            f"{listed}. Ranks of one CPU share its memory and its cores: an offload copies nothing, and what a step "
            "sends takes time of the cores that compute, while a card sends beside computing. A larger batch saves the "
            "update and the sending of a step, and stage 3 sends half as much again in each.",
        ),
    ]


def head_ratios(rows: Sequence[StudyRow]) -> StudyFinding:
    """What splitting the classes gives."""
    pairs = {(row.budget, row.setting, row.head): row for row in rows}
    lines: list[str] = []
    for budget in dict.fromkeys(row.budget for row in rows):
        names = dict.fromkeys(row.setting for row in rows if row.budget == budget)
        ratios = {
            n: pairs[budget, n, "sharded"].images_per_s / pairs[budget, n, "replicated"].images_per_s for n in names
        }
        lines.append(f"{budget} budget: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    return StudyFinding("Classes split", f"Images/s by those with the head on every rank, {'; '.join(lines)}.")
