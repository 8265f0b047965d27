"""Parameters that are a box of a larger one: this rank's rows or columns of a matrix that no rank has all of.

Training takes such a parameter as it is. What is kept of it, a checkpoint above all, has to say which elements of the
larger one these are; PyTorch's name for that is ``ChunkStorageMetadata`` (of ``torch.distributed.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardfold.errors import ConfigError, UsageError
from shardfold.plan.checks import described, is_integer
from shardfold.plan.placement import UnitSpec
from shardfold.sharding.registry import model_of

__all__ = ["box_of", "check_boxes", "mark_box"]

_BOX = "_shardfold_box"


def mark_box(parameter: nn.Parameter, *, whole: Sequence[int], start: Sequence[int]) -> None:
    """Says that a parameter is a box of a larger one, before an engine is made of its module.

    ::

        linear = torch.nn.Linear(8, 2)                                  # rows 2 and 3 of 4
        mark_box(linear.weight, whole=(4, 8), start=(2, 0))
        mark_box(linear.bias, whole=(4,), start=(2,))

    It is an attribute of the parameter object: ``copy.deepcopy`` and ``module.to()`` with a swap lose it, as they lose
    all others.

    Args:
        parameter: of any shape.
        whole: the shape of the larger parameter.
        start: the index in it of the first element, one number for each dimension.

    Raises:
        ConfigError: they are no shape and no place in it, or the parameter does not fit there.
        UsageError: an engine has the parameter already.
    """
    shape, sizes = tuple(parameter.shape), (whole, start)
    if any(not isinstance(each, Sequence) or not all(is_integer(n, 0) for n in each) for each in sizes):
        raise ConfigError(
            f"mark_box(whole={described(whole)}, start={described(start)}): give a shape and an index, one whole "
            "number from 0 on for each dimension."
        )
    fits = len(shape) == len(whole) == len(start) and all(
        a + n <= all_ for a, n, all_ in zip(start, shape, whole, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"mark_box(whole={tuple(whole)}, start={tuple(start)}): a parameter of shape {shape} does not lie there; "
            "start + shape is at most whole on each dimension."
        )
    if model_of(parameter) is not None:
        raise UsageError("mark_box(): an engine has this parameter already: mark it before the engine is made.")
    vars(parameter)[_BOX] = tuple(map(int, whole)), tuple(map(int, start))


def box_of(parameter: nn.Parameter) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """``(shape of the larger parameter, where this one begins in it)``; None: it is the whole."""
    marked = vars(parameter).get(_BOX)
    return marked if marked is not None and marked[0] != tuple(parameter.shape) else None


def check_boxes(optimizer: Optimizer | None, units: Iterable[UnitSpec | None]) -> None:
    """
    Raises:
        ConfigError: the optimizer's update of an element reads elements of the parameter that are not in its box.
    """
    needs_whole: Any = getattr(optimizer, "needs_whole", None)  # of ours; torch's that do are refused altogether
    if optimizer is None or needs_whole is None:
        return
    for segment in (s for unit in units if unit is not None for s in unit.segments if s.trainable):
        boxed = next((slot for slot in segment.slots if slot.box is not None), None)
        if boxed is not None and needs_whole(optimizer.param_groups[segment.group]):
            raise ConfigError(
                f"{type(optimizer).__name__} needs all of {boxed.name!r}, of which this rank has a box of shape "
                f"{boxed.shape} in {boxed.whole}: use an element-wise optimizer, such as AdamW, for it."
            )
