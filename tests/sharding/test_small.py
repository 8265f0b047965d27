"""Small parameters that rest whole where others are split: the same training, bytes as said, whatever the layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import LayoutError
from shardfold.sharding.freed import FreedParameter
from shardfold.testing import Ranks
from tests.support import models
from tests.tiers.test_offload import make, states, train

SMALL = 100  # elements: of the model here norms and biases, and no matrix
CASES: list[tuple[str, dict[str, Any]]] = [
    ("zero3", {"accumulate": 2}),
    ("zero3", {"precision": "fp16", "loss_scale": sf.LossScale(initial=2.0**40), "activations": "recompute"}),
    ("hpz", {"precision": "bf16", "mesh": {"inter": 2, "intra": 1}}),
    ("infinity", {"precision": "bf16"}),
    ("zero3", {"offload": {"optimizer": "host:0.5"}, "precision": "bf16"}),
    ("zero3", {"precision": {"embedding": "fp32", "*": "bf16"}, "overlap": sf.Overlap(update_thread=True)}),
]


def small(layout: str, most: int = SMALL) -> sf.Layout:
    return sf.PRESETS[layout].edit("params", small=most)


def _compare(case: int, most: int) -> list[str]:
    """What is different from training where all are split; what of bytes is not as said."""
    layout, options = CASES[case]
    split = make(layout, **options)
    losses, values = train(split, 3), states(split)
    split.close()
    engine = make(small(layout, most), **options)
    wrong = [] if train(engine, 3) == losses else ["losses"]
    for name, p in engine.module.named_parameters():
        if isinstance(p, FreedParameter) == (p.numel() <= most):
            wrong.append(f"{name} of {p.numel()} is {type(p).__name__}")
        elif p.numel() <= most and not torch.equal(p, values[name].to(p.dtype)):
            wrong.append(f"{name} outside")
    found = states(engine)
    wrong += [name for name in values if not torch.equal(values[name], found[name])]
    assert engine._updater is not None
    wrong += [f"{row} of the table" for row in engine.memory().rows if row.held != row.table + row.padding]
    traffic = engine.traffic()
    wrong += [f"{row} of the program" for row in traffic.rows if row.sent != row.program]
    wrong += [f"{row} of the program" for row in traffic.moved if row.moved != row.program or not row.calls]
    passes = [op for section in ("forward", "backward") for op in engine.program.section(section)]
    own = [op for op in (*passes, *engine.program.step) if op.unit == "(small)" and op.verb in ("ALL_GATHER", "FREE")]
    wrong += [] if [op.target for op in own] == ["params"] else [f"gathered by {own}"]
    engine.close()
    return wrong


@pytest.mark.sampled(5)
@pytest.mark.parametrize("most", [SMALL, 10**9])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{i}-{name}" for i, (name, _) in enumerate(CASES)])
def test_training_is_the_same_and_they_are_read_outside(ranks: Ranks, case: int, most: int) -> None:
    """Losses, values and moments are those of all split, to the bit; what is small is read without a gather, and one
    gather behind the update brings it; bytes held, sent and moved are the table's and the program's. Also where all
    parameters of the model are small."""
    assert ranks.run(_compare, case, most, world_size=2) == [[]] * 2


def _alone() -> tuple[bool, int, bool]:
    engine = make(small("zero3"))
    split, host = make("zero3"), make(small("infinity"))
    same = [u.name for u in engine.units] == [u.name for u in split.units]
    table = next(u.spec.table_or(host.layout) for u in host.units if u.name == "(small)")
    for each in (engine, split, host):
        each.close()
    return same, engine.layout.small, table.rest.tier is sf.Tier.DEVICE


def test_one_rank_has_no_such_unit_unless_parameters_rest_on_the_host(ranks: Ranks) -> None:
    assert ranks.run(_alone, world_size=1) == [(True, 0, True)]


def _saves(folder: str, layout: str, most: int) -> None:
    engine = make(small(layout, most) if most else layout)
    train(engine, 2)
    engine.save(folder, wait=True)
    engine.close()


def _goes_on(folder: str, layout: str, most: int) -> list[float]:
    engine = make(small(layout, most) if most else layout)
    engine.load(folder)
    losses = train(engine, 2, first=2)
    engine.close()
    return losses


def test_checkpoints_know_nothing_of_it(ranks: Ranks, tmp_path: Path) -> None:
    """One that was saved with small parameters whole goes on without, and the other way round."""
    ranks.run(_saves, str(tmp_path / "whole" / "step"), "zero3", SMALL, world_size=2)
    ranks.run(_saves, str(tmp_path / "split" / "step"), "zero3", 0, world_size=2)
    wanted = ranks.run(_goes_on, str(tmp_path / "split" / "step"), "zero3", 0, world_size=2)
    assert ranks.run(_goes_on, str(tmp_path / "whole" / "step"), "zero3", 0, world_size=2) == wanted
    assert ranks.run(_goes_on, str(tmp_path / "split" / "step"), "zero3", SMALL, world_size=2) == wanted


def _unfrozen() -> tuple[list[float], list[float]]:
    """Parameters that come to train later change the units."""
    found: list[list[float]] = []
    for layout in ("zero3", small("zero3")):
        torch.manual_seed(0)
        model = models.Small()
        later = [p for name, p in model.named_parameters() if "bias" in name]
        for p in later:
            p.requires_grad_(False)
        engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2), layout=layout)
        losses = train(engine, 1)
        for p in later:
            p.requires_grad_(True)
        assert engine.optimizer is not None
        engine.optimizer.add_param_group({"params": later})
        found.append(losses + train(engine, 2, first=1))
        engine.close()
    return found[0], found[1]


def test_small_parameters_may_be_unfrozen(ranks: Ranks) -> None:
    split, whole = ranks.run(_unfrozen, world_size=2)[0]
    assert split == whole


def test_what_is_small_is_of_params() -> None:
    for state, value in (("master", 5), ("params", -1), ("params", 2.5), ("params", True)):
        with pytest.raises(LayoutError, match=f"{state} has small=.*: it is a number of elements, of params"):
            sf.PRESETS["zero3"].edit(state, small=value)
    text = str(small("zero3", 1000))
    assert "params" in text.splitlines()[1] and "whole where there are 1,000 elements or fewer" in text.splitlines()[1]


class Bits(nn.Module):
    """All of it is small, in bf16, as what is given to it then is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return self.layer(x)


def _narrow() -> None:
    engine = sf.Engine(Bits(), optimizer=torch.optim.SGD, layout=small("zero3"), precision="bf16")
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.close()


def test_inputs_are_cast_where_all_is_small(ranks: Ranks) -> None:
    ranks.run(_narrow, world_size=2)
