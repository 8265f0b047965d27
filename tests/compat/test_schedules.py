"""The five schedules: public attributes, rates and betas are those of DeepSpeed 0.19.8 (golden numbers)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.runtime import lr_schedules as schedules
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.errors import ConfigError
from shardfold.testing import Ranks

STEPS = (0, 1, 3, 6, 10)  # after so many calls of `step()`


def adam() -> torch.optim.Optimizer:
    """Two groups, of rates 0.1 and 0.2."""
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.2)], lr=0.1)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


CYCLE = dict(cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4)
WARM = dict(warmup_num_steps=5)

# Rates of both groups after STEPS.
RATES: dict[str, tuple[Any, dict[str, Any], list[list[float]]]] = {
    "own rates": (
        schedules.WarmupLR, WARM, [[0, 0], [0, 0], [0.068261, 0.136521], [0.1, 0.2], [0.1, 0.2]],
    ),
    "a rate for each group": (
        schedules.WarmupLR, dict(WARM, warmup_min_lr=[0.01, 0.02], warmup_max_lr=[0.5, 0.6]),
        [[0.01, 0.02], [0.01, 0.02], [0.344477, 0.415912], [0.5, 0.6], [0.5, 0.6]],
    ),
    "decay": (
        schedules.WarmupDecayLR, dict(total_num_steps=12, warmup_num_steps=4),
        [[0, 0], [0, 0], [0.000792, 0.000792], [0.000875, 0.000875], [0.000375, 0.000375]],
    ),
    "cosine": (
        schedules.WarmupCosineLR,
        dict(total_num_steps=10, warmup_num_steps=4, warmup_min_ratio=0.1, cos_min_ratio=0.2, warmup_type="linear"),
        [[0, 0], [0.01, 0.02], [0.055, 0.11], [0.08, 0.16], [0.02, 0.04]],
    ),
    "range test": (
        schedules.LRRangeTest, dict(lr_range_test_step_size=3),
        [[0.001, 0.001], [0.001333, 0.001333], [0.002, 0.002], [0.003, 0.003], [0.004333, 0.004333]],
    ),
    "range test in stairs": (
        schedules.LRRangeTest,
        dict(lr_range_test_min_lr=[0.1, 0.2], lr_range_test_step_size=3, lr_range_test_staircase=True),
        [[0.1, 0.2], [0.1, 0.2], [0.2, 0.4], [0.3, 0.6], [0.4, 0.8]],
    ),
    "one cycle and its decay": (
        schedules.OneCycle,
        dict(CYCLE, cycle_min_lr=[0.1, 0.2], cycle_max_lr=[0.5, 0.6], cycle_second_step_size=3, decay_step_size=2,
             decay_lr_rate=0.1, decay_mom_rate=0.1),
        [[0.1, 0.2], [0.2, 0.3], [0.4, 0.5], [0.233333, 0.333333], [0.086957, 0.173913]],
    ),
    "one cycle in stairs": (
        schedules.OneCycle, dict(CYCLE, cycle_first_stair_count=2),
        [[0.1, 0.1], [0.1, 0.1], [0.3, 0.3], [0.3, 0.3], [0.1, 0.1]],
    ),
}  # fmt: skip

# Attributes of a new one.
PUBLIC: dict[str, dict[str, Any]] = {
    "own rates": dict(min_lrs=[0, 0], max_lrs=[0.1, 0.2], delta_lrs=[0.1, 0.2], warmup_num_steps=5, warmup_type="log",
                      inverse_log_warm_up=0.621334935, last_batch_iteration=-1),
    "a rate for each group": dict(min_lrs=[0.01, 0.02], max_lrs=[0.5, 0.6], delta_lrs=[0.49, 0.58]),
    "decay": dict(min_lrs=[0, 0], max_lrs=[0.001, 0.001], total_num_steps=12, inverse_log_warm_up=0.72134752),
    "cosine": dict(org_lrs=[0.1, 0.2], cos_min_ratio=0.2, warmup_min_ratio=0.1, total_num_steps=10, warmup_num_steps=4),
    "range test": dict(min_lr=[0.001, 0.001], step_size=3, step_rate=1, staircase=False),
    "range test in stairs": dict(min_lr=[0.1, 0.2], staircase=True),
    "one cycle and its decay": dict(
        min_lrs=[0.1, 0.2], max_lrs=[0.5, 0.6], first_step_size=4, second_step_size=3, total_size=7,
        step_ratio=0.571428571, first_stair_count=0, second_stair_count=0, decay_step_size=2, decay_lr_rate=0.1,
        decay_mom_rate=0.1, skip_lr_decay=False, skip_mom_decay=False, cycle_momentum=True,
        min_moms=[(0.8, 0.99), (0.8, 0.99)], max_moms=[(0.9, 0.99), (0.9, 0.99)],
    ),
    "one cycle in stairs": dict(first_stair_count=2, second_stair_count=2, step_ratio=0.5, skip_lr_decay=True),
}  # fmt: skip


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the face's logger says, which does not propagate."""
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING, logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)


