"""A bit that somebody else flips in a rank's memory is found in the step that would use it, and located; and nothing
else is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.comm import launcher_notes
from shardfold.engine.copying import copies_of
from shardfold.errors import ConfigError, StepError
from shardfold.plan.presets import PRESETS
from shardfold.sharding.checksums import summed, word_sums
from shardfold.testing import Ranks
from tests.support.copied import differing

FLIPS = """
import os, sys
memory = os.open(f"/proc/{sys.argv[1]}/mem", os.O_RDWR)
for line in sys.stdin:
    at, bit = map(int, line.split())
    byte = os.pread(memory, 1, at)[0]
    os.pwrite(memory, bytes([byte ^ 1 << bit]), at)
    print(flush=True)
"""
"""A process of its own, which changes a bit of another's memory."""


class Flipper:
    """Changes bits of this process, from another one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FLIPS, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def flip(self, at: int, bit: int) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(at, bit, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Block(nn.Module):
    """``heard`` is called in its forward, when its parameters are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(33, 33)
        self.heard: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heard()
        return torch.tanh(self.linear(x))


def made(layout: str, precision: str = "bf16", survive: str | None = None) -> tuple[sf.Engine, list[Block]]:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks)))
    engine = sf.Engine(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        layout=layout,
        precision=precision,
        loss_scale=128.0 if precision == "fp16" else None,
        runtime=sf.Runtime(checksums=True, survive=survive),
    )
    return engine, blocks


def step(engine: sf.Engine) -> bool:
    engine.backward(engine(torch.ones(2, 33)).float().square().sum())
    return engine.step().updated


def flipped(layout: str, count: int, seed: int) -> list[tuple[int, str, str]]:
    """So many flips, drawn alike on all ranks: on which rank, of what, and what was raised."""
    engine, blocks = made(layout)
    flipper, draw, found = Flipper(), random.Random(seed), list[tuple[int, str, str]]()
    for _ in range(3):
        step(engine)
    units = [unit for unit in engine.sharded.units if unit.trainable]
    for number in range(count):
        victim, unit = draw.randrange(engine.world_size), draw.choice(units)
        segment = unit.segments[0]
        moments = engine._updater.regions_of(segment)  # type: ignore[union-attr]
        places = {state: segment.regions[state] for state in ("params", "master") if state in segment.regions}
        places |= {f"moments{n}": region for n, region in enumerate(moments)}
        what = "gathered" if segment.split and number % 2 else draw.choice([*places])
        at, bit, mine = draw.random(), draw.randrange(8), victim == engine.rank

        def flip(values: torch.Tensor | None) -> tuple[int, int]:
            assert values is not None
            where = values.data_ptr() + int(at * values.numel() * values.element_size()), bit  # noqa: B023
            flipper.flip(*where)
            return where

        done: tuple[int, int] | None = None
        block = next((each for name, each in enumerate(blocks) if unit.name == f"blocks.{name}"), None)
        if what == "gathered":
            assert block is not None
            block.heard = lambda: flip(segment.flat) if mine else None  # noqa: B023
        elif mine:
            done = flip(places[what].resting)
        try:
            step(engine)
            said = "nothing"
        except StepError as error:
            said = str(error)
        if block is not None:
            block.heard = lambda: None
        found.append((victim, f"{what} of {unit.name}", said))
        if done is not None:
            flipper.flip(*done)
        engine.reset()
        engine.sharded.run.mend()
        step(engine)
    flipper.close()
    engine.close()
    return found


def check(found: list[tuple[int, str, str]]) -> None:
    for victim, where, said in found:
        what, _, unit = where.partition(" of ")
        kind = "the gathered parameters" if what == "gathered" else f"of {what.rstrip('0123456789')}"
        assert f"rank {victim}: " in said and f"{kind} of {unit}" in said, (victim, where, said)


