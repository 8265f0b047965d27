"""What a module keeps of the ranks along one axis, or along all axes of data.

A layer knows its axis by name and takes a group from :func:`group_of`; :func:`axes_named` says which axes of a mesh a
name means. An engine binds the groups of all modules when it is made; before that, and on an axis of one rank, a group
is of one rank and every call gives back what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from shardfold.comm.comm import Comm
from shardfold.comm.mesh_group import MeshGroup
from shardfold.errors import UsageError
from shardfold.nn.axis_group import AxisGroup, OneRank
from shardfold.plan.axes import Axes, Mesh, Role

__all__ = ["ModuleGroup", "axes_named", "bind_groups", "group_of"]

_GROUPS = "_shardfold_groups"


class ModuleGroup(AxisGroup):
    """The group that a module keeps: of one rank until an engine binds it. A copy, or what comes of a pickle, is not
    bound.

    Args:
        axis: its name in the mesh.
        parts: how many ranks have parts of the module: with more than one it does nothing until it is bound.
    """

    def __init__(self, axis: str, parts: int = 1) -> None:
        self._group: AxisGroup | None = OneRank(axis) if parts == 1 else None
        self._axis, self.parts = axis, parts

    def __reduce__(self) -> Any:
        return ModuleGroup, (self._axis, self.parts)

    def part(self, parts: int) -> None:
        """The module was cut into so many parts."""
        self.parts = parts
        self._group = None if parts > 1 else OneRank(self._axis)

    def bind(self, group: AxisGroup | None) -> None:
        """Calls go to ``group``; None: they raise, because the ranks they were for are gone."""
        self._group = group

    def _bound(self) -> AxisGroup:
        if self._group is None:
            raise UsageError(
                f"a layer needs the other ranks along {self._axis!r}, and no engine connects it to them: it was "
                "closed, or this is a copy; make an engine of the model, or load a checkpoint into a whole one."
            )
        return self._group

    @property
    def size(self) -> int:
        return self._bound().size

    @property
    def rank(self) -> int:
        return self._bound().rank

    @property
    def number(self) -> int:
        return self._bound().number


def group_of(module: nn.Module, axis: str) -> ModuleGroup:
    """The group of ``module`` along ``axis``, which an engine of a model with this module binds; made when it is first
    asked for, which is before the engine is made (in a constructor)."""
    groups: dict[str, ModuleGroup] = vars(module).setdefault(_GROUPS, {})
    return groups.setdefault(axis, ModuleGroup(axis))


def _groups(modules: Iterable[nn.Module]) -> Iterator[ModuleGroup]:
    for module in modules:
        of_module: Mapping[str, ModuleGroup] = vars(module).get(_GROUPS, {})
        yield from of_module.values()


def axes_named(name: str, mesh: Mesh) -> Axes:
    """The axes of more than one rank that a layer means by ``name``: the one of this name; else ``"data"`` means all on
    which ranks read other samples and have the same weights in every step, another role its one axis."""
    if name in mesh:
        named: Axes = (name,)
    elif name == Role.DATA.value:
        named = tuple(axis for axis in mesh.sampling if axis not in mesh.rare)
    else:
        named = tuple(axis.name for axis in mesh.axes if axis.role.value == name)
        named = named if len(named) == 1 else ()
    return tuple(axis for axis in named if mesh[axis] > 1)


def bind_groups(
    model: nn.Module, comm: Comm, apart: Callable[[], bool] = lambda: False, group: type[MeshGroup] = MeshGroup
) -> Callable[[], None]:
    """Binds the groups of all modules in ``model`` to the ranks of an engine; returns what undoes it, after which those
    of more than one rank refuse calls. ``apart``: see :class:`MeshGroup`; ``group``: what is made for an axis.

    Raises:
        UsageError: a layer was cut for another number of ranks.
    """
    made: dict[Axes, MeshGroup] = {}
    bound: list[ModuleGroup] = []
    for each in _groups(model.modules()):
        axes = axes_named(each.axis, comm.mesh.sizes)
        size = comm.mesh.sizes.parts(axes)
        if each.parts not in (1, size):
            raise UsageError(
                f"the model was cut into {each.parts} parts along {each.axis!r}, and parallel= has {size} ranks there: "
                "build it anew, or make the engine on as many ranks."
            )
        if size > 1:
            each.bind(made.setdefault(axes, group(axes, comm, apart)))
            bound.append(each)
        else:
            each.bind(OneRank(each.axis))

    def undo() -> None:
        for each in bound:
            each.bind(None)

    return undo
