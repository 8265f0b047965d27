"""A device that lags finds what one that does not lag finds: as little as possible waits for what was queued before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfold.testing.simulated import simulated
from tests.support.simulated import F, on_device


def _index() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.long, pin_memory=True).to("sim", non_blocking=True)


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "layer_norm": lambda y: F.layer_norm(y, (8,)),
    "batch_norm": lambda y: F.batch_norm(y, None, None, training=True),
    "batch_norm that evaluates": lambda y: F.batch_norm(y, y.new_zeros(8), y.new_ones(8)),
    "eigenvalues": lambda y: torch.linalg.qr(y),
    "embedding": lambda y: F.embedding(_index(), y),
    "dropout": F.dropout,
    "dropout in place": lambda y: F.dropout(y, inplace=True),
    "normal_": lambda y: y.normal_(),
    "multinomial": lambda y: torch.multinomial(y, 1),
    "randperm": lambda y: y[torch.randperm(8, device="sim")],
    "sort": lambda y: y.sort(),
    "a result that is empty": lambda y: (y[:0] + 1, y + 1),
    "behind another's dropout": lambda y: (F.dropout(torch.ones(4, device="sim")), y + 1),
    "behind another's rand": lambda y: (torch.rand(4, device="sim"), y + 1),
}


@pytest.mark.sampled(28)
@pytest.mark.parametrize("mode", ["check", "lazy"])
@pytest.mark.parametrize("name", USES)
@on_device()
def test_what_is_used_too_early_is_found(name: str, mode: str) -> None:
    """Also by the first call of an operation, by random numbers and behind them: nothing waits uncounted."""
    with simulated(mode) as sim:
        y = torch.ones(8, 8, device="sim")  # what is read too early: multinomial refuses what memory may hold by chance
        side = torch.sim.Stream()  # type: ignore[attr-defined]
        side.wait_stream(torch.sim.current_stream())  # type: ignore[attr-defined]
        with torch.sim.stream(side):  # type: ignore[attr-defined]
            y.add_(1)
        USES[name](y)
        assert [race.kind for race in sim.races][:1] == ["unordered"]
        assert not sim.host_syncs


@on_device()
def test_layouts_that_the_meta_device_does_not_know() -> None:
    """BatchNorm that trains and evaluates by turns, in several shapes, gives what the CPU gives."""
    with simulated("lazy", lag=200) as sim:
        for n in (4, 6, 4):
            for training in (True, False, True):
                x = torch.arange(float(n * 3)).view(n, 3)
                mean, var = torch.zeros(3), torch.ones(3)
                expected = F.batch_norm(x, mean, var, training=training)
                there, mean_there, var_there = x.to("sim"), torch.zeros(3, device="sim"), torch.ones(3, device="sim")
                found = F.batch_norm(there, mean_there, var_there, training=training)
                assert torch.equal(found.cpu(), expected) and torch.equal(mean_there.cpu(), mean)
        sim.expect_clean()
