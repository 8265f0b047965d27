"""Parameters that are a slice of a larger one: this rank's rows or columns of a matrix that no rank has all of.

Their layers say so with :func:`mark_slice`; what is not marked is replicated on every axis, and has to be equal there.
What follows from a mark is on which axes a parameter is distinct, and which box of the whole this rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardfold.errors import ConfigError, LayoutError, ModelError, UsageError, did_you_mean
from shardfold.plan.axes import KNOWN, Axes, Mesh, Role
from shardfold.plan.checks import described, is_integer, known_arguments
from shardfold.plan.placement import UnitSpec
from shardfold.sharding.partitioned import early_shard
from shardfold.sharding.registry import model_of

__all__ = [
    "Slice",
    "check_early",
    "check_reach",
    "divided_dims",
    "mark_shared",
    "mark_slice",
    "marked_on",
    "places_of",
    "shared_number",
    "slices_on",
]

_MARKS, _PLACES = "_shardfold_slices", "_shardfold_places"
INSIDE = " It has none: give the layer inside that owns it."


class Slice(NamedTuple):
    """What follows from the marks of a parameter on one rank of a mesh.

    Attributes:
        axes: of more than one rank, on which the parameter is distinct.
        box: the shape of the whole, and where this rank's part begins in it; None: it is the whole on every rank, or
            nothing says what the whole is. With a third entry it is stacked (see ``plan.box.Box``).
    """

    axes: Axes
    box: tuple[tuple[int, ...], ...] | None


class _Mark(NamedTuple):
    """What was said of a parameter and an axis; see :func:`mark_slice`."""

    dim: int | None
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    blocks: int = 1


def mark_shared(parameter: nn.Parameter, places: Sequence[int], number: int) -> None:
    """The ranks at these places along the stages of a pipeline have the same parameter, which has that number among all
    such on each of them."""
    vars(parameter)[_PLACES] = tuple(places), number


def places_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The same, of a parameter that is marked; of another: none."""
    return vars(parameter).get(_PLACES, ((), 0))[0]


def shared_number(parameter: nn.Parameter) -> int:
    """In which order ranks go through what they share: each defines only a part of the model's modules, in which the
    same parameters may come in another order."""
    return vars(parameter)[_PLACES][1]


