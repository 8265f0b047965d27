"""What every rank has to be given alike: an engine compares it when it is made, before anything is sent, and of what
may change later the settings of the optimizer in the meeting before each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardfold.comm.agreement import ALIKE, Agreement, Claim
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import Precision
from shardfold.plan.placement import UnitSpec
from shardfold.plan.presets import name_of
from shardfold.plan.rewrites import Overlap
from shardfold.plan.rules import Rules
from shardfold.sharding.compared import PARTS, SLICES, UNEQUAL, parts, slices

__all__ = ["given", "same_settings", "settings"]


def given(
    rules: Rules,
    units: Sequence[UnitSpec | None],
    mesh: Mesh,
    optimizer: Optimizer | None,
    schedule: Any,
    accumulate: int,
    clip: Any,
    loss_scale: Any,
    overlap: Overlap,
) -> dict[str, Claim | str]:
    """By what it is, a text that is equal on two ranks exactly if they were given the same.

    Functions are left out: nothing tells whether those of two processes do the same. So is that in which ranks may
    differ: where activations are kept, the folders of states on disk, and into how large blocks an update is cut.
    """
    groups = [] if optimizer is None else [_settings(group) for group in optimizer.param_groups]
    return {
        "the layout or the precision": Claim(
            [*rules.layouts[-1].told(), *_besides(rules.precisions)], name=name_of(rules.given) or ""
        ),
        SLICES: slices(units, mesh),
        PARTS: Claim(parts(units), hint=ALIKE + (UNEQUAL if _sliced(units) else "")),
        "the optimizer": type(optimizer).__name__ if optimizer is not None else "none",
        "the schedule": type(schedule).__name__ if schedule is not None else "none",  # which adds to the settings
        "the optimizer's settings": ", ".join(dict.fromkeys(groups)),
        "accumulate=": str(accumulate),
        "the clipping": str(clip),
        "the loss scale": str(loss_scale),
        "overlap=": Claim(
            [f"{each.name}={getattr(overlap, each.name)!r}" for each in fields(overlap) if each.name != "block"]
        ),
    }


def settings(optimizer: Optimizer | None) -> list[str]:
    """A text for each setting of each group as it is now; of tensors those in host memory, as to read another one would
    make the host wait for the device."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [
        f"{name}={_value(value)} in group {number}"
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name != "params" and not (isinstance(value, Tensor) and value.device.type != "cpu") and _plain(value)
    ]


def same_settings(agreement: Agreement, told: Sequence[str]) -> None:
    """Compares the :func:`settings` of ranks that are about to take a step, and were found to differ.

    Raises:
        ConfigError: on every rank, naming two ranks and what each has.
    """
    hint = (
        "nothing was updated; set the same in engine.optimizer.param_groups on every rank, or give all of them the "
        "same schedule, and call engine.step() again"
    )
    agreement.same({"engine.step(): the optimizer's settings": Claim(told, hint=hint)})


def _besides(precisions: Sequence[Precision]) -> list[str]:
    """A text for each part of the precision, of every rule, that is no dtype of a table."""
    names = ("autocast", "buffers", "outputs", "rounding", "linear")
    return [f"precision.{name}={', '.join(str(getattr(each, name)) for each in precisions)}" for name in names]


def _sliced(units: Sequence[UnitSpec | None]) -> bool:
    return any(slot.box for unit in units if unit is not None for segment in unit.segments for slot in segment.slots)


def _settings(group: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in group.items() if name != "params" and _plain(value))


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return (
        value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, Tensor) and not value.dim())
    )


def _value(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) else value)
