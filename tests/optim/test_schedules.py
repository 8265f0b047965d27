"""Learning-rate schedules have the curves of the classes that they are named after, for every group."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support import models

BACKBONE, HEAD = 1e-3, 4e-3
CURVES = Path(__file__).parents[1] / "golden" / "deepspeed_curves.json"


def two_groups(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (BACKBONE, HEAD)]
    return kind(groups)


def rates(schedule: Any, steps: int) -> Iterator[list[float]]:
    """Of both groups, in each of so many updates."""
    schedule.optimizer._opt_called = True
    for _ in range(steps):
        yield [group["lr"] for group in schedule.optimizer.param_groups]
        schedule.step()


def grid(**options: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


WARMUPS = grid(warmup_num_steps=[1, 5, 12], warmup_type=["log", "linear"])
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "WarmupLR": [
        *({**w, "warmup_min_lr": low, "warmup_max_lr": high}
          for w in WARMUPS for low, high in ((0.0, None), (1e-4, 2e-3), ([1e-4, 2e-4], [1e-2, 2e-2]))),
    ],
    "WarmupDecayLR": [
        *({**w, "total_num_steps": total, "warmup_max_lr": high}
          for w in WARMUPS for total in (8, 20) for high in (0.001, None, [1e-3, 2e-3])),
    ],
    "WarmupCosineLR": [
        *({**w, "total_num_steps": total, "warmup_min_ratio": low, "cos_min_ratio": end}
          for w in WARMUPS for total in (8, 20) for low, end in ((0.0, 0.0001), (0.2, 0.1))),
    ],
    "LRRangeTest": grid(
        lr_range_test_min_lr=[1e-3, [1e-4, 1e-3]], lr_range_test_step_size=[1, 3, 7],
        lr_range_test_step_rate=[1.0, 2.5], lr_range_test_staircase=[False, True],
    ),
    "OneCycle": [
        {"cycle_min_lr": low, "cycle_max_lr": high, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01, **more}
        for low, high in ((1e-4, 1e-2), ([1e-4, 2e-4], [1e-2, 2e-2]))
        for more in grid(
            cycle_first_step_size=[4, 7], cycle_second_step_size=[None, 3, 0], cycle_first_stair_count=[0, 2],
            cycle_second_stair_count=[None, 3], decay_step_size=[0, 5],
        )
    ],
}  # fmt: skip


def each(value: Any, group: int) -> float:
    return value[group] if isinstance(value, list) else value


def risen(i: int, warmup_num_steps: int, warmup_type: str, **_: Any) -> float | None:
    n = max(2, warmup_num_steps)
    if i >= n:
        return None
    return math.log(i + 1, n) if warmup_type == "log" else i / n


def warmup(i: int, own: float, group: int, warmup_min_lr: Any, warmup_max_lr: Any, **w: Any) -> float:
    low, high = each(warmup_min_lr, group), own if warmup_max_lr is None else each(warmup_max_lr, group)
    part = risen(i, **w)
    return low + (high - low) * (1.0 if part is None else part)


def decay(i: int, own: float, group: int, total_num_steps: int, warmup_max_lr: Any, **w: Any) -> float:
    high, part, n = own if warmup_max_lr is None else each(warmup_max_lr, group), risen(i, **w), w["warmup_num_steps"]
    if part is not None:
        return high * part
    return high * max(0.0, (total_num_steps - i) / max(1, total_num_steps - max(2, n)))


def cosine(
    i: int, own: float, group: int, total_num_steps: int, warmup_min_ratio: float, cos_min_ratio: float, **w: Any
) -> float:
    part, n = risen(i, **w), max(2, w["warmup_num_steps"])
    if part is not None:
        return own * (warmup_min_ratio + (1 - warmup_min_ratio) * part)
    angle = math.pi * min(1.0, (i + 1 - n) / max(1, total_num_steps - n))
    return own * (cos_min_ratio + (1 - cos_min_ratio) * (0.5 + 0.5 * math.cos(angle)))


def range_test(i: int, own: float, group: int, **o: Any) -> float:
    x = (i + 1) / o["lr_range_test_step_size"]
    x = math.floor(x) if o["lr_range_test_staircase"] else x
    return each(o["lr_range_test_min_lr"], group) * (1 + o["lr_range_test_step_rate"] * x)


def one_cycle(i: int, own: float, group: int, **o: Any) -> float:
    up, n = o["cycle_first_step_size"], i + 1
    down = up if o["cycle_second_step_size"] is None else o["cycle_second_step_size"]
    low, high = each(o["cycle_min_lr"], group), each(o["cycle_max_lr"], group)
    if n >= up + down:
        every = o["decay_step_size"]
        return low / (1 + o["decay_lr_rate"] * (n - up - down) / every) if every else low
    first, second = o["cycle_first_stair_count"], o["cycle_second_stair_count"]
    stairs = first if n <= up or second is None else second
    height = n / up if n <= up else (up + down - n) / down
    return low + (high - low) * (math.floor(height * stairs + 1e-9) / stairs if stairs else height)


FORMULAS: dict[str, Callable[..., float]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": decay,
    "WarmupCosineLR": cosine,
    "LRRangeTest": range_test,
    "OneCycle": one_cycle,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_every_update_has_the_rate_of_the_formula(name: str) -> None:
    """On a grid of arguments, for two groups with rates of their own; ``i`` is -1 in the first update."""
    for options in ARGUMENTS[name]:
        schedule = getattr(sf.optim, name)(two_groups(), **options)
        for update, got in enumerate(rates(schedule, 30)):
            i = max(update - 1, 0) if name.startswith("Warmup") else update - 1
            wanted = [FORMULAS[name](i, own, g, **options) for g, own in enumerate((BACKBONE, HEAD))]
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-15), (options, update)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_curves_are_those_that_deepspeed_gave(name: str) -> None:
    """Numbers that the real package gave once are kept in ``tests/golden``. Two places excepted: DeepSpeed's first
    cosine rate is 0 whatever the least ratio is, and OneCycle's first momentum is the least one, from which it jumps to
    the largest."""
    recorded = json.loads(CURVES.read_text(encoding="utf-8"))["curves"][name]
    assert len(recorded) >= 12
    for row in recorded:
        schedule = getattr(sf.optim, name)(two_groups(), **row["options"])
        for update, got in enumerate(rates(schedule, len(row["rates"]))):
            if name != "WarmupCosineLR" or update:
                assert got == pytest.approx(row["rates"][update], rel=1e-9, abs=1e-15), (row["options"], update)
            if name == "OneCycle" and update:
                betas = [group["betas"][0] for group in schedule.optimizer.param_groups]
                assert betas == pytest.approx(row["betas"][update], rel=1e-9), (row["options"], update)


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMULAS)
def test_the_curves_are_deepspeeds(name: str) -> None:
    """The same against the package itself, where it is installed, with every set of arguments."""
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="deepspeed is not installed")
    for options in ARGUMENTS[name]:
        ours, other = (make(two_groups(), **options) for make in (getattr(sf.optim, name), getattr(theirs, name)))
        for update, got in enumerate(rates(ours, 30)):
            if name != "WarmupCosineLR" or update:
                wanted = [group["lr"] for group in other.optimizer.param_groups]
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-15), (options, update)
            if name == "OneCycle" and update:
                for a, b in zip(ours.optimizer.param_groups, other.optimizer.param_groups, strict=True):
                    assert a["betas"][0] == pytest.approx(b["betas"][0], rel=1e-9), (options, update)
            other.step()


PROPORTIONAL: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_max_lr": [BACKBONE, HEAD], "warmup_num_steps": 6},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_min_ratio": 0.1, "warmup_num_steps": 6},
    "LRRangeTest": {"lr_range_test_min_lr": [BACKBONE, HEAD], "lr_range_test_step_size": 3},
    "OneCycle": {
        "cycle_min_lr": [BACKBONE / 10, HEAD / 10], "cycle_max_lr": [BACKBONE, HEAD], "cycle_first_step_size": 8,
        "decay_step_size": 2, "decay_lr_rate": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_two_groups_keep_their_ratio_at_every_step(name: str) -> None:
    """A backbone and a head with different peaks: none is warmed up more than the other."""
    schedule = getattr(sf.optim, name)(two_groups(), **PROPORTIONAL[name])
    seen = list(rates(schedule, 30))
    assert len({pair[0] for pair in seen}) > 3
    for backbone, head in seen:
        assert head == pytest.approx(backbone * HEAD / BACKBONE, rel=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_restored_schedule_goes_on_where_it_was(name: str) -> None:
    """The state of a schedule is all that is needed: the optimizer's rates and momenta follow from it."""
    make = partial(getattr(sf.optim, name), **PROPORTIONAL[name])
    whole = make(two_groups())
    list(rates(whole, 9))
    state = torch.load(_saved(whole.state_dict()), weights_only=True)
    half = make(two_groups())
    half.load_state_dict(state)
    for a, b in zip(whole.optimizer.param_groups, half.optimizer.param_groups, strict=True):
        assert (a["lr"], a["betas"]) == (b["lr"], b["betas"])
    assert list(rates(half, 12)) == list(rates(whole, 12))
    again = make(two_groups(), last_batch_iteration=8)
    assert again.last_epoch == 9 and list(rates(again, 3)) == list(rates(_moved(make(two_groups()), 9), 3))


