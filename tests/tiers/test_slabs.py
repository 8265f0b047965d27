"""Pinned memory of what rests in host memory: how much is taken for regions, and that engines train in it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.plan.cost import regions_in
from shardfold.plan.layout import Tier
from shardfold.testing.simulated import simulated
from shardfold.tiers._slabs import LEAST, PART, Slabs, pinned_bytes, slab_bytes
from tests.support import models
from tests.support.simulated import on_device

GIB = 1 << 30


def _taken(sizes: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Bytes of each slab, and the regions; without memory."""
    made: list[int] = []

    def make(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    slabs = Slabs(make)
    return made, [slabs.take(nbytes) for nbytes in sizes]


def test_states_of_seven_billion_parameters_fit_into_128_gib() -> None:
    """Master, gradients and two moments of 32 blocks: powers of 2 alone would be all of it."""
    block = 4 * (4 * 4096**2 + 3 * 4096 * 10944 + 2 * 4096)
    made, regions = _taken([block] * 4 * 32)
    assert sum(made) == 108 * GIB and 128 * block == pytest.approx(96.1 * GIB, rel=1e-3)
    assert all(size == 1 << (size.bit_length() - 1) for size in made) and {len(each) for each in regions} == {block}


@pytest.mark.parametrize("nbytes", [100, 4096, 5000, 3 * GIB // 4, GIB + 4096])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_a_slab_is_a_small_part_of_what_there_is(nbytes: int, count: int) -> None:
    """It loses no more than powers of 2 alone do, but for the last one, which is a part of all before it."""
    made, _ = _taken([nbytes] * count)
    whole = -(-nbytes // 4096) * 4096
    rounded = max(LEAST, 1 << (whole - 1).bit_length())
    assert made[0] == rounded == slab_bytes(whole, 0)
    assert all(size <= max(rounded, sum(made[:place]) // PART) for place, size in enumerate(made))
    assert sum(made) <= count * rounded and (count < 100 or sum(made) <= 1.3 * count * whole + rounded)


def test_regions_of_a_slab_share_no_byte() -> None:
    """Small ones go into what is left of a slab that is open, each at the edge of a page."""
    slabs = Slabs(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    regions = [slabs.take(nbytes) for nbytes in [5000, 100, 4096, 8192, 3000] * 20]
    spans = sorted((each.data_ptr(), each.data_ptr() + len(each)) for each in regions)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert len({each.untyped_storage().data_ptr() for each in regions}) < len(regions)


def _trained(device: str, precision: str) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    engine = sf.Engine(
        models.small(), optimizer=partial(torch.optim.AdamW, lr=3e-3), layout="zero2", precision=precision,
        offload="host", runtime=sf.Runtime(device=device), clip_norm=1.0,
    )  # fmt: skip
    losses: list[float] = []
    for tokens, targets in models.batches(4):
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    regions = [region.resting for unit in engine.sharded.units for s in unit.trainable for region in s.regions.values()]
    return losses, (engine, regions)


@on_device()
def test_a_device_trains_with_its_states_in_slabs() -> None:
    """Losses are those of the CPU, and nothing is out of order; what rests is pinned, several regions in a slab, as
    much as a plan says."""
    with simulated("check") as sim:
        found, (engine, regions) = _trained("sim", "fp32")
        there = [each for each in regions if each.device.type == "cpu" and each.numel()]
        assert there and all(each.is_pinned() for each in there)
        assert len({each.untyped_storage().data_ptr() for each in there}) < len(there)
        sharded = engine.sharded
        units = [unit.spec for unit in sharded.units]
        found_there = regions_in(Tier.HOST, sharded.layout, units, sharded.comm.mesh.sizes, num_moments=2)
        planned = pinned_bytes(nbytes for each in found_there.values() for nbytes in each)
        assert sharded.tiers.host.pinned == planned > 0
        engine.close()
        assert not sim.take().races
    alone, (engine, _) = _trained("cpu", "fp32")
    engine.close()
    assert found == pytest.approx(alone, rel=1e-5)
