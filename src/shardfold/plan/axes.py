"""WHO: the axes of the ranks, and what follows from their roles.

A mesh is a few named axes whose sizes multiply up to the ranks, the slow link first. The *role* of an axis says what
differs between ranks that differ on it only:

    role       ranks that differ on it only           gradients of what is replicated over it
    data       read other samples                     are summed
    sequence   read other parts of the same samples   are summed
    expert     read other samples, and may hold other experts
                                                      are summed
    tensor     read the same, and hold other slices of some parameters
                                                      are equal already: the model's own collectives make them so
    pipeline   hold other layers                      are not there

Parameters may be *distinct* on an axis (slices of one matrix, experts, some of the classes of a head): each rank along
it has others, on an axis of data too, whose ranks then exchange what they read. That is not what a table does, which
divides parameters over the ranks that share them: their table is split over the other axes only. From roles and this
follow

    summed      over which axes gradients of a parameter are summed: those on which ranks read other things and
                have the same parameter
    divisor     by how many ranks gradients are divided: all that read other things, for an expert too
    summed      is also where values are the same: rank 0's go to these ranks before the first step
    replicas    on which axes a parameter has to be equal without being sent: tensor, unless it is distinct there
    normed      over which axes squares are summed for the norm: those that its master is split over, and those on
                which it is distinct
    meeting     which ranks run one program, and agree on what comes next: all but those of other stages, and of other
                groups

An axis of data may be *rare* (see ``outer``): its ranks read other samples, and begin with the same values, but their
gradients are summed never, and their weights meet every so many steps. Ranks that differ on other axes only are a
*group*: to what it sums, divides and agrees on, the axis is not there.

    carved      what a table says of "intra" holds for axes of experts too: these are ranks of data, of which some
                parameters, the experts, are not shared

A flat's length divides by the ranks over which its gradients are summed: cells are split over some of these axes, and
what rests on several ranks alike is read from files by each in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import combinations, product
from math import gcd, log, prod
from typing import Any

from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan.checks import described, is_integer, known_arguments

__all__ = [
    "ALSO",
    "DATA_AXES",
    "KNOWN",
    "LINKS",
    "Axes",
    "Axis",
    "Mesh",
    "Role",
    "Sizes",
    "nearest_sizes",
    "nearest_that_divides",
]


Axes = tuple[str, ...]
"""Names of axes, in an order that counts ranks row by row."""

Sizes = Mapping[str, int]
"""Ranks by axis name."""

DATA_AXES: Axes = ("inter", "intra")
"""The axes that a table may name, slow link first: ``inter`` between nodes, ``intra`` within one."""


class Role(str, Enum):
    """What differs between ranks that differ on an axis only; see the module's docstring."""

    DATA = "data"
    EXPERT = "expert"
    SEQUENCE = "sequence"
    TENSOR = "tensor"
    PIPELINE = "pipeline"

    def __str__(self) -> str:
        return self.value


SAMPLING = (Role.DATA, Role.EXPERT)
"""Roles of the axes on which ranks read other samples."""

READING = (*SAMPLING, Role.SEQUENCE)
"""Roles of the axes on which ranks read other things."""

LINKS = (Role.PIPELINE, Role.DATA, Role.EXPERT, Role.SEQUENCE, Role.TENSOR)
"""Roles by the links that their axes get, from the slowest to the fastest."""

KNOWN: Mapping[str, Role] = {
    **dict.fromkeys(DATA_AXES, Role.DATA),
    **{role.value: role for role in (Role.TENSOR, Role.SEQUENCE, Role.PIPELINE, Role.EXPERT)},
}
"""The roles of names that say theirs."""

ALSO: Mapping[str, str] = {
    **dict.fromkeys(("dp", "fsdp", "shard", "data", "dp_shard", "data_parallel"), "intra"),
    **dict.fromkeys(("replicate", "dp_replicate", "ddp", "node", "nodes"), "inter"),
    **dict.fromkeys(("tp", "model", "mp", "tensor_parallel"), "tensor"),
    **dict.fromkeys(("cp", "sp", "context", "context_parallel", "sequence_parallel"), "sequence"),
    **dict.fromkeys(("pp", "stage", "stages", "pipe", "pipeline_parallel"), "pipeline"),
    **dict.fromkeys(("ep", "experts", "expert_parallel"), "expert"),
}
"""What others call the axes."""


