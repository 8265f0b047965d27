"""Every architecture of the zoo trains as in plain PyTorch, under every layout, on 2 and 3 ranks.

Losses and gradient norms of AdamW steps are compared, with clipping, because Adam alone hides a wrong factor. Final
parameters are not: some have a gradient that is zero but for rounding (the bias of an attention's keys), which Adam
makes into whole steps. The gradients of the first step are, parameter by parameter; for a mixture of experts only they
are, because a rounding error can send a token to another expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.testing import Ranks, same_training
from tests.support import zoo

STEPS = 5
LR = 2.0**20  # of the step that shows a gradient: so long that rounding in the parameter does not count

Setting = tuple[str, int, Mapping[str, int] | None]  # layout, ranks, mesh

# Layouts that tell nodes apart: all ranks in one node, each rank a node of its own, and two nodes of two.
EVERY: list[Setting] = [
    (layout, world, mesh)
    for layout in sf.PRESETS
    for world in (2, 3)
    for mesh in ([{"inter": 1, "intra": world}, {"inter": world, "intra": 1}] if layout in ("hsdp", "hpz") else [None])
] + [(layout, 4, {"inter": 2, "intra": 2}) for layout in ("hsdp", "hpz")]
# Those that free parameters.
SPLIT: list[Setting] = [
    ("zero3", 2, None),
    ("fsdp2", 3, None),
    ("hpz", 2, {"inter": 2, "intra": 1}),
    ("zero3", 3, None),
    ("hsdp", 2, {"inter": 1, "intra": 2}),
    ("fsdp2", 2, None),
    ("hpz", 3, {"inter": 1, "intra": 3}),
    ("hsdp", 4, {"inter": 2, "intra": 2}),
    ("hpz", 4, {"inter": 2, "intra": 2}),
]
KINDS = {
    "decoder", "encoder", "encoder-decoder", "vision", "vision and text", "audio", "mixture of experts", "state space",
    "adapter",
}  # fmt: skip
STEADY = [name for name, entry in zoo.ZOO.items() if not entry.routed]


def show(setting: Setting) -> str:
    layout, world, mesh = setting
    return f"{layout}-{world}" if mesh is None else f"{layout}-{mesh['inter']}x{mesh['intra']}"


def paired(names: list[str], settings: list[Setting]) -> list[Any]:
    """Each name with one setting, taken in turn."""
    pairs = [(name, settings[i % len(settings)]) for i, name in enumerate(names)]
    return [pytest.param(name, setting, id=f"{name}-{show(setting)}") for name, setting in pairs]


def check_losses(ranks: Ranks, name: str, setting: Setting) -> None:
    layout, world, mesh = setting
    same_training(
        partial(zoo.build, name), zoo.batches(name), layout=layout, world_size=world, parallel=mesh, clip_norm=1.0,
        optimizer=partial(torch.optim.AdamW, lr=zoo.ZOO[name].lr, weight_decay=0.1), steps=STEPS, ranks=ranks,
        loss=partial(zoo.loss, name), tol=1e-6,
    )  # fmt: skip


def _plain_gradients(name: str, slices: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, (batch,) = zoo.build(name), zoo.batches(name, 1)
    for i in range(slices):
        part = {key: value.chunk(slices)[i] for key, value in batch.items()}
        (zoo.loss(name, model(**part), part) / slices).backward()
    return {
        key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters() if p.requires_grad
    }


def _whole_and_sliced(name: str, slices: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return _plain_gradients(name, 1), _plain_gradients(name, slices)


def _sharded_gradients(name: str, layout: str, mesh: Mapping[str, int] | None) -> dict[str, Tensor]:
    import torch.distributed as dist

    torch.manual_seed(0)
    model, (batch,) = zoo.build(name), zoo.batches(name, 1)
    before = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=LR), layout=layout, parallel=mesh)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        part = {key: value.chunk(world)[rank] for key, value in batch.items()}
        engine.backward(zoo.loss(name, engine(**part), part))
        engine.step()
        after = engine.state_dict()
    finally:
        engine.close()
    return {key: (value - after[key]) / LR for key, value in before.items()} if rank == 0 else {}


def check_gradients(ranks: Ranks, name: str, setting: Setting) -> None:
    """Each parameter's gradient to 1e-6 of its norm, or, where it is zero but for rounding, of a hundredth of the
    largest norm.

    A few are sums over so many pixels that plain PyTorch itself departs by more when the batch comes in as many slices
    as there are ranks: those may depart by as much again.
    """
    layout, world, mesh = setting
    whole, sliced = ranks.run(_whole_and_sliced, name, world, world_size=1, distributed=False)[0]
    actual = ranks.run(_sharded_gradients, name, layout, mesh, world_size=world)[0]
    assert actual.keys() == whole.keys()
    largest = max(value.norm().item() for value in whole.values())
    assert largest > 0
    wrong = {}
    for key, value in whole.items():
        size = max(value.norm().item(), 1e-2 * largest)
        rounding = (sliced[key] - value).norm().item()
        apart = (actual[key] - value).norm().item()
        if not (apart <= 1e-6 * size + rounding and rounding <= 1e-4 * size):
            wrong[key] = f"{apart:.3g} apart, of norm {value.norm().item():.3g}; {rounding:.3g} by slicing alone"
    assert not wrong, f"{name} under {show(setting)}: {len(wrong)} of {len(whole)} gradients differ: {wrong}"


def test_the_zoo_has_every_kind() -> None:
    assert {entry.kind for entry in zoo.ZOO.values()} == KINDS
    assert len(zoo.ZOO) == 44  # as docs/promises.md says


@pytest.mark.sampled(42)
@pytest.mark.parametrize(("name", "setting"), paired(STEADY, SPLIT))
def test_an_architecture_trains_as_in_plain_pytorch(ranks: Ranks, name: str, setting: Setting) -> None:
    check_losses(ranks, name, setting)


# Of those whose losses are compared, every sixth.
@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "setting"), paired([n for i, n in enumerate(zoo.ZOO) if i % 6 == 0 or n not in STEADY][::-1], EVERY)
)
def test_gradients_of_the_first_step_are_those_of_plain_pytorch(ranks: Ranks, name: str, setting: Setting) -> None:
    check_gradients(ranks, name, setting)


# Each of them on a third of the meshes, in turn.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "setting"),
    [case for part in range(len(EVERY) // 3) for case in paired(list(zoo.ZOO), EVERY[3 * part :] + EVERY[: 3 * part])],
)
def test_every_architecture_under_every_third_setting(ranks: Ranks, name: str, setting: Setting) -> None:
    check_gradients(ranks, name, setting)
    if not zoo.ZOO[name].routed:
        check_losses(ranks, name, setting)
