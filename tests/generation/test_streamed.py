"""Generation with weights in host memory or in files: the same tokens, and books of what comes from there."""

from __future__ import annotations

from typing import Any

import pytest

import shardfold as sf
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