@known_arguments
def mark_slice(
    module: nn.Module,
    *parameters: str,
    axis: str,
    dim: int | None = None,
    whole: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
    blocks: int = 1,
) -> None:
    """Says that each rank along ``axis`` has another slice of these parameters of ``module``. Call it in the
    constructor of the layer that holds slices.

    ::

        self.weight = nn.Parameter(torch.empty(outputs // ranks, inputs))
        mark_slice(self, "weight", axis="tensor", dim=0)

    ``dim`` is PyTorch's ``Shard(dim)`` and Megatron-LM's ``partition_dim``: along that dimension the ranks have equal
    parts of the whole, in their order on the axis; with a mark for each of several axes the parts are divided again, by
    the slowest axis first. With ``blocks=3`` the whole is three matrices, one behind the other along ``dim``, each of
    which is divided so, as queries, keys and values in one; on one axis only. ``whole`` and ``start`` say the same of
    parts that are not equal. Without either the parameter trains, but checkpoints refuse it: nothing says what its
    elements are of the whole.

    What is not marked is replicated: an engine refuses it where it differs, and counts it once in the norm of all
    gradients. The model's own collectives must make gradients of what is replicated equal on the axis. On a mesh that
    lacks the axis ``dim`` says nothing, while ``whole`` and ``start`` hold. Of two marks for one axis the later holds.

    Args:
        module: that owns the parameters.
        parameters: names in the module, as ``"weight"``.
        axis: its name in ``mesh=``, as ``"tensor"``.
        dim: the dimension that is divided over the axis; from the last one where it is negative.
        whole: the shape of the whole parameter.
        start: the index in it of this rank's first element, one number for each dimension.
        blocks: how many matrices the parameter is along ``dim``.

    Raises:
        ConfigError: the module has no such parameter, the axis is no word, or the slice does not lie in the parameter.
        UsageError: an engine has the parameter already.

    Examples:
        >>> part = nn.Linear(8, 4)  # this rank's four of eight rows
        >>> sf.mark_slice(part, "weight", axis="tensor", dim=0)
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        raise ConfigError(
            f"mark_slice(): the module is {described(given)}: give the torch.nn.Module that owns the parameters, and "
            "their names, as in mark_slice(layer, 'weight', axis='tensor', dim=0)."
        )
    if not isinstance(axis, str) or not axis.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"mark_slice(): the axis is {described(axis)}: it is its name in parallel=, as 'tensor'.")
    if not parameters:
        raise ConfigError("mark_slice() names no parameter: give their names in the module, as 'weight'.")
    for name in parameters:
        parameter = module._parameters.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if parameter is None:
            known = [known for known, own in module._parameters.items() if own is not None]
            raise ConfigError(
                f"mark_slice(): {type(module).__name__} has no parameter {described(name)} of its own."
                f"{did_you_mean(name, known) if known else INSIDE}"
            )
        if model_of(parameter) is not None:
            raise UsageError(
                f"mark_slice(): an engine has {name!r} already: mark it before the engine is made, in the constructor "
                "of its layer."
            )
    if not is_integer(blocks, 1) or (blocks > 1 and dim is None):
        raise ConfigError(
            f"mark_slice(blocks={described(blocks)}): it is a number of matrices along dim=, which has to be given."
        )
    mark = _Mark(dim, None if whole is None and start is None else _as_box(dim, whole, start), blocks)
    # In the module's own attributes, so that copies and pickles have it.
    marks = {name: dict(by_axis) for name, by_axis in _marks(module).items()}
    for name in parameters:
        of_name = marks.setdefault(name, {})
        of_name[axis] = mark
        _check_marks(f"mark_slice(): {name!r}", module._parameters[name], of_name)
    setattr(module, _MARKS, marks)


def marked_on(model: nn.Module, axis: str) -> bool:
    """Whether a parameter is marked on the axis."""
    return any(axis in of_name for module in model.modules() for of_name in _marks(module).values())


def slices_on(model: nn.Module, mesh: Mesh, coords: Mapping[str, int]) -> dict[int, Slice]:
    """What each marked parameter is on the rank at ``coords``, by its ``id``.

    Raises:
        ConfigError: a slice does not lie in the parameter, which was replaced since.
        LayoutError: a mark names an axis that is unknown, or one on which parameters are never distinct.
        ModelError: a tied parameter is marked in one module and not alike in another.
    """
    found: dict[int, tuple[str, nn.Parameter, Mapping[str, _Mark]]] = {}
    for path, module in model.named_modules():
        marks = _marks(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            mine = marks.get(name, {})
            full = f"{path}.{name}" if path else name
            for axis in mine:
                _check_axis(full, axis, mesh)
            first, _, known = found.setdefault(id(parameter), (full, parameter, mine))
            if known != mine:
                apart = "mark_slice() said different things of them"
                if not known or not mine:
                    apart = f"mark_slice() was told of {(full if mine else first)!r} only"
                raise ModelError(
                    f"{first!r} and {full!r} are one parameter, but {apart}: mark it alike in both modules."
                )
    return {
        key: Slice(
            tuple(axis for axis in mesh if axis in marks and mesh[axis] > 1), _box(name, parameter, marks, mesh, coords)
        )
        for key, (name, parameter, marks) in found.items()
        if marks
    }


def divided_dims(model: nn.Module, mesh: Mesh) -> dict[int, dict[str, int] | None]:
    """Of each marked parameter, by its ``id``, the dimension that each axis of more than one rank divides into equal
    parts; None: its parts are not so."""
    found: dict[int, dict[str, int] | None] = {}
    for module in model.modules():
        for name, marks in _marks(module).items():
            parameter = module._parameters.get(name)
            here = {axis: mark for axis, mark in marks.items() if mesh.get(axis, 1) > 1}
            if parameter is None:
                continue
            boxed = any(mark.box is not None for mark in marks.values())
            if boxed or any(mark.dim is None or mark.blocks > 1 for mark in here.values()):
                found[id(parameter)] = None
            else:
                dims = {axis: mark.dim for axis, mark in here.items() if mark.dim is not None}
                found[id(parameter)] = {axis: dim % parameter.dim() for axis, dim in dims.items()}
    return found


def check_early(model: nn.Module, mesh: Mesh) -> None:
    """
    Raises:
        ModelError: parameters that are split already have rank 0's values, on a mesh where ranks may have others.
    """
    apart = [axis.name for axis in mesh.axes if axis.size > 1 and axis.name not in (*mesh.reading, *mesh.stages)]
    alike = all(axis.role is Role.TENSOR for axis in mesh.axes if axis.name in apart)
    early = [(name, p) for name, p in model.named_parameters() if early_shard(p) is not None]
    if apart and early and alike:  # what is no slice has one value on all ranks along the axis
        marked = slices_on(model, mesh, mesh.coords(0))
        early = [(name, p) for name, p in early if id(p) in marked]
    if apart and early:
        raise ModelError(
            f"{early[0][0]!r} was split over all ranks by sharded_init(), with rank 0's values, but on the axis "
            f"{apart[0]!r} ranks have slices of their own: build the model under meta_init(), or plainly."
        )


def check_reach(optimizer: Optimizer | None, units: Iterable[UnitSpec | None], reading: Axes = ()) -> None:
    """``reading``: axes on which ranks read other things, over which such an optimizer sums shards of what all have.

    Raises:
        ConfigError: the optimizer's update of an element reads elements of the parameter that it cannot ask for.
    """
    needs_whole: Any = getattr(optimizer, "needs_whole", None)  # of ours; torch's that do are refused altogether
    refuses: Any = getattr(optimizer, "refuses", None)
    if optimizer is None or needs_whole is None:
        return
    for segment in (s for unit in units if unit is not None for s in unit.segments if s.trainable):
        group = optimizer.param_groups[segment.group]
        for slot in segment.slots if needs_whole(group) else ():
            if slot.box is None:
                why = "nothing says of what" if segment.distinct else ""
            elif any(axis in reading for axis in segment.distinct):
                why = "the ranks that have the rest read other samples"
            else:
                why = refuses(group, slot.shape, slot.whole) if segment.distinct else "no rank has the rest"
            if why:
                of = f" of {slot.whole}" if slot.box is not None else ""
                raise ConfigError(
                    f"{type(optimizer).__name__} needs all of {slot.name!r}, of which this rank has a slice of shape "
                    f"{slot.shape}{of}, and {why}: use an element-wise optimizer, such as AdamW, for it."
                )


def _marks(module: nn.Module) -> Mapping[str, Mapping[str, _Mark]]:
    """By the name of a parameter and an axis."""
    marks: Any = vars(module).get(_MARKS, {})
    return marks


def _as_box(dim: Any, whole: Any, start: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if dim is not None:
        raise ConfigError(
            "mark_slice() was given dim= and whole= or start=: give dim= where the ranks' parts are equal, else whole= "
            "and start=."
        )
    for each in (whole, start):
        if not isinstance(each, Sequence) or not all(is_integer(n, 0) for n in each):
            raise ConfigError(
                f"mark_slice(whole={described(whole)}, start={described(start)}): give a shape and an index, one whole "
                "number from 0 on for each dimension."
            )
    return tuple(map(int, whole)), tuple(map(int, start))


def _check_marks(what: str, parameter: nn.Parameter | None, marks: Mapping[str, _Mark]) -> None:
    """
    Raises:
        ConfigError: the marks of a parameter do not fit it or each other.
    """
    if parameter is None or is_lazy(parameter):  # the engine asks again
        return
    shape, boxes = tuple(parameter.shape), {mark.box for mark in marks.values()}
    for mark in marks.values():
        if mark.dim is not None and not is_integer(mark.dim, -len(shape), len(shape) - 1):
            raise ConfigError(
                f"{what} has the shape {shape}, and dim={described(mark.dim)} is none of its dimensions: give one, as "
                "0 for rows."
            )
        if mark.dim is not None and shape[mark.dim] % mark.blocks:
            raise ConfigError(
                f"{what} has the shape {shape}, of which dimension {mark.dim} is not {mark.blocks} equal blocks."
            )
    if len(marks) > 1 and any(mark.blocks > 1 for mark in marks.values()):
        raise ConfigError(f"{what} is marked on {len(marks)} axes, and blocks= divides along one axis only.")
    for box in boxes - {None}:
        assert box is not None
        whole, start = box
        fits = len(shape) == len(whole) == len(start) and all(
            a + n <= size for a, n, size in zip(start, shape, whole, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"{what} has the shape {shape}, which does not lie at start={start} in whole={whole}: start + shape is "
                "at most whole on each dimension."
            )
    if len(boxes) > 1 and boxes != {None}:
        raise ConfigError(
            f"{what} is marked on the axes {', '.join(map(repr, marks))} with different boxes: give whole= and start= "
            "alike for each, or dim= for each."
        )


def _box(
    name: str, parameter: nn.Parameter, marks: Mapping[str, _Mark], mesh: Mesh, coords: Mapping[str, int]
) -> tuple[tuple[int, ...], ...] | None:
    """The shape of the whole, and where the part of the rank at ``coords`` begins; None: that is the whole on
    every rank, or unknown.

    Raises:
        ConfigError: the marks do not fit.
    """
    _check_marks(repr(name), parameter, marks)
    shape = tuple(parameter.shape)
    whole, start = list(shape), [0] * len(shape)
    for axis in reversed(list(mesh)):  # the fastest first: what the others divide
        mark = marks.get(axis)
        if mark is None or mesh[axis] == 1:
            continue
        if mark.dim is None and mark.box is None:
            return None
        if mark.dim is not None:
            start[mark.dim] += coords[axis] * whole[mark.dim]
            whole[mark.dim] *= mesh[axis]
    stacked = next(((axis, mark) for axis, mark in marks.items() if mark.blocks > 1 and mesh.get(axis, 1) > 1), None)
    if stacked is not None:
        axis, mark = stacked
        dim, count = mark.dim % len(shape) if mark.dim is not None else 0, mark.blocks
        length = whole[dim] // count
        start = [0] * (len(shape) + 1)
        start[dim + 1] = coords[axis] * (shape[dim] // count)
        return tuple(whole), tuple(start), (dim, count, length)
    given = next((mark.box for mark in marks.values() if mark.box is not None), (tuple(whole), tuple(start)))
    # All of it, beside ranks that have none, is a part too; where nobody has another one there is nothing to say.
    return None if given[0] == shape and all(mesh.get(axis, 1) == 1 for axis in marks) else given


def _check_axis(name: str, axis: str, mesh: Mesh) -> None:
    role = next((known.role for known in mesh.axes if known.name == axis), KNOWN.get(axis))
    if role is None:
        raise LayoutError(
            f"{name!r} is marked as a slice on {axis!r}, which the mesh does not have: add it to parallel= or name "
            f"another axis.{did_you_mean(axis, {*mesh, *KNOWN})}"
        )
    if role is Role.SEQUENCE:
        raise LayoutError(
            f"{name!r} is marked as a slice on {axis!r}, an axis of role {role}, on which all ranks train the same "
            "parameters: mark it on an axis of role tensor, expert or data."
        )
