"""A keyword that a public callable does not have is told in one sentence, with the one that was meant."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError, UsageError
from shardfold.testing import run_ranks

FACES = (
    "shardfold",
    "shardfold.checkpoint",
    "shardfold.nn",
    "shardfold.numerics",
    "shardfold.optim",
    "shardfold.testing",
)
#: What the library makes and users read, or an enumeration: nobody calls these.
MADE = {
    "Contents", "Damage", "Finding", "ImportReport", "LoadReport", "MemoryReport", "NumericsReport", "RankFailure",
    "RanksFailed", "SaveReport", "Scaler", "ShardfoldError", "Stats", "StepReport", "Tier", "TrafficReport",
    "TrainingMatch", "UnitNumbers", "Verification",
}  # fmt: skip


def _public() -> list[tuple[str, Callable[..., Any]]]:
    """Every function, and every class with its own public methods, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for face in FACES:
        module = importlib.import_module(face)
        for name in module.__all__:
            target = getattr(module, name)
            if name in MADE or not (inspect.isfunction(target) or inspect.isclass(target)):
                continue
            found[f"{face}.{name}"] = target
            if inspect.isclass(target):
                inherited = {other for base in target.__mro__[1:] for other in vars(base)}
                for other, own in vars(target).items():
                    if not other.startswith("_") and other not in inherited and inspect.isfunction(own):
                        found[f"{face}.{name}.{other}"] = own
    return list(found.items())


@pytest.mark.parametrize("target", [pytest.param(target, id=name) for name, target in _public()])
def test_every_public_callable_knows_its_arguments(target: Callable[..., Any]) -> None:
    """Those that pass keywords on, or take names of their own, say it themselves."""
    signature = inspect.signature(target)
    if any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        return
    with pytest.raises(ConfigError, match=r"has no argument 'nosuch_argument'\."):
        target(**{"nosuch_argument": 1})


MEANT: list[tuple[Callable[..., Any], str, str]] = [
    (partial(sf.Engine, nn.Linear(2, 2)), "overlap_comm", "overlap"),
    (partial(sf.Engine, nn.Linear(2, 2)), "stage", "layout"),
    (partial(sf.Engine, nn.Linear(2, 2)), "gradient_accumulation_steps", "accumulate"),
    (sf.Parallel, "device_mesh", "mesh"),
    (partial(sf.Engine, nn.Linear(2, 2)), "lr_scheduler", "lr_schedule"),
    (partial(sf.Engine, nn.Linear(2, 2)), "tier", "layout"),
    (partial(sf.Engine, nn.Linear(2, 2)), "offload_optimizer", "offload"),
    (partial(sf.Engine, nn.Linear(2, 2)), "offload_param", "offload"),
    (partial(sf.Engine, nn.Linear(2, 2)), "reshard_after_forward", "layout"),
    (partial(sf.Engine, nn.Linear(2, 2)), "train_batch_size", "accumulate"),
    (sf.Parallel, "mpu", "mesh"),
    (sf.Parallel, "process_group", "mesh"),
    (sf.Precision, "param_dtype", "compute"),
    (sf.Precision, "reduce_dtype", "reduce"),
    (sf.Layout, "param", "params"),
    (sf.Overlap, "prefetching", "prefetch"),
    (partial(dataclasses.replace, sf.Overlap()), "prefech", "prefetch"),
    (sf.PRESETS["zero3"].replace, "grad", "grads"),
    (partial(sf.PRESETS["zero3"].edit, "grads"), "ovre", "over"),
    (partial(sf.optim.Lion, [torch.zeros(2)]), "learning_rate", "lr"),
    (partial(sf.mark_slice, nn.Linear(2, 2), "weight", axis="tensor"), "partition_dim", "dim"),
]


@pytest.mark.parametrize(("call", "given", "meant"), MEANT)
def test_the_name_that_was_meant(call: Callable[..., Any], given: str, meant: str) -> None:
    """Slips, and what DeepSpeed, FSDP and others call it."""
    with pytest.raises(ConfigError) as raised:
        call(**{given: 1})
    assert repr(given) in str(raised.value) and f"Did you mean {meant!r}?" in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def _function(one: int = 1) -> int:
    return one


def test_a_function_on_ranks() -> None:
    """Its keywords and the call's own are told apart before a process is started."""
    with pytest.raises(UsageError, match=r"run_ranks\(\) of _function\(\) has no argument 'timeuot'. .* 'timeout'\?"):
        run_ranks(_function, 2, timeuot=3)
    with pytest.raises(UsageError, match=r"no argument 'ones'. Did you mean 'one'\?"):
        run_ranks(_function, 2, ones=3)


def test_a_keyword_that_is_lacking_is_named() -> None:
    """Not as Python does; all of several."""
    with pytest.raises(ConfigError, match=r"^Cell\(\) lacks dtype: give dtype=\.$"):
        sf.Cell(small=5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match=r"^warmup_cosine\(\) lacks warmup, total: give warmup=\.$"):
        sf.optim.warmup_cosine()  # pyright: ignore[reportCallIssue]


def test_other_type_errors_stay() -> None:
    """What is missing, and what goes wrong inside, is Python's to tell; signatures are the functions' own."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        sf.Engine()  # pyright: ignore[reportCallIssue]

    def optimizer(parameters: Any) -> Any:
        raise TypeError("of the user's own")

    with pytest.raises(TypeError, match="of the user's own"):
        sf.Engine(nn.Linear(2, 2), optimizer=optimizer)
    assert next(iter(inspect.signature(sf.Engine).parameters)) == "model"
    assert "frozen" in inspect.signature(sf.Engine.state_dict).parameters
