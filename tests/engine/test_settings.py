"""Settings of the optimizer may change between steps, and have to do so alike on all ranks, or replicas would drift."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.optim import OneBitAdam
from shardfold.testing import Ranks
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=0.5, betas=(0.5, 0.75))
LIMIT = 60.0  # seconds


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ADAMW([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}])


def batch(rank: int) -> torch.Tensor:
    return torch.arange(8.0, dtype=torch.float64).reshape(2, 4) / 8 + rank


def backward(engine: sf.Engine) -> None:
    engine.backward(engine(batch(engine.rank)).square().mean())


def groups_of(engine: sf.Engine) -> list[dict[str, Any]]:
    assert engine.optimizer is not None
    return engine.optimizer.param_groups


def set_all(groups: list[dict[str, Any]], setting: str, value: Any) -> None:
    for group in groups[1:] or groups:
        group[setting] = value


def drifting(layout: str, setting: str, value: Any) -> tuple[str, list[torch.Tensor], int]:
    """What a step with another setting on rank 1 raises; what the same step leads to with that setting on all ranks."""
    with closing(sf.Engine(build(), optimizer=in_groups, layout=layout)) as engine:
        backward(engine)
        engine.step()
        backward(engine)
        groups = groups_of(engine)
        if engine.rank == 1:
            set_all(groups, setting, value)
        said = ""
        try:
            engine.step()
        except ConfigError as error:
            said = str(error)
        set_all(groups, setting, value)
        engine.step()
        with engine.gathered():
            return said, [p.detach().clone() for p in engine.module.parameters()], engine.steps


def plain(setting: str, value: Any, ranks: int) -> list[torch.Tensor]:
    model = build()
    optimizer = in_groups(list(model.parameters()))
    for step in range(2):
        if step:
            set_all(optimizer.param_groups, setting, value)
        optimizer.zero_grad()
        torch.stack([model(batch(rank)).square().mean() for rank in range(ranks)]).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("layout", "setting", "value"),
    [("ddp", "lr", 0.25), ("zero3", "weight_decay", 0.5), ("zero2", "betas", (0.5, 0.5))],
)
def test_a_setting_that_one_rank_changes_is_told_on_all_and_nothing_is_lost(
    ranks: Ranks, layout: str, setting: str, value: Any
) -> None:
    was = {"lr": 0.5, "weight_decay": 0.0, "betas": (0.5, 0.75)}[setting]
    for said, values, steps in ranks.run(drifting, layout, setting, value, world_size=2, timeout=LIMIT):
        assert said == (
            f"engine.step(): the optimizer's settings of rank 1 differ from rank 0's ({setting}={value} in group 1 and "
            f"{setting}={was} in group 1): nothing was updated; set the same in engine.optimizer.param_groups on every "
            "rank, or give all of them the same schedule, and call engine.step() again."
        )
        assert steps == 2
        for mine, theirs in zip(values, plain(setting, value, 2), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def _gone_on(folder: str) -> str:
    """Saves a run, and goes on with it: each rank sets the rate that its own command line says."""
    rank = dist.get_rank()
    for resumes in (False, True):
        with closing(sf.Engine(build(), optimizer=ADAMW, layout="zero1")) as engine:
            if resumes:
                engine.load(f"{folder}/run")
                groups_of(engine)[0]["lr"] = (0.1, 0.2)[rank]
            backward(engine)
            try:
                engine.step()
            except ConfigError as error:
                return str(error)
            engine.save(f"{folder}/run", wait=True)
    return ""


def test_a_run_that_goes_on_with_another_rate_on_one_rank_is_told_in_its_first_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    for said in ranks.run(_gone_on, str(tmp_path), world_size=2, timeout=LIMIT):
        assert "of rank 1 differ from rank 0's (lr=0.2 in group 0 and lr=0.1 in group 0)" in said


def _staged() -> tuple[int, str]:
    """Rank 3 (the second stage) takes another rate than rank 2; the first stage has one of its own."""
    rank, said = dist.get_rank(), ""
    model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"pipeline": 2, "intra": 2}
    sgd = partial(torch.optim.SGD, lr=0.5)
    with closing(
        sf.Engine(model, optimizer=sgd, parallel=sf.Parallel(mesh=mesh, stages=["1"]), layout="zero1", accumulate=2)
    ) as engine:
        for other in (0.0, 0.5):
            groups_of(engine)[0]["lr"] = (0.125, 0.125, 0.25, 0.25 + other)[rank]
            engine.train_batch(torch.ones(4, 4), lambda model, part: model(part).sum())
            try:
                engine.step()
            except ConfigError as error:
                said = str(error)
        return engine.steps, said


def test_stages_have_rates_of_their_own_and_all_hear_of_one_whose_ranks_differ(ranks: Ranks) -> None:
    for steps, said in ranks.run(_staged, world_size=4, timeout=LIMIT):
        assert steps == 1
        assert "of rank 3 differ from rank 2's (lr=0.75 in group 0 and lr=0.25 in group 0)" in said, said


def _apart(outer: sf.Outer | sf.Signs) -> tuple[str, int]:
    """Two groups of one rank each, which have a rate each."""
    with closing(
        sf.Engine(
            nn.Linear(4, 4),
            optimizer=OneBitAdam if isinstance(outer, sf.Signs) else ADAMW,
            **grouped(layout="zero1", mesh={"inter": 2, "intra": 1}, outer=outer),
        )
    ) as engine:
        groups_of(engine)[0]["lr"] = (0.1, 0.2)[engine.rank]
        engine.backward(engine(torch.ones(2, 4)).sum())
        try:
            engine.step()
        except ConfigError as error:
            return str(error), engine.steps
        return "", engine.steps


def test_groups_that_send_signs_in_each_step_have_one_rate_and_those_of_outer_steps_their_own(ranks: Ranks) -> None:
    for said, steps in ranks.run(_apart, sf.Signs(block=32), world_size=2, timeout=LIMIT):
        assert "of rank 1 differ from rank 0's (lr=0.2 in group 0 and lr=0.1 in group 0)" in said and steps == 0
    assert ranks.run(_apart, sf.Outer(every=2), world_size=2, timeout=LIMIT) == [("", 1), ("", 1)]
