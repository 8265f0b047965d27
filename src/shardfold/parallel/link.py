"""What layers ask of the ranks along one axis, or along all axes of data.

A layer knows its axis by name and takes a link from :func:`link_of`; :func:`axes_named` says which axes of a mesh a
name means. An engine binds the links of all modules when it
is made; before that, and on an axis of one rank, a link is of one rank and every call gives back what it was given.
Calls are the same on all ranks of the axis, in one order: each has its number among all that ranks do together, waits
as gathers and reductions do, and is counted under its axis. Autograd does not see them: see ``functions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import prod
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.comm.comm import Comm
from shardfold.comm.meter import LAYERS
from shardfold.comm.transport import Pending, sum_into
from shardfold.errors import UsageError
from shardfold.nn.ranks import AxisRanks
from shardfold.plan.axes import Axes, Mesh, Role
from shardfold.plan.cost import Sent, ring_bytes
from shardfold.plan.placement import shard_index
from shardfold.sharding.freed import apart
from shardfold.torch_internals import storage_key

__all__ = ["AxisLink", "Link", "MeshLink", "OneRank", "Shift", "axes_named", "bind_links", "link_of", "numbered"]

_LINKS = "_shardfold_links"
_NUMBERED: WeakValueDictionary[int, Link] = WeakValueDictionary()
_NUMBERS = count(1)
_NARROW = (torch.float16, torch.bfloat16)


class Shift:
    """Tensors on their way from one neighbour, and to the other.

    Args:
        received: what :meth:`wait` gives.
        finish: returns when it is there.
    """

    def __init__(self, received: Sequence[Tensor], finish: Callable[[], object] = lambda: None) -> None:
        self._received, self._finish = list(received), finish

    def wait(self) -> list[Tensor]:
        """What came, once it is there."""
        self._finish()
        self._finish = lambda: None
        return self._received


Lengths = Sequence[int] | None
"""By rank; None: all have as much."""


class Link(AxisRanks, Protocol):
    """The ranks along one axis, of which this one is the ``rank``-th of ``size``.

    No call changes what it is given, and on one rank each gives that back. Sums of 16-bit tensors over Gloo are in
    fp32 and in the order of ranks; results that all ranks get are equal to the bit on them.
    """

    @property
    def axis(self) -> str: ...

    @property
    def number(self) -> int:
        """By which a compiled graph finds it (see :func:`numbered`)."""
        ...

    def all_gather(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        """The ranks' tensors one behind the other along ``dim``, where the r-th has ``sizes[r]``; None: as this one."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        """This rank's part along ``dim`` of the sum, where the r-th gets ``sizes[r]``; None: equal parts."""
        ...

    def all_to_all(
        self, tensor: Tensor, split: int, concat: int, *, split_sizes: Lengths = None, concat_sizes: Lengths = None
    ) -> Tensor:
        """Cuts ``tensor`` along ``split``, the r-th part for rank r, and puts what comes one behind the other along
        ``concat``. ``split_sizes``: of the parts; None: equal ones. ``concat_sizes``: what each rank's tensor has along
        ``concat``; None: as this one's."""
        ...

    def exchange(self, rows: Tensor, to: Sequence[int], by: Sequence[int]) -> Tensor:
        """Sends rank r the next ``to[r]`` of ``rows``, and gives those that come, ``by[r]`` of rank r, in the order of
        ranks."""
        ...

    def shift(self, tensors: Sequence[Tensor], to: int = 1, shapes: Sequence[Sequence[int]] | None = None) -> Shift:
        """Begins to send to the rank ``to`` further on, as in a ring, what the one as far behind sends here.
        ``tensors`` stay as they are until :meth:`Shift.wait`. ``shapes``: of what comes; None: as of what goes."""
        ...