def over_an_engine_s() -> None:
    model = nn.Linear(2, 2)
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    settings = {"train_batch_size": 1, "scheduler": section, "zero_optimization": {"stage": 2}}
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, _, schedule = initialize(model=model, optimizer=given, config=settings)
    by_hand = schedules.LRRangeTest(optimizer)
    assert schedule.optimizer is by_hand.optimizer is optimizer.optimizer is given
    engine.destroy()


def test_a_schedule_over_an_engine_s_optimizer_has_the_inner_one(ranks: Ranks) -> None:
    """By the config and by hand: whoever looks at ``schedule.optimizer`` finds the class that trains."""
    ranks.run(over_an_engine_s, world_size=1)


@pytest.mark.parametrize("name", RATES)
def test_rates_and_public_attributes_are_deepspeed_s(name: str) -> None:
    """Of each schedule the rates of both groups as it goes, and every attribute that DeepSpeed's shows."""
    kind, arguments, wanted = RATES[name]
    optimizer = adam()
    schedule = kind(optimizer, **arguments)
    for attribute, value in PUBLIC[name].items():
        found = getattr(schedule, attribute)
        assert found == value or found == pytest.approx(value), attribute
    found = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            found.append([group["lr"] for group in optimizer.param_groups])
        schedule.step()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)


def test_one_cycle_cycles_a_momentum_for_each_group(said: pytest.LogCaptureFixture) -> None:
    """A list has one for each group; betas go against the rate; an optimizer without betas is told of once."""
    optimizer = adam()
    schedule = schedules.OneCycle(optimizer, **CYCLE, cycle_min_mom=[0.7, 0.75], cycle_max_mom=[0.85, 0.9])
    assert [group["betas"] for group in optimizer.param_groups] == [(0.7, 0.99), (0.75, 0.99)]
    assert schedule.get_mom() == [(0.85, 0.99), (0.9, 0.99)]  # of the curve: the groups begin elsewhere
    for _ in range(3):
        schedule.step()
    wanted = [(0.7375, 0.99), (0.7875, 0.99)]
    for found in (schedule.get_mom(), [group["betas"] for group in optimizer.param_groups]):
        assert found is not None and [pytest.approx(pair) for pair in wanted] == found
    plain = sgd()
    without = schedules.OneCycle(plain, **CYCLE)
    assert without.cycle_momentum is False and without.get_mom() is None and not hasattr(without, "min_moms")
    without.step()
    assert plain.param_groups[0]["momentum"] == 0.9
    assert said.text.count("cycle_momentum is disabled, as SGD has no betas") == 1


@pytest.mark.parametrize(
    "kind, arguments",
    [
        (schedules.WarmupLR, WARM),
        (schedules.WarmupDecayLR, dict(total_num_steps=9, warmup_max_lr=None, warmup_num_steps=5)),
        (schedules.WarmupCosineLR, dict(total_num_steps=9, warmup_num_steps=5)),
    ],
)
def test_an_unknown_warmup_type_is_log(kind: Any, arguments: dict[str, Any], said: pytest.LogCaptureFixture) -> None:
    """DeepSpeed warns and goes on with its default."""
    unknown, known = kind(adam(), **arguments, warmup_type="cubic"), kind(adam(), **arguments)
    assert unknown.warmup_type == "log" and "unknown warmup_type: cubic" in said.text
    for _ in range(4):
        unknown.step()
        known.step()
        assert unknown.get_last_lr() == known.get_last_lr()


def test_what_is_no_optimizer_or_no_argument_is_a_type_error() -> None:
    """As of DeepSpeed's; it is a sentence of ours too."""
    for make in (lambda: schedules.WarmupLR(3), lambda: schedules.WarmupLR(adam(), warmup_nm_steps=3)):
        for kind in (TypeError, ConfigError):
            with pytest.raises(kind, match=r"not a torch\.optim\.Optimizer|Did you mean 'warmup_num_steps'"):
                make()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def three_groups(model: nn.Sequential, where: int) -> tuple[torch.optim.Optimizer, Any]:
    """One of them without parameters."""
    groups: list[Any] = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], "lr": 0.01}]
    groups.insert(where, {"params": [], "lr": 1.0})
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s, k=k: 1 / (1 + k * s) for k in range(3)])


def with_an_empty_group(stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    for where in (0, 1):
        plain, model = two_layers(), two_layers()
        optimizer, schedule = three_groups(plain, where)
        mine, its = three_groups(model, where)
        engine, shown, _, _ = initialize(model=model, optimizer=mine, lr_scheduler=its, config=config)
        for _ in range(3):
            optimizer.zero_grad()
            plain(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        assert [group["lr"] for group in shown.param_groups] == [group["lr"] for group in optimizer.param_groups]
        state = engine.module_state_dict()
        assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in plain.state_dict().items())
        engine.destroy()
    model = two_layers()
    alone = torch.optim.SGD([{"params": [*model.parameters()]}, {"params": []}], lr=0.1)
    engine, shown, _, _ = initialize(model=model, optimizer=alone, config=config)
    assert len(shown.param_groups) == 1  # as DeepSpeed has it
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_goes_on_with_the_groups_that_it_was_made_of(ranks: Ranks, stage: int) -> None:
    """A group without parameters, such as an adapter's of what does not decay, is taken away, as by DeepSpeed, only
    where no schedule counts it: the rates of those behind it would be others'."""
    ranks.run(with_an_empty_group, stage, world_size=2)
