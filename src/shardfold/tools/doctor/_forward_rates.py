"""What a forward takes in which each of some texts has one token: as a generation has it, by one process alone that has
all cores, or by two that share every layer and the cores, with weights as they are and as codes."""

from __future__ import annotations

import random
from statistics import median
from time import perf_counter

from shardfold.engine.engine import Engine
from shardfold.generation import Continuation, Generation, SamplingRule
from shardfold.parallel.parallel import Parallel
from shardfold.tools.answering.open_config import BASES, table_of_weights
from shardfold.tools.recipes.gpt import GPT, GPTConfig

__all__ = ["forward_rates", "kept_rate"]

ROWS = 1, 2, 8, 32
"""Texts."""
WIDE, NARROW, LAYERS = 768, 64, 5
"""Widths of two models: the weights of one are in no cache, the other one has next to none."""
CONTEXT = 64
"""Tokens of a text, at most."""
LONG, KEPT_WIDTH, KEPT_LAYERS, KEPT_HEAD, KEPT_CONTEXT = 256, 256, 8, 64, 4096
"""Tokens of longer texts, and the shape of the model that has them: their keys and values are in no cache, either, and
they are read in a few forwards."""
STEPS, LEAST = 5, 0.2
"""Forwards of which the median counts, and seconds of them at least; of several processes thrice as many, since all of
them have to make equally many."""


def forward_rates(tensor: int = 1) -> dict[str, list[list[float]]]:
    """By format of weights, ``fp32`` among them: of so many texts seconds of a block, of each of its weights that this
    process has.

    Args:
        tensor: processes that share every layer; all of them call it together.
    """
    found: dict[str, list[list[float]]] = {}
    for bits in (None, *BASES):
        wide, narrow = (_model(width, LAYERS, CONTEXT, 32) for width in (WIDE, NARROW))
        more, less = (sum(each.numel() for each in model.blocks.parameters()) / tensor for model in (wide, narrow))
        took = [_forwards(model, bits, tensor) for model in (wide, narrow)]
        rows: list[list[float]] = []
        for count, long, short in zip(ROWS, *took, strict=True):
            weight = max(long - short, long / 2) / (more - less)
            rows.append([float(count), max(0.0, short - less * weight) / LAYERS, weight])
        found["fp32" if bits is None else BASES[bits]] = rows
    return found


def kept_rate(tensor: int = 1) -> float:
    """Seconds of each byte of keys and values that this process reads of many texts: by long ones and short ones.

    Args:
        tensor: processes that share every layer; all of them call it together.
    """
    rows = ROWS[-1]
    engine = _engine(_model(KEPT_WIDTH, KEPT_LAYERS, KEPT_CONTEXT, KEPT_HEAD), None, tensor)
    short, long = (_forward(engine, rows, tokens, CONTEXT - 2) for tokens in (2, LONG))
    engine.close()
    return max(0.0, long - short) * tensor / (rows * (LONG - 2) * KEPT_LAYERS * 2 * 4 * KEPT_WIDTH)


def _model(width: int, layers: int, context: int, head: int) -> GPT:
    shape = GPTConfig(d_model=width, layers=layers, heads=width // head, context=context)
    return GPT(shape).requires_grad_(False)


def _engine(model: GPT, bits: int | None, tensor: int) -> Engine:
    parallel = Parallel(mesh={"tensor": tensor}, tensor="auto") if tensor > 1 else None
    return Engine(model, layout=table_of_weights("ddp", bits, "memory"), parallel=parallel)


def _forwards(model: GPT, bits: int | None, tensor: int) -> list[float]:
    """Seconds of a forward of each number of texts."""
    engine = _engine(model, bits, tensor)
    found = [_forward(engine, rows, 2, CONTEXT - 2) for rows in ROWS]
    engine.close()
    return found


def _forward(engine: Engine, rows: int, prompt: int, most: int) -> float:
    running, draw = Generation(engine), random.Random(0)
    for text in range(rows):
        tokens = [draw.randrange(3, 200) for _ in range(prompt)]  # that no other text begins with
        running.add(Continuation(text, 0, tokens, prompt, most, SamplingRule(0.0), frozenset()))
    times: list[float] = []
    least, until = (STEPS, LEAST) if engine.world_size == 1 else (3 * STEPS, 0.0)
    while running.busy and (len(times) < least + 2 or sum(times[2:]) < until):
        begun, before = perf_counter(), running.seen
        running.step()
        if running.seen - before == rows:  # of prompts nothing is read any more
            times.append(perf_counter() - begun)
    running.abandon()
    return median(times[2:])  # before, what is kept was made
