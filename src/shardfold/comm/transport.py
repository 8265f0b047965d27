"""The plain transport: elements travel as they are, by the collectives of ``torch.distributed``.

Which algorithm carries a collective depends on the backend and is nobody else's business (see ``choice``; ranks of one
host that run on its CPU have a transport of their own, ``near``):

    backend        gather                              reduce-scatter                       all-reduce
    NCCL           all-gather in place                 reduce-scatter                       all-reduce
    Gloo           a broadcast from each owner,        all-to-all, summed here in rank      all-reduce
                   in place                            order (needs one temporary)
    Gloo on CUDA   as Gloo                             all-reduce of a copy (Gloo has no    all-reduce
                                                       all-to-all for CUDA tensors)

Gloo's own all-gather flattens through a temporary, and its reduce-scatter is an all-reduce of a copy: both cost two to
three times what stands here. Summing in rank order also makes a run reproducible bit for bit, and 16-bit gradients
are summed in fp32. NCCL sums in the dtype that travels, in an order of its own: where gradients are to be sent in 16
bits, their sums are rounded there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold import accelerator
from shardfold.torch_internals import all_gather_single, reduce_scatter_single

__all__ = ["GlooTransport", "Pending", "StreamTransport", "Transport", "Waiter", "drain", "sum_into"]

Waiter = Callable[[Any], None]
"""Waits for one ``torch.distributed`` work; it may raise when another rank gave up."""


class Pending:
    """A collective on its way."""

    def __init__(self, works: list[Any], finish: Callable[[], object] | None = None) -> None:
        self._works = works
        self._finish = finish

    def done(self) -> bool:
        """Whether :meth:`wait` would not have to wait."""
        return all(work.is_completed() for work in self._works)

    def wait(self, waiter: Waiter) -> None:
        """Returns when the result may be read, and the tensors be changed or freed (but what is resident, see
        :meth:`Transport.fence`)."""
        for work in self._works:
            waiter(work)  # the host, or the current stream, which then reads what came and reuses what was sent
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None


def drain(pending: list[Pending], waiter: Waiter) -> None:
    """Waits for each in turn; what one held is given back before the next is waited for."""
    while pending:
        pending[0].wait(waiter)
        del pending[0]


class Transport(Protocol):
    """What the engine asks of a transport. All tensors are 1-D and contiguous."""

    kind: str
    """``near``, ``gloo`` or ``nccl``: what it holds besides, see :class:`shardfold.plan.lifetimes.Behaviour`."""

    def all_gather(self, full: Tensor, group: Any, *, resident: Tensor | None = None) -> Pending:
        """Completes ``full``, in which this rank's chunk (its group rank's) is already in place.

        ``resident`` is memory outside of ``full`` that holds the same values as that chunk: the shard that it was
        copied from. It stays as it is until the next :meth:`fence` of all ranks; behind the first gather of it since
        the last one this rank may change it earlier, behind a fence of its own. It is a hint: what sends (Gloo, NCCL)
        has no use for it, and what lets others fetch (reads of a neighbour's memory, RDMA from registered buffers)
        serves them from there, so that no rank waits for the others before it computes with ``full``.
        """
        ...

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        """Sums ``full`` over the group; this rank's chunk goes to (``add``: is added to) ``out``, which may lie in
        ``full`` and may be wider than it."""
        ...

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        """Sums ``tensor`` over the group, in place."""
        ...

    def fence(self, waiter: Waiter, resident: Tensor | None = None) -> None:
        """Returns when no other rank fetches from that ``resident`` any more; None: from any, on all ranks at the same
        place, which is the end of each pass. Nothing where ranks only send."""

    def close(self) -> None:
        """The transport is not used any more."""

    def sever(self) -> None:
        """On any thread: whoever waits for a connection of the transport's own raises, here and on the other side."""

    def words(self, group: Any) -> Any:
        """What carries small messages of a group's hosts in place of its collectives, as
        :class:`shardfold.comm._words.Words`; None: nothing does."""
        return None

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        """Sends the next ``to[r]`` elements of ``sent`` to rank ``r`` of the group; its ``by[r]`` come one after the
        other into ``received``."""
        ...


class GlooTransport(Transport):
    """Gloo, on tensors of the CPU or, for two processes that share a GPU, of CUDA.

    Args:
        empty: makes the temporary of a reduce-scatter, of so many elements of a dtype.
        recycle: takes it back.
    """

    kind = "gloo"

    def __init__(self, empty: Callable[[int, torch.dtype], Tensor], recycle: Callable[[Tensor], None]) -> None:
        self._empty, self._recycle = empty, recycle

    def all_gather(self, full: Tensor, group: Any, *, resident: Tensor | None = None) -> Pending:
        chunks = full.chunk(dist.get_world_size(group))
        works = [dist.broadcast(c, group=group, group_src=i, async_op=True) for i, c in enumerate(chunks)]
        return Pending(works)

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        if accelerator.has_streams(full.device):
            copy = full.clone()
            work = dist.all_reduce(copy, group=group, async_op=True)
            return Pending([work], lambda: _put(out, copy.chunk(ranks)[me], add))
        received = self._empty(full.numel(), full.dtype)
        work = dist.all_to_all_single(received, full, group=group, async_op=True)

        def finish() -> None:
            sum_into(out, received.chunk(ranks), add)
            self._recycle(received)

        return Pending([work], finish)

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        return Pending([dist.all_reduce(tensor, group=group, async_op=True)])

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        apart = accelerator.has_streams(sent.device)
        out, source = (received.cpu(), sent.cpu()) if apart else (received, sent)
        work = dist.all_to_all_single(out, source, list(by), list(to), group=group, async_op=True)
        return Pending([work], partial(received.copy_, out) if apart else None)


class StreamTransport(Transport):
    """NCCL, and what else queues on streams of the device: each collective as it is. ``wait`` orders streams and does
    not stop the host."""

    kind = "nccl"

    def all_gather(self, full: Tensor, group: Any, *, resident: Tensor | None = None) -> Pending:
        mine = full.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        return Pending([all_gather_single(full, mine, group=group, async_op=True)])

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        if not add and out.dtype == full.dtype:
            return Pending([reduce_scatter_single(out, full, group=group, async_op=True)])
        mine = torch.empty(full.numel() // dist.get_world_size(group), dtype=full.dtype, device=full.device)
        work = reduce_scatter_single(mine, full, group=group, async_op=True)
        return Pending([work], lambda: _put(out, mine, add))

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        return Pending([dist.all_reduce(tensor, group=group, async_op=True)])

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        return Pending([dist.all_to_all_single(received, sent, list(by), list(to), group=group, async_op=True)])


def _put(out: Tensor, value: Tensor, add: bool) -> None:
    # Where a collective was issued beside the computation, what it needed was allocated there, and the next that is
    # allocated there may get this memory while the computation still has to read it.
    accelerator.used_here(value)
    if add:
        out.add_(value)
    else:
        out.copy_(value)


def sum_into(out: Tensor, rows: Sequence[Tensor], add: bool) -> None:
    """Sums ``rows`` in order into ``out``; narrow rows go through fp32, as each partial sum would be rounded."""
    if out.itemsize < 4:
        wide = rows[0].float()
        for row in rows[1:]:
            wide.add_(row)
        _put(out, wide, add)
        return
    if add:
        out.add_(rows[0])
        rest = rows[1:]
    elif out.dtype == rows[0].dtype and len(rows) > 1:
        torch.add(rows[0], rows[1], out=out)
        rest = rows[2:]
    else:
        out.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        out.add_(row)
