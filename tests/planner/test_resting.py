"""What a plan says of states at rest is what an engine has of them, to the byte: also of codes, and of optimizers that
keep something else than moments of each element."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.plan.lifetimes import CPU
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.testing import Ranks
from tests.support.adapted import Adapted, batches

BASES = ["nf4/64", "nf4/64+double", "int8/64", "int2/32+double"]


def galore(model: nn.Module, bits: int = 32) -> Any:
    return sf.optim.GaLore(sf.optim.galore_groups(model, rank=4), lr=1e-3, bits=bits, min_8bit_size=256)


def whole() -> nn.Module:
    return Adapted(layers=2).requires_grad_(True)


def parts(kind: Any, model: nn.Module) -> Any:
    return kind([p for p in model.parameters() if p.requires_grad], lr=1e-3)


ADAM = partial(parts, torch.optim.AdamW)
OPTIMIZERS: dict[str, Any] = {
    "adamw": ADAM, "galore": galore, "galore8bit": partial(galore, bits=8), "lion": partial(parts, sf.optim.Lion),
    "adamw8bit": partial(parts, sf.optim.AdamW8bit), "adafactor": partial(parts, sf.optim.Adafactor),
    "muon": lambda model: sf.optim.Muon(sf.optim.muon_groups(model, lr=1e-3, adamw_lr=1e-3)),
}  # fmt: skip


def _wrong(cases: list[tuple[str, str, Any]]) -> list[str]:
    """Where plan and engine differ on this rank; of optimizers that have owners of matrices, on the one with the
    most."""
    found = list[str]()
    for layout, base, optimizer in cases:
        build = Adapted if base else whole
        table = sf.PRESETS[layout].replace(base=base or None)
        make = OPTIMIZERS[optimizer]
        model, batch = build(), batches(1)[0]
        engine = sf.Engine(model, optimizer=make(model), layout=table)
        engine.backward(engine(batch))
        engine.step()
        rank = PlannedRank(mesh=engine.mesh.sizes.axes, precision="fp32", clip=False, behaviour=CPU)
        setting, _ = rank.plan(Subject(build(), batch, optimizer=make), table, "keep")
        planned = {(state, str(tier)): n for (state, tier), n in setting.resting().items()}
        held = {(row.state, str(row.tier)): row.held for row in engine.memory().rows}
        if optimizer.startswith("galore"):
            held |= {key: engine.max_over_ranks([float(n)])[0] for key, n in held.items() if key[0] == "moments"}
        if planned != {key: n for key, n in held.items() if n}:
            found.append(f"{layout}+{base} {optimizer}: planned {planned}, held {held}")
        engine.close()
    return found


QUICK = [("zero3", "nf4/64", "adamw"), ("infinity", "nf4/64+double", "adamw"), ("zero3", "", "galore")]


def test_states_at_rest_are_as_planned(ranks: Ranks) -> None:
    assert ranks.run(_wrong, QUICK, world_size=2) == [[], []]


@pytest.mark.soak
@pytest.mark.parametrize("count", [2, 3])
def test_states_at_rest_are_as_planned_under_every_layout(count: int, ranks: Ranks) -> None:
    cases = [(layout, base, "adamw") for layout in sf.PRESETS for base in BASES]
    cases += [(layout, "", name) for layout in ("ddp", "zero2", "zero3", "infinity") for name in OPTIMIZERS]
    cases += [("zero3", "nf4/64", name) for name in OPTIMIZERS]
    for wrong in ranks.run(_wrong, cases, world_size=count):
        assert wrong == []