@known_arguments
@dataclass(frozen=True, init=False)
class Axis:
    """One axis of a mesh.

    Args:
        name: as tables and programs print it.
        size: how many ranks there are along it.
        role: a :class:`Role` or its name; None: that of a known name (``inter`` and ``intra`` are ``data``;
            ``sequence``, ``tensor``, ``pipeline`` and ``expert`` have the role that they name).

    Raises:
        LayoutError: the name or the role is unknown, or the size is no number of ranks.

    Examples:
        >>> sf.Axis("tensor", 4).role.value
        'tensor'
        >>> sf.Axis("rows", 2, "data").size
        2
    """

    name: str
    size: int
    role: Role

    def __init__(self, name: str, size: int, role: Role | str | None = None) -> None:
        given: Any = name
        if not isinstance(given, str) or not given.isidentifier():
            raise LayoutError(f"an axis has the name {described(given)}: it is a word, as 'tensor'.")
        if not is_integer(size, 1):
            raise LayoutError(f"the axis {name!r} has the size {described(size)}: it is a number of ranks.")
        known = KNOWN.get(name) if role is None else role
        if known is None:
            raise LayoutError(
                f"the axis {name!r} has no role: give it one of {', '.join(map(str, Role))}, as in "
                f"Axis({name!r}, {size}, 'data'), or a name that has one: {', '.join(KNOWN)}."
            )
        if known not in list(Role):
            raise LayoutError(
                f"the axis {name!r} has the role {described(role)}, which is unknown."
                f"{did_you_mean(str(role), map(str, Role))}"
            )
        if KNOWN.get(name, known) != known:
            raise LayoutError(
                f"the axis {name!r} has the role '{known}', but its name says '{KNOWN[name]}': name it otherwise."
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "size", int(size))
        object.__setattr__(self, "role", Role(known))


