"""Pages of a flat that was given back are those of the next flat of its size, and nobody else's."""

from __future__ import annotations

import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from shardfold.tiers.device import DeviceTier
from shardfold.tiers.pages import HUGE, ParkedPages

CPU = torch.device("cpu")
NUMEL = 3 * HUGE // 4 + 100  # fp32, and no multiple of a page


def moves() -> bool:
    """Whether this system moves pages."""
    tier, flat = DeviceTier(CPU), torch.ones(NUMEL)
    tier.take_back(flat)
    return tier._parked.num_bytes > 0


needs_moving = pytest.mark.skipif(not moves(), reason="needs Linux 5.7 and glibc")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def given(tier: DeviceTier, numel: int = NUMEL) -> Tensor:
    flat = torch.empty(0).resize_(numel)
    flat.untyped_storage().resize_(0)
    tier.give(flat)
    return flat


@needs_moving
def test_pages_of_one_flat_become_those_of_the_next() -> None:
    """Once, and only by a flat of as many bytes; what is not a whole page stays where it is: up to one at each end, and
    one more behind where the flat that had them lay in one page less."""
    tier = DeviceTier(CPU)
    first = given(tier).fill_(7.0)
    tier.take_back(first)
    assert first.untyped_storage().size() == 0 and tier._parked.num_bytes > 4 * NUMEL - 3 * mmap.PAGESIZE
    other = given(tier, NUMEL + 1024).fill_(0.0)
    assert tier._parked.num_bytes > 0
    second = given(tier)
    assert tier._parked.num_bytes == 0
    inner = slice(mmap.PAGESIZE // 4, -2 * mmap.PAGESIZE // 4)
    assert bool((second[inner] == 7.0).all()) and bool((other == 0.0).all())
    third = given(tier).fill_(1.0)
    second.fill_(2.0)
    assert bool((third == 1.0).all()) and bool((second == 2.0).all())


@needs_moving
@pytest.mark.parametrize("there", [0, 64, 3712, 4032])
@pytest.mark.parametrize("here", [0, 64, 3712, 4032])
def test_pages_move_between_flats_that_begin_anywhere_in_a_page(here: int, there: int) -> None:
    """The allocator says where a flat begins, and so whether it has a whole page more than the next one."""
    around = mmap.PAGESIZE // 4
    held = [torch.full((NUMEL + 3 * around,), float(value)) for value in (7, 5)]
    flats = [
        all_of_it[(start := (-all_of_it.data_ptr() % mmap.PAGESIZE + offset) // 4) : start + NUMEL]
        for all_of_it, offset in zip(held, (here, there), strict=True)
    ]
    first, second = flats
    parked = ParkedPages()
    parked.park(first.data_ptr(), first.nbytes)
    assert parked.hand_over(second.data_ptr(), second.nbytes) and parked.num_bytes == 0
    assert bool((second[around : -2 * around] == 7.0).all())
    start = second.storage_offset()
    assert bool((held[1][:start] == 5.0).all()) and bool((held[1][start + NUMEL :] == 5.0).all())


@needs_moving
@pytest.mark.parametrize("end", ["settle", "forget_spares", "empty", "close"])
def test_what_nobody_takes_goes_back_to_the_system(end: str) -> None:
    tier, numel = DeviceTier(CPU), 64 * HUGE // 4
    flat = given(tier, numel).fill_(1.0)
    before = resident()
    tier.take_back(flat)
    assert resident() > before - 4 * numel // 4
    kept = tier.empty(1024, torch.float32) if end == "empty" else getattr(tier, end)()
    assert resident() < before - 3 * numel and tier._parked.num_bytes == 0
    del kept


@needs_moving
def test_small_shared_and_debugged_flats_are_freed_as_they_were() -> None:
    tier = DeviceTier(CPU)
    small = given(tier, HUGE // 8)
    tier.take_back(small)
    assert tier._parked.num_bytes == 0
    shared = torch.ones(NUMEL).share_memory_()
    if shared.untyped_storage().resizable():
        tier.take_back(shared)
    assert tier._parked.num_bytes == 0
    watched = DeviceTier(CPU, debug=True)
    flat = given(watched).fill_(1.0)
    watched.take_back(flat)
    assert watched._parked.num_bytes == 0 and bool(flat.isnan().all())


def test_a_system_that_moves_no_pages_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("shardfold.tiers.pages._mremap", lambda *words: asked.append(words[1]) or -1)
    parked, flat = ParkedPages(), torch.ones(NUMEL)
    for _ in range(3):
        parked.park(flat.data_ptr(), flat.nbytes)
    assert parked.num_bytes == 0 and not parked.hand_over(flat.data_ptr(), flat.nbytes)
    assert len(asked) == 1 and bool((flat == 1.0).all())


class Wide(nn.Module):
    """Blocks of more than a huge page each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(900, 900) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def _train(near: bool) -> tuple[list[Tensor], int, set[int]]:
    os.environ["SHARDFOLD_NEAR"] = str(int(near))
    handed, waiting = 0, set[int]()
    hand_over: Any = ParkedPages.hand_over

    def counted(self: ParkedPages, *words: int) -> bool:
        nonlocal handed
        took = hand_over(self, *words)
        handed += took
        return took

    ParkedPages.hand_over = counted  # type: ignore[method-assign]
    try:
        model = Wide()
        engine = sf.Engine(
            model,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            layout="zero3",
            overlap=sf.Overlap(bucket=None),
        )
        memory = engine.sharded.comm.memory
        for block in model.blocks:
            block.register_forward_hook(lambda *_: waiting.add(memory._parked.num_bytes))
        x = torch.randn(4, 900, generator=torch.Generator().manual_seed(3))
        for _ in range(3):
            loss = engine(x).square().mean()
            waiting.add(memory._parked.num_bytes)
            engine.backward(loss)
            waiting.add(memory._parked.num_bytes)
            engine.step()
        values = list(engine.state_dict().values())
        engine.close()
    finally:
        ParkedPages.hand_over = hand_over
        os.environ.pop("SHARDFOLD_NEAR")
    return values, handed, waiting


@needs_moving
@pytest.mark.parametrize("near", [True, False], ids=["near", "sockets"])
def test_units_hand_their_pages_on_and_train_as_in_plain_pytorch(ranks: Ranks, near: bool) -> None:
    """In a forward of five units two have fresh pages and three those of the unit before the last; while a module
    computes, and between steps, no pages wait."""
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 900, generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for values, handed, waiting in ranks.run(_train, near, world_size=2):
        for value, wanted in zip(values, model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
        assert handed >= 3 * 3 and waiting == {0}
