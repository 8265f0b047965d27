"""A part of the optimizer's states stays on the device: which units, where their bytes are, and the same training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError, ShardfoldError
from shardfold.plan.explain import explain_preset
from shardfold.plan.layout import Layout
from shardfold.plan.offload import staying
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.presets import PRESETS
from shardfold.plan.program import MOVES
from shardfold.testing import Ranks
from shardfold.testing.simulated import is_supported, simulated
from tests.tiers.test_offload import make, states, train

MESH = {"inter": 1, "intra": 2}


def unit(name: str, numel: int, *, trainable: bool = True) -> UnitSpec:
    slots = (Slot("w", (numel,), 0),)
    return UnitSpec(name, (SegmentSpec(slots, numel, "fp32", trainable),), root=name == "(root)")


def bound(share: float) -> Layout:
    table = PRESETS["offload"].edit("master", "moments", share=share)
    return table.bind(sf.Precision(), MESH)


def test_what_backward_finishes_last_stays() -> None:
    """The root, then the units that forward runs first, as many as fit into what is not to be moved; a unit that does
    not fit lets the next one stay; frozen ones have no states."""
    units = [unit("a", 400), unit("b", 200), unit("c", 200), unit("d", 100, trainable=False), unit("(root)", 200)]
    for share, names in (
        (1.0, ""),
        (0.9, ""),
        (0.8, "(root)"),
        (0.6, "(root) b"),
        (0.3, "(root) a"),
        (0.01, "(root) a b"),
    ):
        assert staying(units, bound(share)) == set(names.split()), share
        assert sum(400 if n == "a" else 200 for n in names.split()) <= 1000 - share * 1000


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("zero2", "host:0.5", {"precision": "bf16", "clip_norm": 0.05, "accumulate": 2}),
    ("zero3", {"optimizer": "host:0.5"}, {"precision": "fp16", "loss_scale": sf.LossScale(initial=2.0**40)}),
    ("fsdp2", "host:0.3", {"precision": "bf16", "overlap": sf.Overlap(update_thread=True)}),
    ("ddp", "host:0.5", {"clip_norm": 0.05}),
    ("zero3", {"moments": "disk:0.5"}, {}),
    ("zero1", {"optimizer": "host:0.5"}, {"optimizer": partial(torch.optim.Adagrad, lr=1e-2), "clip_norm": 0.05}),
]


def _compare(case: int) -> list[str]:
    """What is different from training without slower tiers; what of bytes is not as said."""
    layout, offload, options = CASES[case]
    near = make(layout, **options)
    losses, values = train(near, 3), states(near)
    near.close()
    far = make(layout, offload=offload, **options)
    wrong = [] if train(far, 3) == losses else ["losses"]
    found = states(far)
    wrong += [name for name in values if not torch.equal(values[name], found[name])]
    assert far._updater is not None
    rows = [row for row in far.memory().rows if far._updater.fused or row.state != "moments"]
    wrong += [f"{row} of the table" for row in rows if row.held != row.table + row.padding]
    wrong += [f"{row} of the program" for row in far.traffic().moved if row.moved != row.program or not row.calls]
    share, slower = far.layout.share, str(far.layout.moments.tier)
    held = {row.tier: row.held for row in far.memory().rows if row.state == "moments"}
    wrong += [] if len(held) == 2 and held[slower] >= share * sum(held.values()) else [f"moments are {held}"]
    moved = {op.unit for op in (*far.program.step, *far.program.beside) if op.verb in MOVES or op.tier}
    stays = [u.name for u in far.units if u.name not in moved]
    wrong += [] if stays and set(stays) < {u.name for u in far.units} else [f"updated on the device: {stays}"]
    wrong += [] if far.explain().count("stay on the device") == len(stays) else [far.explain()]
    far.close()
    return wrong


@pytest.mark.sampled(12)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{offload}" for name, offload, _ in CASES])
def test_training_is_the_same_whatever_part_stays(ranks: Ranks, case: int, world: int) -> None:
    """Losses, values and moments equal to the bit; at least the share rests in the slower tier and not all of it; bytes
    held are the table's, bytes moved the program's."""
    assert ranks.run(_compare, case, world_size=world) == [[]] * world


def _on_the_device(offload: str | Mapping[str, str] | None) -> tuple[list[float], dict[str, int]]:
    with simulated() as sim:
        engine = make("zero2", offload=offload, precision="bf16", clip_norm=0.05, device="sim")
        losses = train(engine, 3)
        held = engine.memory().tiers
        engine.close()
        sim.expect_clean()
    return losses, held


@pytest.mark.soak
@pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")
def test_a_device_updates_its_part(sim_ranks: Ranks) -> None:
    """Where both have memory of their own: losses as with all of it on the device, nothing out of order, and bytes on
    the device between those of all and of none."""
    all_here, none_here, some = (
        sim_ranks.run(_on_the_device, offload, world_size=2)[0] for offload in (None, "host", "host:0.5")
    )
    assert some[0] == pytest.approx(all_here[0], rel=2.0**-6)
    assert none_here[1]["device"] < some[1]["device"] < all_here[1]["device"]
    assert 0 < some[1]["host"] <= none_here[1]["host"]  # so few that all of it is in one slab


def test_explain_says_what_stays() -> None:
    """A preset with a share: of which units, and the bytes of each state in each tier, before anything runs."""
    text = explain_preset(PRESETS["offload"].edit("master", "moments", share=0.4), mesh=MESH, params=100_000)
    assert "host, 0.4 of it or more" in text and text.count("stay on the device") == 2
    assert "  (host)" in text and "UPDATE (root)\n" in text and "UPDATE block.1 @host" in text


REFUSED: dict[str, tuple[dict[str, Any], type[ShardfoldError], str]] = {
    "none of it": ({"offload": "host:0"}, ConfigError, "after 'host:' give which part .* and not '0'"),
    "no number": ({"offload": {"optimizer": "disk:half"}}, ConfigError, "as in 'disk:0.7', and not 'half'"),
    "a tier": ({"offload": "hots:0.5"}, ConfigError, "Did you mean 'host'"),
    "of gradients": ({"offload": {"optimizer": "host", "grads": "host:0.5"}}, ConfigError, "where its master is, so"),
    "of parameters": ({"offload": {"params": "host:0.5"}}, LayoutError, "but master on the device"),
    "of parameters on the device": ({"offload": {"params": "device:0.5"}}, LayoutError, "params have share=0.5 but"),
    "of moments alone": (
        {"offload": {"master": "host", "moments": "host:0.5"}},
        LayoutError,
        "give master and moments",
    ),
    "of what is gathered": (
        {"layout": "infinity", "offload": {"optimizer": "host:0.5"}},
        LayoutError,
        "leave the share",
    ),
    "on the device": ({"offload": {"moments": "device:0.5"}}, LayoutError, "it is of a slower tier; leave it out"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_share_is_refused_in_a_sentence(case: tuple[dict[str, Any], type[ShardfoldError], str]) -> None:
    options, kind, words = case
    with pytest.raises(kind, match=words):
        make(**{"layout": "zero3", **options})


def _with_parameters_apart(offload: Mapping[str, str]) -> list[str]:
    """What is different from training with all parameters on the device."""
    options: dict[str, Any] = {"precision": "bf16", "clip_norm": 0.05, "accumulate": 2}
    near = make("zero3", **options)
    losses, values = train(near, 3), states(near)
    near.close()
    far = make("infinity", offload=offload, **options)
    wrong = [] if train(far, 3) == losses else ["losses"]
    found = states(far)
    wrong += [name for name in values if not torch.equal(values[name], found[name])]
    rows = [row for row in far.memory().rows if row.state == "params"]
    held = {row.tier: row.held for row in rows}
    wrong += [f"{row} of the table" for row in rows if row.held != row.table + row.padding]
    wrong += [f"{row} of the program" for row in far.traffic().moved if row.moved != row.program or not row.calls]
    slower = sum(num_bytes for tier, num_bytes in held.items() if tier != "device")
    wrong += [] if sum(held.values()) / 2 <= slower < sum(held.values()) else [f"params are {held}"]
    wrong += [] if "(parameters stay on the device)" in far.explain() else [far.explain()]
    far.close()
    return wrong


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_training_is_the_same_whatever_part_of_the_parameters_stays(ranks: Ranks, tier: str) -> None:
    """With the other states where they were: equal to the bit, bytes as the table and the program say."""
    states = {"optimizer": tier, "grads": tier} if tier == "disk" else {}
    assert ranks.run(_with_parameters_apart, {"params": f"{tier}:0.5", **states}, world_size=2) == [[]] * 2
