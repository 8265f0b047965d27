"""Random training programs give what plain PyTorch gives, or one sentence on every rank that says why not.

A failure names a program by one number: ``SHARDFOLD_PROGRAM=1234 pytest tests/training/test_random_programs.py -k
again`` runs it under every layout, and what is printed has been shortened to the operations that it takes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

import shardfold as sf
from shardfold.testing import Ranks, RanksFailed
from tests.support.programs import check, make_program, without

LAYOUTS = list(sf.PRESETS)
EACH = 7  # programs for each layout
SOAK = 100


def _programs(seeds: Sequence[int]) -> list[tuple[int, dict, list]]:  # type: ignore[type-arg]
    return [(seed, *make_program(seed)) for seed in seeds]


def _fails(ranks: Ranks, program: tuple[int, dict, list], layout: str, size: int) -> str | None:  # type: ignore[type-arg]
    try:
        found = ranks.run(check, [program], layout, world_size=size, timeout=60)
    except RanksFailed as error:
        return str(error)
    return next((wrong for said in found for wrong in said), None)


def _shortest(ranks: Ranks, seed: int, layout: str, size: int) -> str:
    """What is wrong with a program, when no more operations can be left out."""
    options, ops = make_program(seed)
    wrong = _fails(ranks, (seed, options, ops), layout, size)
    index = len(ops) - 1
    while index >= 0 and wrong is not None:
        shorter = without(ops, index)
        still = _fails(ranks, (seed, options, shorter), layout, size)
        if still is not None:
            ops, wrong = shorter, still
        index = min(index, len(ops)) - 1
    return wrong or f"program {seed} under {layout} on {size} ranks failed once, and not again"


def _run(ranks: Ranks, seeds: Sequence[int], layout: str, size: int) -> None:
    found = ranks.run(check, _programs(seeds), layout, world_size=size, timeout=60.0 + 4 * len(seeds))
    failed = sorted({int(wrong.split()[1].rstrip(",")) for said in found for wrong in said})
    assert not failed, f"{len(failed)} programs: {failed[:20]}\n" + _shortest(ranks, failed[0], layout, size)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_programs_are_plain_pytorch_on_two_ranks(ranks: Ranks, layout: str) -> None:
    first = EACH * LAYOUTS.index(layout)
    _run(ranks, range(first, first + EACH), layout, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_random_programs_are_plain_pytorch_on_one_rank(ranks: Ranks, layout: str) -> None:
    first = 1000 + 16 * ["ddp", "zero2", "zero3"].index(layout)
    _run(ranks, range(first, first + 16), layout, 1)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", range(10_000, 10_000 + SOAK, 100))
def test_many_random_programs_are_plain_pytorch(ranks: Ranks, first: int, layout: str, size: int) -> None:
    _run(ranks, range(first, first + 100), layout, size)


@pytest.mark.skipif(
    "SHARDFOLD_PROGRAM" not in os.environ, reason="runs the program whose number is in SHARDFOLD_PROGRAM"
)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_again(ranks: Ranks, layout: str, size: int) -> None:
    """The program whose number is in ``SHARDFOLD_PROGRAM``, shortened if it fails."""
    _run(ranks, [int(os.environ["SHARDFOLD_PROGRAM"])], layout, size)