class Mesh(Mapping[str, int]):
    """Axes whose sizes multiply up to the ranks, in the order in which these are counted: the last varies fastest.

    It is also the mapping of names to sizes. ``rare``: the name of the axis whose ranks come together now and then
    only; empty: there is none. ``meets``: they do in every step, though they sum no gradients.

    Raises:
        LayoutError: two axes have one name, or the one that is rare is not there, or no axis of data.
    """

    def __init__(self, axes: Iterable[Axis], rare: str = "", *, meets: bool = False) -> None:
        self.axes = tuple(axes)
        self._by_name = {axis.name: axis for axis in self.axes}
        if rare and (rare not in self._by_name or self._by_name[rare].role is not Role.DATA):
            known = [axis.name for axis in self.axes if axis.role is Role.DATA]
            raise LayoutError(
                f"Outer.axis is {rare!r}, which is not an axis of data of the mesh; these are "
                f"{', '.join(known) or 'none'}."
                f"{did_you_mean(rare, known)}"
            )
        #: The axis whose ranks come together now and then only, as a tuple; empty where it has one rank.
        self.rare: Axes = (rare,) if rare and self._by_name[rare].size > 1 else ()
        self.meets = meets and bool(self.rare)
        if len(self._by_name) < len(self.axes):
            raise LayoutError(f"the mesh has two axes of one name: {', '.join(axis.name for axis in self.axes)}.")

    @classmethod
    def of(cls, sizes: Sizes) -> Mesh:
        """The mesh with these sizes, whose axes have the roles of their names; an unknown name is an axis of data."""
        if isinstance(sizes, Mesh):
            return sizes
        return cls(Axis(name, size, KNOWN.get(name, Role.DATA)) for name, size in sizes.items())

    def __getitem__(self, name: str) -> int:
        return self._by_name[name].size

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.axes)

    def __repr__(self) -> str:
        rare = f", rare={self.rare[0]!r}" if self.rare else ""
        return f"Mesh({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)}{rare})"

    @property
    def size(self) -> int:
        """All ranks."""
        return self.parts(self)

    def parts(self, axes: Iterable[str]) -> int:
        """How many ranks there are along these axes."""
        return prod(self[axis] for axis in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        found: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.size)
        return {axis.name: found[axis.name] for axis in self.axes}

    def rows(self, axes: Axes) -> list[list[int]]:
        """The ranks that differ on these axes only, list by list; each rank is in one."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coords = self.coords(rank)
            found.setdefault(tuple(coords[axis] for axis in self if axis not in axes), []).append(rank)
        return list(found.values())

    def of_role(self, *roles: Role) -> Axes:
        """The axes of these roles with more than one rank."""
        return tuple(axis.name for axis in self.axes if axis.role in roles and axis.size > 1)

    # -- what follows from roles

    @property
    def reading(self) -> Axes:
        """The axes on which ranks of a group read other things."""
        return tuple(axis for axis in self.of_role(*READING) if axis not in self.rare)

    @property
    def sampling(self) -> Axes:
        """The axes on which ranks read other samples."""
        return self.of_role(*SAMPLING)

    @property
    def divisor(self) -> int:
        """By how many ranks gradients are divided, whatever they are of."""
        return self.parts(self.reading)

    @property
    def meeting(self) -> Axes:
        """The axes of the ranks that run one program."""
        axes = self.of_role(*(role for role in Role if role is not Role.PIPELINE))
        return tuple(axis for axis in axes if self.meets or axis not in self.rare)

    @property
    def alike(self) -> Axes:
        """The axes of data on which ranks have the same values in every step."""
        return (*self.rare, *self.reading) if self.meets else self.reading

    @cached_property
    def stages(self) -> Axes:
        """The axes on which ranks have other layers: squares are summed over them too, whatever they are of."""
        return self.of_role(Role.PIPELINE)

    def carved(self, over: Axes) -> Axes:
        """The axes that a table means by ``over``: axes of experts are carved out of what it calls ``intra``."""
        if "intra" not in over:
            return over
        return (*over, *(axis for axis in self.of_role(Role.EXPERT) if axis not in over))

    def summed(self, distinct: Axes = ()) -> Axes:
        """Over which axes gradients are summed, of parameters that are distinct on some. On the same ranks their
        values are the same."""
        return tuple(axis for axis in self.reading if axis not in distinct)

    @property
    def groups(self) -> int:
        """How many groups of ranks there are, whose weights meet now and then."""
        return self.parts(self.rare)

    def replicas(self, distinct: Axes = ()) -> Axes:
        """On which axes parameters that are distinct on some are equal without being sent."""
        return tuple(axis for axis in self.of_role(Role.TENSOR) if axis not in distinct)

    def normed(self, master: Axes, distinct: Axes = ()) -> Axes:
        """Over which axes squares are summed for the norm of gradients whose master is split over ``master``, of
        parameters that are distinct on some: those on which other elements lie."""
        return (*master, *(axis for axis in distinct if axis in self and self[axis] > 1))


# -- sizes that are legal


FEW = 8  # sizes that are tried of each axis where several have to change


def nearest_that_divides(size: int, *numbers: int) -> int:
    """The size next to ``size``, by ratio, that divides all of ``numbers``; the smaller of two."""
    return min(_divisors(gcd(*numbers)), key=lambda each: (_apart(each, size), each))


def nearest_sizes(sizes: Mapping[str, int], ranks: int, *, whole: bool) -> dict[str, int]:
    """Sizes next to these whose product divides the ranks, or, as a ``whole``, is their number: as few as can be are
    changed, by as little as can be. Empty: none was found."""
    names, known = list(sizes), _divisors(ranks)
    for count in range(1, len(names) + 1):
        found: list[tuple[float, tuple[int, ...]]] = []
        for changed in combinations(range(len(names)), count):
            for values in _values(sizes, names, changed, known):
                size = prod(values)
                if size == ranks or (not whole and ranks % size == 0):
                    found.append((sum(_apart(x, sizes[name]) for x, name in zip(values, names, strict=True)), values))
        if found:
            return dict(zip(names, min(found)[1], strict=True))
    return {}


def _values(
    sizes: Mapping[str, int], names: Sequence[str], changed: Sequence[int], known: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """All sizes, of which those at ``changed`` are among the ``known``."""
    choices = [[sizes[name]] for name in names]
    for i in changed:
        near = sorted(known, key=lambda each, old=sizes[names[i]]: _apart(each, old))
        choices[i] = near if len(changed) < 3 else [*near[:FEW], 1]
    yield from product(*choices)


def _apart(one: int, other: int) -> float:
    return round(abs(log(one / other)), 9)


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
