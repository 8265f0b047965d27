"""Parameters of which each rank along an axis has others: slices of one matrix, for example.

Their layers say so with :func:`mark_distinct`; what is not marked is replicated on every axis, and has to be
equal there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardfold.errors import ConfigError, LayoutError, ModelError, did_you_mean
from shardfold.plan.axes import KNOWN, Axes, Mesh, Role
from shardfold.plan.checks import described
from shardfold.sharding.partitioned import early_shard

__all__ = ["check_early", "distinct_on", "mark_distinct"]

_MARK = "_shardfold_distinct"


def mark_distinct(module: nn.Module, axis: str, *parameters: str) -> None:
    """Says that ranks which differ on ``axis`` have other values in these parameters of ``module``, as slices of one
    matrix are. Call it in the constructor of the layer that holds slices.

    What is not marked is replicated: an engine refuses it where it differs, and counts it once in the norm of all
    gradients. The model's own collectives must make gradients of what is replicated equal on the axis. On a mesh that
    lacks the axis a mark says nothing.

    Args:
        module: that owns the parameters.
        axis: its name in ``mesh=``, as ``"tensor"``.
        parameters: names in the module, as ``"weight"``.

    Raises:
        ConfigError: the module has no such parameter, or the axis is no word.
    """
    if not isinstance(axis, str) or not axis.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"mark_distinct(): the axis is {described(axis)}: it is its name in mesh=, as 'tensor'.")
    if not parameters:
        raise ConfigError("mark_distinct() names no parameter: give their names in the module, as 'weight'.")
    for name in parameters:
        if name not in module._parameters:
            raise ConfigError(
                f"mark_distinct(): {type(module).__name__} has no parameter {name!r} of its own."
                f"{did_you_mean(name, module._parameters)}"
            )
    # In the module's own attributes, so that copies and pickles have it.
    marks: dict[str, Axes] = dict(_marks(module))
    for name in parameters:
        marks[name] = tuple(dict.fromkeys((*marks.get(name, ()), axis)))
    setattr(module, _MARK, marks)


def distinct_on(model: nn.Module, mesh: Mesh) -> dict[int, Axes]:
    """The axes of more than one rank on which each marked parameter is distinct, by its ``id``.

    Raises:
        LayoutError: a mark names an axis that is unknown, or one on which parameters are never distinct.
        ModelError: a tied parameter is marked in one module and not in another.
    """
    found: dict[int, tuple[str, set[str]]] = {}
    for path, module in model.named_modules():
        marks = _marks(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            axes = marks.get(name, ())
            full = f"{path}.{name}" if path else name
            for axis in axes:
                _check(full, axis, mesh)
            first, known = found.setdefault(id(parameter), (full, set(axes)))
            if known != set(axes):
                raise ModelError(
                    f"{first!r} and {full!r} are one parameter, but only one of them is marked by mark_distinct(): "
                    "mark it in both modules."
                )
    return {
        key: tuple(axis for axis in mesh if axis in axes and mesh[axis] > 1) for key, (_, axes) in found.items() if axes
    }


def check_early(model: nn.Module, mesh: Mesh) -> None:
    """
    Raises:
        ModelError: parameters that are split already have rank 0's values, on a mesh where ranks may have others.
    """
    apart = [axis.name for axis in mesh.axes if axis.size > 1 and axis.name not in mesh.reading]
    early = next((name for name, p in model.named_parameters() if early_shard(p) is not None), None)
    if apart and early is not None:
        raise ModelError(
            f"{early!r} was split over all ranks by sharded_init(), with rank 0's values, but on the axis {apart[0]!r} "
            "ranks have slices of their own: build the model under meta_init(), or plainly."
        )


def _marks(module: nn.Module) -> Mapping[str, Axes]:
    marks: Any = vars(module).get(_MARK, {})
    return marks


def _check(name: str, axis: str, mesh: Mesh) -> None:
    role = next((known.role for known in mesh.axes if known.name == axis), KNOWN.get(axis))
    if role is None:
        raise LayoutError(
            f"{name!r} is marked as distinct on {axis!r}, which the mesh does not have: add it to mesh= or name "
            f"another axis.{did_you_mean(axis, {*mesh, *KNOWN})}"
        )
    if role in (Role.DATA, Role.SEQUENCE):
        raise LayoutError(
            f"{name!r} is marked as distinct on {axis!r}, an axis of role {role}, on which all ranks train the same "
            "parameters: mark it on an axis of role tensor or expert."
        )