def needs_memory() -> None:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() and scope.exists() and scope.read_text().strip() != "0":
        pytest.skip("a process may not write another's memory here")


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_flipped_bit_is_found_and_located(ranks: Ranks, layout: str) -> None:
    needs_memory()
    each = ranks.run(flipped, layout, 8, 1, world_size=2)
    assert all(found == each[0] for found in each)
    check(each[0])


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_a_thousand_flipped_bits_are_found_and_located(ranks: Ranks, layout: str) -> None:
    needs_memory()
    check(ranks.run(flipped, layout, 200, 7, world_size=3)[0])


def healed(layout: str, precision: str, count: int, seed: int) -> tuple[int, list[str]]:
    """So many steps, in each of which a bit is flipped, and each taken again if it was skipped; how many were, and what
    is not as without flips to the bit."""
    engine, blocks = made(layout, precision, survive="rank")
    flipper, draw, skipped, at_all = Flipper(), random.Random(seed), 0, 0
    step(engine)
    for number in range(count):
        victim, unit = draw.randrange(engine.world_size), draw.choice(engine.sharded.units)
        segment = unit.segments[0]
        regions = [region for name, region in segment.regions.items() if name in ("params", "master")]
        regions += engine._updater.regions_of(segment)  # type: ignore[union-attr]
        regions += copies_of(engine._updater, segment)  # type: ignore[arg-type]
        values: torch.Tensor | None = draw.choice(regions).resting
        block = next((each for name, each in enumerate(blocks) if unit.name == f"blocks.{name}"), None)
        at, bit = draw.random(), draw.randrange(8)

        def flip(given: torch.Tensor | None) -> None:
            assert given is not None
            flipper.flip(given.data_ptr() + int(at * given.numel() * given.element_size()), bit)  # noqa: B023

        gathered = segment.split and block is not None and number % 4 == 0
        if victim == engine.rank and gathered:
            block.heard = lambda: flip(segment.flat)  # type: ignore[union-attr]  # noqa: B023
        elif victim == engine.rank:
            flip(values)
        at_all += 1
        updated = step(engine)
        for each in blocks:
            each.heard = lambda: None
        if not updated:
            skipped += 1
            assert step(engine), "what was skipped is taken again"
    flipper.close()
    wrong = differing(engine)
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    assert engine.steps == 1 + at_all
    engine.close()
    plain, _ = made(layout, precision)
    for _ in range(1 + count):
        step(plain)
    wrong += [name for name, value in plain.state_dict().items() if not torch.equal(value, found[name])]
    plain.close()
    return skipped, wrong


@pytest.mark.parametrize(("layout", "precision"), [("zero1", "fp32"), ("zero3", "bf16")])
def test_what_has_changed_comes_from_a_rank_that_has_the_same(ranks: Ranks, layout: str, precision: str) -> None:
    needs_memory()
    for skipped, wrong in ranks.run(healed, layout, precision, 8, 1, world_size=3):
        assert wrong == [] and 0 < skipped < 8


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "fsdp2", "hpz"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_hundreds_of_flipped_bits_are_healed(ranks: Ranks, layout: str, precision: str) -> None:
    needs_memory()
    for skipped, wrong in ranks.run(healed, layout, precision, 60, 5, world_size=3):
        assert wrong == [] and skipped < 60


def both_gone() -> str:
    """The first moment of rank 1, and the copy of it on the next rank."""
    engine, _ = made("zero3", survive="rank")
    step(engine)
    flipper, segment = Flipper(), next(engine.sharded.segments())
    place = {1: engine._updater.regions_of(segment)[0], 2: copies_of(engine._updater, segment)[1]}.get(engine.rank)  # type: ignore
    if place is not None and place.resting is not None:
        flipper.flip(place.resting.data_ptr(), 3)
    flipper.close()
    with pytest.raises(StepError) as told:
        step(engine)
    engine.close()
    return str(told.value)


def test_what_no_rank_has_as_it_was_is_told(ranks: Ranks) -> None:
    needs_memory()
    for said in ranks.run(both_gone, world_size=3):
        assert "rank 1: the shard of moments of " in said and "rank 2: the copy of another rank's states of " in said


