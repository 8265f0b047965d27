"""The ranks along axes of an engine's mesh.

Each call has its number among all that ranks do together, waits as gathers and reductions do, and is counted under its
axis. Autograd does not see them: see ``functions``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm.comm import Comm
from shardfold.comm.meter import LAYERS
from shardfold.comm.transport import Pending, sum_into
from shardfold.nn.axis_group import AxisGroup, Lengths, Shift
from shardfold.plan.axes import Axes
from shardfold.plan.cost import Sent, ring_bytes
from shardfold.plan.placement import shard_index
from shardfold.torch_internals import storage_key, without_user_modes

__all__ = ["MeshGroup"]

_NARROW = (torch.float16, torch.bfloat16)


class MeshGroup(AxisGroup):
    """The ranks along an axis of an engine's mesh, or along several, of more than one rank.

    Args:
        axis: its name, or names in the order of the mesh.
        comm: the engine's way to the other ranks.
        apart: whether ranks that differ on other axes may do different things now, as inside ``gathered()``.
        who: asks, for messages.
        purpose: under which what is sent is counted.
    """

    def __init__(
        self,
        axis: str | Axes,
        comm: Comm,
        apart: Callable[[], bool] = lambda: False,
        who: str = "a layer",
        purpose: str = LAYERS,
    ) -> None:
        self._axes: Axes = (axis,) if isinstance(axis, str) else axis
        self._comm, self._apart, self._who, self._purpose = comm, apart, who, purpose
        mesh = comm.mesh
        rank = shard_index(self._axes, mesh.sizes, mesh.coords)
        super().__init__("+".join(self._axes), mesh.sizes.parts(self._axes), rank)

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
        tensor = tensor.detach()
        if sizes is not None and len(set(sizes)) > 1:
            moved = tensor.movedim(dim, 0)
            flat, each = moved.reshape(-1), prod(moved.shape[1:])
            received = flat.new_empty(sum(sizes) * each)
            to, by = [len(flat)] * self._size, [size * each for size in sizes]
            self._exchange("ALL_GATHER", flat.repeat(self._size), to, received, by)
            return received.view(sum(sizes), *moved.shape[1:]).movedim(0, dim).contiguous()
        full = tensor.new_empty(self._size, *tensor.shape)
        full[self._rank].copy_(tensor)
        flat = full.view(-1)
        self._do("ALL_GATHER", flat.nbytes, lambda group: self._comm.transport.all_gather(flat, group))
        return full.flatten(0, 1) if dim == 0 else torch.cat(full.unbind(), dim)  # rows are copied as a whole

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
            with without_user_modes():
                pending.wait(self._comm.agreement.wait)
            for tensor, part in zip(comes, arriving.split(lengths), strict=True):
                tensor.copy_(part.view(tensor.shape))

        return finish

    def _exchange(self, verb: str, goes: Tensor, to: Sequence[int], comes: Tensor, by: Sequence[int]) -> None:
        sent = (len(goes) - to[self._rank]) * goes.itemsize
        pending = self._begin(verb, sent, lambda group: self._comm.transport.exchange(goes, to, comes, by, group))
        with without_user_modes(), self._comm.agreement.uninterrupted():
            pending.wait(self._comm.agreement.wait)

    def _do(self, verb: str, num_bytes: int | None, begin: Callable[[Any], Pending]) -> None:
        """One collective over a whole of so many bytes, from its beginning to its end; None: counted already."""
        sent = None if num_bytes is None else int(ring_bytes(verb, num_bytes, self._size))
        pending = self._begin(verb, sent, begin)
        with without_user_modes(), self._comm.agreement.uninterrupted():
            pending.wait(self._comm.agreement.wait)

    def _begin(self, verb: str, sent: int | None, begin: Callable[[Any], Pending]) -> Pending:
        comm = self._comm
        with (
            without_user_modes(),
            comm.agreement.uninterrupted(),
        ):  # modes see the same each time, however long ranks wait
            issue = comm.agreement.aside if self._apart() else comm.agreement.issue
            issue(f"{verb} of {self._who} along {self._axis!r}")
            pending = begin(comm.mesh.group(self._axes))
            if sent is not None:
                comm.meter.send(Sent(self._purpose, verb, self._axes), sent)
        return pending