def _saved(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _moved(schedule: Any, steps: int) -> Any:
    list(rates(schedule, steps))
    return schedule


@pytest.mark.parametrize(("kind", "key"), [(torch.optim.AdamW, "betas"), (torch.optim.SGD, "momentum")])
def test_one_cycle_cycles_momentum_against_the_rate(kind: type[torch.optim.Optimizer], key: str) -> None:
    """Of Adam the first beta, of SGD the momentum; the second beta stays."""
    optimizer = two_groups(kind)
    schedule = sf.optim.OneCycle(optimizer, 1e-3, 1e-2, cycle_first_step_size=4, cycle_second_step_size=2)
    seen = []
    for _ in rates(schedule, 8):
        value = optimizer.param_groups[1][key]
        seen.append(value[0] if key == "betas" else value)
        assert key == "momentum" or value[1] == 0.999
    assert seen == pytest.approx([0.9, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: sf.optim.WarmupLR(o, warmup_steps=5), "WarmupLR has no argument 'warmup_steps'.*'warmup_num_steps'"),
        (lambda o: sf.optim.OneCycle(o, 0, 1, cycle_min_lrs=1), "Did you mean 'cycle_min_lr'"),
        (lambda o: sf.optim.WarmupDecayLR(o, 9, warmup_type="logs"), "'log', 'linear'. Did you mean 'log'"),
        (lambda o: sf.optim.WarmupLR(o, warmup_num_steps=0), "warmup_num_steps=0.*integer >= 1"),
        (lambda o: sf.optim.WarmupLR(o, warmup_max_lr=[1.0]), "one for each of the 2 parameter groups"),
        (lambda o: sf.optim.WarmupLR(o, warmup_min_lr=-1.0), "warmup_min_lr=-1.0.*number >= 0"),
        (lambda o: sf.optim.WarmupCosineLR(o, 9, cos_min_ratio=2.0), "cos_min_ratio=2.0.*<= 1"),
        (lambda o: sf.optim.LRRangeTest(o, lr_range_test_step_size=1.5), "lr_range_test_step_size=1.5.*integer"),
        (lambda o: sf.optim.OneCycle(o, 0, 1, cycle_first_step_size=0), "cycle_first_step_size=0.*> 0"),
    ],
)
def test_arguments_are_refused_in_a_sentence(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        make(two_groups())
    assert "\n" not in str(error.value)


def _stepped(layout: str) -> list[tuple[float, float]]:
    model = models.small()
    head = list(model.head.parameters())  # type: ignore[union-attr]
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": BACKBONE}, {"params": head, "lr": HEAD}])
    schedule = partial(sf.optim.WarmupDecayLR, total_num_steps=6, warmup_max_lr=None, warmup_num_steps=3)
    engine = sf.Engine(model, optimizer=optimizer, layout=layout, lr_schedule=schedule)
    seen = []
    for tokens, targets in models.batches(6):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
        engine.step()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"]))
    engine.close()
    return seen


def test_an_engine_steps_them_for_every_group(ranks: Ranks) -> None:
    for seen in ranks.run(_stepped, "zero3", world_size=2):
        wanted = [FORMULAS["WarmupDecayLR"](i, BACKBONE, 0, total_num_steps=6, warmup_max_lr=None, warmup_num_steps=3,
                                            warmup_type="log") for i in range(6)]  # fmt: skip
        assert [backbone for backbone, _ in seen] == pytest.approx(wanted)
        assert all(head == pytest.approx(4 * backbone) for backbone, head in seen)


def test_a_script_can_name_them() -> None:
    assert {*FORMULAS, "warmup_cosine"} <= set(importlib.import_module("shardfold.optim").__all__)


def test_a_schedule_may_be_an_object_over_the_engines_optimizer() -> None:
    """It is stepped after each update, as one that the engine makes."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = sf.Engine(model, optimizer=optimizer, lr_schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    rates = []
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        rates.append(engine.step().lr)
    engine.close()
    assert rates == [1.0, 0.5, 0.25]


SGD = partial(torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize(
    ("schedule", "optimizer", "words"),
    [
        (lambda other, _: torch.optim.lr_scheduler.StepLR(other, 1), "made here", "over another optimizer"),
        (lambda other, _: torch.optim.lr_scheduler.StepLR(other, 1), "object", "over another optimizer"),
        (lambda _, own: torch.optim.lr_scheduler.ReduceLROnPlateau(own), "object", "metric"),
        (lambda *_: partial(torch.optim.lr_scheduler.ReduceLROnPlateau), "made here", "metric"),
        (lambda *_: 5, "made here", "was given a int"),
        (lambda *_: partial(torch.optim.lr_scheduler.StepLR, step_size=1), "none", "needs an optimizer"),
    ],
)
def test_schedules_that_the_engine_cannot_step_are_refused(schedule: Any, optimizer: str, words: str) -> None:
    """When the engine is made, before anything is done to the model, which plain PyTorch can go on with."""
    model = nn.Linear(2, 2)
    own, other = SGD(model.parameters()), SGD(model.parameters())
    given = {"made here": SGD, "object": own, "none": None}[optimizer]
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ConfigError, match=words):
        sf.Engine(model, optimizer=given, lr_schedule=schedule(other, own))
    assert [p.data_ptr() for p in model.parameters()] == before and sf.engine_of(model.weight) is None
