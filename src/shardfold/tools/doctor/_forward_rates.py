"""What a forward takes in which each of some texts has one token: as a generation has it, by one process alone that has
all cores, with weights as they are and as codes."""

from __future__ import annotations

from statistics import median
from time import perf_counter

from shardfold.engine.engine import Engine
from shardfold.generation import Continuation, Generation, SamplingRule
from shardfold.tools.answering.open_config import BASES, table_of_weights
from shardfold.tools.recipes.gpt import GPT, GPTConfig

__all__ = ["forward_rates"]

ROWS = 1, 2, 8, 32
"""Texts."""
WIDE, NARROW, LAYERS = 768, 64, 5
"""Widths of two models: the weights of one are in no cache, the other one has next to none."""
CONTEXT = 64
"""Tokens of a text, at most."""
STEPS, LEAST = 5, 0.2
"""Forwards of which the median counts, and seconds of them at least."""


def forward_rates() -> dict[str, list[list[float]]]:
    """By format of weights, ``fp32`` among them: of so many texts seconds of a block, and of each of its weights."""
    found: dict[str, list[list[float]]] = {}
    for bits in (None, *BASES):
        wide, narrow = (_model(width) for width in (WIDE, NARROW))
        more, less = (sum(each.numel() for each in model.blocks.parameters()) for model in (wide, narrow))
        took = [_forwards(model, bits) for model in (wide, narrow)]
        rows: list[list[float]] = []
        for count, long, short in zip(ROWS, *took, strict=True):
            weight = max(long - short, long / 2) / (more - less)
            rows.append([float(count), max(0.0, short - less * weight) / LAYERS, weight])
        found["fp32" if bits is None else BASES[bits]] = rows
    return found


def _model(width: int) -> GPT:
    shape = GPTConfig(d_model=width, layers=LAYERS, heads=width // 32, context=CONTEXT)
    return GPT(shape).requires_grad_(False)


def _forwards(model: GPT, bits: int | None) -> list[float]:
    """Seconds of a forward of each number of texts."""
    engine = Engine(model, layout=table_of_weights("ddp", bits, "memory"))
    found = [_forward(engine, rows) for rows in ROWS]
    engine.close()
    return found


def _forward(engine: Engine, rows: int) -> float:
    running, most = Generation(engine), CONTEXT - 2
    for text in range(rows):
        running.add(Continuation(text, 0, [1, 2], 2, most, SamplingRule(0.0), frozenset()))
    times: list[float] = []
    while len(times) < STEPS + 2 or (sum(times[2:]) < LEAST and len(times) < most):
        begun = perf_counter()
        running.step()
        times.append(perf_counter() - begun)
    running.abandon()
    return median(times[2:])  # before, prompts were read and what is kept was made
