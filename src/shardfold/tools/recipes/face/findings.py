"""What the rows of the study say of the report's order, and what the report's remarks are here: sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardfold.tools.recipes.face.cards import PUBLISHED, RATES
from shardfold.tools.recipes.face.row import Row

__all__ = ["REMARKS", "findings"]

NEAR = 0.03
"""Rates that differ by less count as equal."""

REMARKS = (
    (
        "R1",
        "The report found that neither a distributed head nor DeepSpeed's collectives combine with ZeRO. Here the head "
        "is a part of the same engine: its classes are split over the ranks that read other samples, its states are "
        "not split once more, and no gradient of a class is sent.",
    ),
    (
        "R2",
        "In the report stage 2 with the optimizer offloaded was the fastest with matching accuracy, and stage 3 could "
        "turn parameter offload on silently. Here what rests where is one table, which a run prints, and offload is on "
        "where it is asked for.",
    ),
    (
        "R3",
        "Overlapped communication costs memory, there and here: units that are gathered ahead are in what the planner "
        "counts for stage 3.",
    ),
    (
        "R5",
        "Without fp16 the report gained 50 images/s, and lost under 10 % of rate and memory with it. A CPU without "
        "16-bit arithmetic gains nothing from it, so this page is in the precision that it names.",
    ),
    (
        "R6",
        "The head is over twice the ViT, so that a ViT that is 30 % faster is 10 % overall: Amdahl's law with a share "
        "of 0.39, 1 / (0.61 + 0.39 / 1.3) = 1.10. The strong bars say what splitting the head gives instead.",
    ),
)

WHY_BATCH = {
    ("stage 2", "stage 3"): "stage 3 gathers each unit whole before it computes with it, and a replicated head is the "
    "largest unit by far; the report's head stayed outside of ZeRO, so that nothing gathered it",
    ("stage 2 + offload", "stage 3"): "stage 3 keeps 1 / N of all states on the device, and whole units "
    "for a while, while stage 2 with offload keeps the parameters whole whatever N is: by ZeRO's formulas for 16 bits "
    "the former is less only on more than 8 ranks",
    ("base", "stage 3"): "what stage 3 gathers is more than what it saves on so few ranks",
}
"""Why one setting fits no more images than another that in the report had the smaller batch, where it is known."""


def findings(rows: Sequence[Row], ten: Sequence[tuple[str, str, int]]) -> list[str]:
    """A sentence or some for each."""
    said: list[str] = []
    for budget in dict.fromkeys(row.budget for row in rows):
        for head in ("replicated", "sharded"):
            batches = {row.setting: row.batch for row in rows if (row.budget, row.head) == (budget, head)}
            where = (
                f"under the {budget} budget, {'the head on every rank' if head == 'replicated' else 'classes split'}"
            )
            said.append(batch_order(batches, where, ten, head))
    said += [rate_order(rows, budget) for budget in dict.fromkeys(row.budget for row in rows)]
    said += [head_ratios(rows, budget) for budget in dict.fromkeys(row.budget for row in rows)]
    return said


def batch_order(batches: Mapping[str, int], where: str, ten: Sequence[tuple[str, str, int]], head: str) -> str:
    """Whether the report's order of batches is here, else what is not, and why."""
    listed = ", ".join(f"{name} {batch}" for name, batch in sorted(batches.items(), key=lambda each: each[1]))
    text = (
        f"Largest batches {where}: {listed}. The report has base = stage 2 < stage 2 + offload < stage 3 < stage 3 + "
    )
    text += "offload. "
    wrong = [(a, b) for a in PUBLISHED for b in PUBLISHED
             if PUBLISHED[a].batch < PUBLISHED[b].batch and batches[a] > batches[b]]  # fmt: skip
    if not wrong:
        return text + "No two settings are in the other order here."
    computed = {name: batch for name, each, batch in ten if each == head}
    for a, b in wrong:
        why = WHY_BATCH.get((a, b), "the report does not say what it tuned")
        text += f"Not reproduced: {b} above {a}; {why}. "
        if computed and computed[a] <= computed[b]:
            text += f"On 10 ranks, computed, it is: {computed[a]} and {computed[b]}. "
        elif computed:
            text += f"On 10 ranks, computed, it is not either: {computed[a]} and {computed[b]}. "
    return text.strip()


def rate_order(rows: Sequence[Row], budget: str) -> str:
    """Whether the report's order of images/s is here, else what is not, and why."""
    rates = {r.setting: r.images_per_s for r in rows if (r.budget, r.head) == (budget, "replicated")}
    base = rates["base"]
    listed = ", ".join(f"{name} {rates[name] / base:.2f} (report {RATES[name] / RATES['base']:.2f})" for name in rates)
    text = f"Images/s under the {budget} budget, the head on every rank, by the base's: {listed}. "
    wrong = [f"{b} faster than {a}" for a in RATES for b in RATES
             if RATES[a] < RATES[b] * (1 - NEAR) and rates[a] > rates[b] * (1 + NEAR)]  # fmt: skip
    if not wrong:
        return text + f"No two settings that the report has more than {NEAR:.0%} apart are in the other order here."
    return text + (
        f"Not reproduced: {', '.join(wrong)}. Ranks of one CPU share its memory: an offload copies nothing, and what a "
        "step sends costs as much time of a core as what it computes, while a card sends beside computing. What a "
        "larger batch saves is the update and the sending of each step, and stage 3 sends more of them."
    )


def head_ratios(rows: Sequence[Row], budget: str) -> str:
    """What splitting the classes gives."""
    pairs = {(row.setting, row.head): row for row in rows if row.budget == budget}
    names = dict.fromkeys(name for name, _ in pairs)
    rates = [pairs[name, "sharded"].images_per_s / pairs[name, "replicated"].images_per_s for name in names]
    fits = [pairs[name, "sharded"].batch / pairs[name, "replicated"].batch for name in names]
    each = ", ".join(f"{name} {rate:.2f}" for name, rate in zip(names, rates, strict=True))
    return (
        f"Images/s with split classes under the {budget} budget, by those with the head on every rank: {each}; "
        f"batches are {min(fits):.2f} to {max(fits):.2f} times as large."
    )
