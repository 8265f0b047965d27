"""Generation with weights in host memory or in files: the same tokens, and books of what comes from there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.generation import Continuation, Generation, SamplingRule
from shardfold.testing import Ranks
from shardfold.tiers.disk import DiskTier
from tests.generation.models import made, unequal

PROMPTS = unequal(5, 12)


def _answers(target: Any, **more: Any) -> dict[int, list[int]]:
    found = sf.generate(target, PROMPTS, max_tokens=6, temperature=0, **more)
    return {each.request: each.tokens for each in found}


def _streamed(offload: Any) -> dict[str, Any]:
    engine = sf.Engine(made().requires_grad_(False), layout="infinity", offload=offload)
    found: dict[str, Any] = {"answers": [_answers(engine), _answers(engine)]}
    report = engine.traffic()
    found["rows"] = [(row.tier, row.op, row.calls, row.moved, row.program) for row in report.evaluated]
    found["step"] = report.moved
    tier = engine.sharded.tiers.named("disk") if offload else None
    found["read"] = tier.bytes_read if isinstance(tier, DiskTier) else None
    engine.close()
    return found


@pytest.mark.parametrize("offload", [None, {"params": "disk"}], ids=["host", "disk"])
def test_what_a_generation_moves_is_counted_as_the_program_says(ranks: Ranks, offload: Any) -> None:
    """Bytes of all its forwards, although no step was taken; from files no fewer were read than are counted."""
    expected = _answers(made())
    for found in ranks.run(_streamed, offload, world_size=2):
        assert found["answers"] == [expected, expected] and found["step"] == ()
        assert [row[:2] for row in found["rows"]] == [*([("disk", "READ")] if offload else []), ("host", "FILL")]
        assert all(calls and moved == program > 0 for _, _, calls, moved, program in found["rows"])
        if offload:
            assert found["read"] >= found["rows"][0][3]


def _texts() -> list[Continuation]:
    rule = SamplingRule(0.0, 1.0, 0, 0)
    return [Continuation(i, 0, list(prompt), len(prompt), 8, rule, frozenset()) for i, prompt in enumerate(PROMPTS)]


def _coming(engine: sf.Engine) -> set[str]:
    return {unit.name for unit in engine.units if any(segment._coming for segment in unit.segments)}


def _with_other_weights(**how: Any) -> tuple[list[list[int]], list[set[str]], int]:
    """Answers of a generation in the middle of which weights change; what was being read behind a step, behind the
    change and at the end; and the memory that waits for what is read then."""
    engine = sf.Engine(made().requires_grad_(False), **how)
    running, texts = Generation(engine), _texts()
    for text in texts:
        running.add(text)
    for _ in range(4):
        running.step()
    seen = [_coming(engine)]
    with engine.gathered(write=True) as values:
        for value in values.values():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(0)), alpha=0.3)
    while running.busy:
        running.step()
    seen.append(_coming(engine))
    running.close()
    spare = len(engine.sharded.tiers.host._spare)
    seen.append(_coming(engine))
    engine.close()
    return [text.tokens for text in texts], seen, spare


def test_the_next_tokens_first_units_are_read_meanwhile_and_as_they_are_then() -> None:
    """Behind a step the first units are on their way; weights that change in the middle of a generation are read with
    their new values; nothing is read, or kept, behind the end."""
    expected, _, _ = _with_other_weights(layout="ddp")
    found, seen, spare = _with_other_weights(layout="infinity", offload={"params": "disk"})
    assert found == expected
    assert seen[0] == seen[1] and len(seen[0]) > 1
    assert seen[2] == set() and not spare


@pytest.mark.parametrize("base", [None, "nf4/64"])
def test_what_fits_stays_and_is_not_read(base: str | None) -> None:
    """A part of the parameters' bytes rests on the device, the same units in each pass: only the others' are moved."""
    layout = sf.PRESETS["infinity"].replace(base=base)
    whole = sf.Engine(made(num_hidden_layers=6).requires_grad_(False), layout=layout, offload={"params": "disk"})
    part = sf.Engine(made(num_hidden_layers=6).requires_grad_(False), layout=layout, offload={"params": "disk:0.5"})
    expected = _answers(whole)
    assert _answers(part) == expected
    sizes = {row.tier: row.held for row in part.memory().rows if row.state == "params"}
    total = sum(row.held for row in whole.memory().rows if row.state == "params")
    assert sum(sizes.values()) == total and total / 2 <= sizes["disk"] < total
    for engine, held in ((whole, total), (part, sizes["disk"])):
        read = next(row for row in engine.traffic().evaluated if row.tier == "disk")
        forwards = read.calls / sum(op.verb == "READ" for op in engine.program.alone)
        assert read.moved == read.program == forwards * held
    reads = {op.unit for op in part.program.alone if op.verb == "READ"}
    read = [unit.name in reads for unit in part.units if unit.name.startswith("model.layers")]
    between = all(one or other for one, other in itertools.pairwise(read))
    assert base or (not all(read) and between), "blocks that are read are not between those that stay"
    for engine in (whole, part):
        engine.close()