class OneRank(Link):
    """An axis of one rank."""

    def __init__(self, axis: str) -> None:
        self._axis = axis

    @property
    def axis(self) -> str:
        return self._axis

    @property
    def number(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        return tensor

    def all_to_all(
        self, tensor: Tensor, split: int, concat: int, *, split_sizes: Lengths = None, concat_sizes: Lengths = None
    ) -> Tensor:
        return tensor

    def exchange(self, rows: Tensor, to: Sequence[int], by: Sequence[int]) -> Tensor:
        return rows

    def shift(self, tensors: Sequence[Tensor], to: int = 1, shapes: Sequence[Sequence[int]] | None = None) -> Shift:
        return Shift(tensors)


class MeshLink(Link):
    """The ranks along an axis of an engine's mesh, or along several, of more than one rank.

    Args:
        axis: its name, or names in the order of the mesh.
        comm: the engine's way to the other ranks.
        apart: whether ranks that differ on other axes may do different things now, as inside ``gathered()``.
    """

    def __init__(self, axis: str | Axes, comm: Comm, apart: Callable[[], bool] = lambda: False) -> None:
        self._axes: Axes = (axis,) if isinstance(axis, str) else axis
        self._axis, self._comm, self._apart = "+".join(self._axes), comm, apart
        self._size = comm.mesh.sizes.parts(self._axes)
        self._rank = shard_index(self._axes, comm.mesh.sizes, comm.mesh.coords)
        self._number = next(_NUMBERS)
        _NUMBERED[self._number] = self

    @property
    def axis(self) -> str:
        return self._axis

    @property
    def number(self) -> int:
        return self._number

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.dtype in _NARROW and not self._comm.mesh.on_streams:
            return self._narrow_sum(tensor)
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        flat = out.view(-1)
        self._do("ALL_REDUCE", out.nbytes, lambda group: self._comm.transport.all_reduce(flat, group))
        return out

    def _narrow_sum(self, tensor: Tensor) -> Tensor:
        """As a reduce-scatter, which sums in fp32, and a gather."""
        flat, length = tensor.detach().reshape(-1), -(-tensor.numel() // self._size)
        full = torch.nn.functional.pad(flat, (0, length * self._size - len(flat)))
        mine = full[self._rank * length : (self._rank + 1) * length]
        kind = "ALL_REDUCE"
        self._do(kind, full.nbytes, lambda group: self._comm.transport.reduce_scatter(full, mine, group, add=False))
        self._do(kind, None, lambda group: self._comm.transport.all_gather(full, group))
        return full[: len(flat)].view(tensor.shape)

    def max(self, tensor: Tensor) -> Tensor:
        out = tensor.detach().clone(memory_format=torch.contiguous_format)

        def begin(group: Any) -> Pending:
            return Pending([dist.all_reduce(out, dist.ReduceOp.MAX, group=group, async_op=True)])

        self._do("ALL_REDUCE", out.nbytes, begin)
        return out

    def all_gather(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        moved = tensor.detach().movedim(dim, 0)
        if sizes is not None and len(set(sizes)) > 1:
            flat, each = moved.reshape(-1), prod(moved.shape[1:])
            received = flat.new_empty(sum(sizes) * each)
            to, by = [len(flat)] * self._size, [size * each for size in sizes]
            self._exchange("ALL_GATHER", flat.repeat(self._size), to, received, by)
            return received.view(sum(sizes), *moved.shape[1:]).movedim(0, dim).contiguous()
        full = moved.new_empty(self._size * len(moved), *moved.shape[1:])
        full.chunk(self._size)[self._rank].copy_(moved)
        flat = full.view(-1)
        self._do("ALL_GATHER", flat.nbytes, lambda group: self._comm.transport.all_gather(flat, group))
        return full.movedim(0, dim).contiguous()

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        moved = tensor.detach().movedim(dim, 0)
        if sizes is not None and len(set(sizes)) > 1:
            each, mine = prod(moved.shape[1:]), sizes[self._rank]
            received = moved.new_empty(self._size, mine * each)
            to, by = [size * each for size in sizes], [mine * each] * self._size
            self._exchange("REDUCE_SCATTER", moved.reshape(-1), to, received.view(-1), by)
            out = torch.empty_like(received[0])
            sum_into(out, list(received), add=False)
            return out.view(mine, *moved.shape[1:]).movedim(0, dim).contiguous()
        full = moved.reshape(-1)
        if storage_key(full.untyped_storage()) == storage_key(tensor.untyped_storage()):
            full = full.clone()  # a transport may sum in it
        out = full.new_empty(len(full) // self._size)
        self._do(
            "REDUCE_SCATTER",
            full.nbytes,
            lambda group: self._comm.transport.reduce_scatter(full, out, group, add=False),
        )
        return out.view(len(moved) // self._size, *moved.shape[1:]).movedim(0, dim).contiguous()

    def all_to_all(
        self, tensor: Tensor, split: int, concat: int, *, split_sizes: Lengths = None, concat_sizes: Lengths = None
    ) -> Tensor:
        tensor = tensor.detach()
        split, concat = split % tensor.dim(), concat % tensor.dim()
        parts_along = split_sizes or [tensor.shape[split] // self._size] * self._size
        comes_along = concat_sizes or [tensor.shape[concat]] * self._size
        parts = [part.reshape(-1) for part in tensor.split(list(parts_along), split)]
        shapes: list[list[int]] = []
        for along in comes_along:
            shape = list(tensor.shape)
            shape[concat] = along
            shape[split] = parts_along[self._rank]
            shapes.append(shape)
        received = tensor.new_empty(sum(map(prod, shapes)))
        by = [prod(shape) for shape in shapes]
        self._exchange("ALL_TO_ALL", torch.cat(parts), [len(part) for part in parts], received, by)
        came = zip(received.split(by), shapes, strict=True)
        return torch.cat([part.view(shape) for part, shape in came], dim=concat)

    def exchange(self, rows: Tensor, to: Sequence[int], by: Sequence[int]) -> Tensor:
        each = prod(rows.shape[1:])
        received = rows.new_empty(sum(by), *rows.shape[1:])
        sent, came = [n * each for n in to], [n * each for n in by]
        self._exchange("ALL_TO_ALL", rows.detach().reshape(-1), sent, received.view(-1), came)
        return received

    def shift(self, tensors: Sequence[Tensor], to: int = 1, shapes: Sequence[Sequence[int]] | None = None) -> Shift:
        received = [t.new_empty(tuple(s)) for t, s in zip(tensors, shapes or [t.shape for t in tensors], strict=True)]
        begun: list[Callable[[], None]] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # one exchange for all of a dtype
            goes = torch.cat([tensor.detach().reshape(-1) for tensor in tensors if tensor.dtype == dtype])
            comes = [tensor for tensor in received if tensor.dtype == dtype]
            begun.append(self._begin_shift(goes, comes, to))

        def finish() -> None:
            for each in begun:
                each()

        return Shift(received, finish)

    def _begin_shift(self, goes: Tensor, comes: Sequence[Tensor], to: int) -> Callable[[], None]:
        lengths = [tensor.numel() for tensor in comes]
        arriving = goes.new_empty(sum(lengths))
        sent, by = [0] * self._size, [0] * self._size
        sent[(self._rank + to) % self._size], by[(self._rank - to) % self._size] = len(goes), len(arriving)
        pending = self._begin(
            "SHIFT",
            goes.nbytes * (to % self._size != 0),
            lambda group: self._comm.transport.exchange(goes, sent, arriving, by, group),
        )

        def finish() -> None:
            with apart():
                pending.wait(self._comm.agreement.wait)
            for tensor, part in zip(comes, arriving.split(lengths), strict=True):
                tensor.copy_(part.view(tensor.shape))

        return finish

    def _exchange(self, verb: str, goes: Tensor, to: Sequence[int], comes: Tensor, by: Sequence[int]) -> None:
        sent = (len(goes) - to[self._rank]) * goes.itemsize
        pending = self._begin(verb, sent, lambda group: self._comm.transport.exchange(goes, to, comes, by, group))
        with apart(), self._comm.agreement.uninterrupted():
            pending.wait(self._comm.agreement.wait)

    def _do(self, verb: str, num_bytes: int | None, begin: Callable[[Any], Pending]) -> None:
        """One collective over a whole of so many bytes, from its beginning to its end; None: counted already."""
        sent = None if num_bytes is None else int(ring_bytes(verb, num_bytes, self._size))
        pending = self._begin(verb, sent, begin)
        with apart(), self._comm.agreement.uninterrupted():
            pending.wait(self._comm.agreement.wait)

    def _begin(self, verb: str, sent: int | None, begin: Callable[[Any], Pending]) -> Pending:
        comm = self._comm
        with apart(), comm.agreement.uninterrupted():  # modes see the same each time, however long ranks wait
            (comm.agreement.aside if self._apart() else comm.agreement.issue)(f"{verb} of a layer along {self._axis!r}")
            pending = begin(comm.mesh.group(self._axes))
            if sent is not None:
                comm.meter.layer(Sent(LAYERS, verb, self._axes), sent)
        return pending


class AxisLink(Link):
    """The link that a module keeps: of one rank until an engine binds it. A copy, or what comes of a pickle, is not
    bound.

    Args:
        axis: its name in ``mesh=``.
        parts: how many ranks have parts of the module: with more than one it does nothing until it is bound.
    """

    def __init__(self, axis: str, parts: int = 1) -> None:
        self._link: Link | None = OneRank(axis) if parts == 1 else None
        self._name, self.parts = axis, parts

    def __reduce__(self) -> Any:
        return AxisLink, (self._name, self.parts)

    def part(self, parts: int) -> None:
        """The module was cut into so many parts."""
        self.parts = parts
        self._link = None if parts > 1 else OneRank(self._name)

    def bind(self, link: Link | None) -> None:
        """Calls go to ``link``; None: they raise, because the ranks they were for are gone."""
        self._link = link

    def _bound(self) -> Link:
        if self._link is None:
            raise UsageError(
                f"a layer needs the other ranks along {self._name!r}, and no engine connects it to them: it was "
                "closed, or this is a copy; make an engine of the model, or load a checkpoint into a whole one."
            )
        return self._link

    @property
    def axis(self) -> str:
        return self._name

    @property
    def number(self) -> int:
        return self._bound().number

    @property
    def size(self) -> int:
        return self._bound().size

    @property
    def rank(self) -> int:
        return self._bound().rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._bound().all_reduce(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        return self._bound().max(tensor)

    def all_gather(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        return self._bound().all_gather(tensor, dim, sizes)

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        return self._bound().reduce_scatter(tensor, dim, sizes)

    def all_to_all(
        self, tensor: Tensor, split: int, concat: int, *, split_sizes: Lengths = None, concat_sizes: Lengths = None
    ) -> Tensor:
        return self._bound().all_to_all(tensor, split, concat, split_sizes=split_sizes, concat_sizes=concat_sizes)

    def exchange(self, rows: Tensor, to: Sequence[int], by: Sequence[int]) -> Tensor:
        return self._bound().exchange(rows, to, by)

    def shift(self, tensors: Sequence[Tensor], to: int = 1, shapes: Sequence[Sequence[int]] | None = None) -> Shift:
        return self._bound().shift(tensors, to, shapes)


def numbered(number: int) -> Link:
    """The link of that number, while an engine has it."""
    return _NUMBERED[number]


def link_of(module: nn.Module, axis: str) -> AxisLink:
    """The link of ``module`` along ``axis``, which an engine of a model with this module binds; made when it is first
    asked for, which is before the engine is made (in a constructor)."""
    links: dict[str, AxisLink] = vars(module).setdefault(_LINKS, {})
    return links.setdefault(axis, AxisLink(axis))


def _links(modules: Iterable[nn.Module]) -> Iterator[AxisLink]:
    for module in modules:
        of_module: Mapping[str, AxisLink] = vars(module).get(_LINKS, {})
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


def bind_links(
    model: nn.Module, comm: Comm, apart: Callable[[], bool] = lambda: False, link: type[MeshLink] = MeshLink
) -> Callable[[], None]:
    """Binds the links of all modules in ``model`` to the ranks of an engine; returns what undoes it, after which those
    of more than one rank refuse calls. ``apart``: see :class:`MeshLink`; ``link``: what is made for an axis.

    Raises:
        UsageError: a layer was cut for another number of ranks.
    """
    made: dict[Axes, MeshLink] = {}
    bound: list[AxisLink] = []
    for each in _links(model.modules()):
        axes = axes_named(each.axis, comm.mesh.sizes)
        size = comm.mesh.sizes.parts(axes)
        if each.parts not in (1, size):
            raise UsageError(
                f"the model was cut into {each.parts} parts along {each.axis!r}, and mesh= has {size} ranks there: "
                "build it anew, or make the engine on as many ranks."
            )
        if size > 1:
            each.bind(made.setdefault(axes, link(axes, comm, apart)))
            bound.append(each)
        else:
            each.bind(OneRank(each.axis))

    def undo() -> None:
        for each in bound:
            each.bind(None)

    return undo