def blamed() -> tuple[str, bool]:
    """What the launcher is told where rank 1's memory has changed, and whether that another rank is the cause."""
    engine, _ = made("zero1")
    step(engine)
    if engine.rank == 1:
        flipper, values = Flipper(), next(engine.sharded.segments()).regions["params"].values()
        flipper.flip(values.data_ptr(), 3)
        flipper.close()
    with pytest.raises(StepError):
        step(engine)
    engine.close()
    return launcher_notes._told[0], launcher_notes.has_followed()


def test_the_launcher_is_told_whose_memory_has_changed(ranks: Ranks) -> None:
    needs_memory()
    told = ranks.run(blamed, world_size=2)
    assert all(why.startswith("memory has changed that nobody wrote: rank 1: ") for why, _ in told)
    assert [follows for _, follows in told] == [True, False]


def apart(layout: str) -> str:
    """A rank has other bytes than the others, which were so when they were summed."""
    engine, _ = made(layout)
    step(engine)
    if engine.rank == 1:
        with torch.no_grad():
            next(engine.sharded.segments()).parameters[0][0, 0] += 1  # a write, which tells of itself
        engine._stepper._checksums.rest()  # type: ignore[union-attr]
    try:
        step(engine)
    except StepError as error:
        engine.close()
        return str(error)
    return ""


def test_a_rank_whose_bytes_differ_is_told(ranks: Ranks) -> None:
    for said in ranks.run(apart, "ddp", world_size=3):
        assert "rank 1: the replica of params of " in said and "differs from the other ranks'" in said


def quiet(layout: str, folder: str) -> int:
    """Nobody but who may has written: steps, accumulation, a user's hand, a save and a load."""
    engine, blocks = made(layout, "fp32" if layout == "hsdp" else "bf16")
    for number in range(8):
        step(engine)
        if number == 3:
            with engine.gathered(write=True), torch.no_grad():
                blocks[1].linear.weight.mul_(0.5)
        if number == 5:
            engine.save(Path(folder, "step"), wait=True)
            engine.load(folder)
        if number == 6:
            with torch.no_grad():
                engine(torch.ones(2, 33))
    steps = engine.steps
    engine.close()
    return steps


@pytest.mark.parametrize(
    "layout", ["zero3", *(pytest.param(name, marks=pytest.mark.soak) for name in sorted({*PRESETS} - {"zero3"}))]
)
def test_nothing_is_found_where_nothing_is(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    assert set(ranks.run(quiet, layout, str(tmp_path), world_size=2)) == {8}


def test_each_bit_and_each_exchange_changes_the_sums() -> None:
    """Of any dtype and length, at any place; on the host and on a device."""
    for dtype, numel in ((torch.float32, 5000), (torch.bfloat16, 4099), (torch.uint8, 8203), (torch.float32, 1)):
        values = torch.randint(1, 100, (numel,)).to(dtype)
        raw = values.view(torch.uint8)
        before = summed(values), word_sums(raw)
        for at in random.Random(0).sample(range(raw.numel()), min(raw.numel(), 40)):
            for bit in range(8):
                raw[at] ^= 1 << bit
                assert not torch.equal(summed(values), before[0]) and not torch.equal(word_sums(raw), before[1])
                raw[at] ^= 1 << bit
        assert torch.equal(summed(values), before[0]) and torch.equal(word_sums(raw), before[1])
    rows = torch.arange(4096 * 2, dtype=torch.int64)
    swapped = rows.view(8, 1024).flip(0).reshape(-1)
    assert not torch.equal(summed(rows), summed(swapped))
    assert not torch.equal(word_sums(rows.view(torch.uint8)), word_sums(swapped.view(torch.uint8)))


def test_it_needs_updates() -> None:
    with pytest.raises(ConfigError, match="has no optimizer"):
        sf.Engine(nn.Linear(2, 2), runtime=sf.Runtime(checksums=True))
