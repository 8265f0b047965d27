"""The process group ``simccl``: collectives of the simulated device with NCCL's semantics, carried by Gloo.

    a call       returns at once; the collective is queued on a stream of the group, behind the current one
    wait()       the current stream waits, never the host (but for a barrier); tensors are kept alive until then
    errors       do not show in wait(), but where the host next waits for the device, and in exception()
    abort()      ends what is under way
    shutdown()   waits for what is under way

Tensors of the CPU and those that are not contiguous are refused, as by NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
)

from shardfold.testing.simulated._collective import Begin, Collective, SimulatedWork
from shardfold.testing.simulated.device import the_device
from shardfold.testing.simulated.memory import NAME
from shardfold.testing.simulated.streams import Stream

__all__ = ["BACKEND", "SimulatedGroup", "register"]

BACKEND = "simccl"
UNSENT = 0x5F5F  # the tag of a message that nobody sends

Started = tuple[list[Any], Callable[[], object] | None]


_ProcessGroup: Any = dist.ProcessGroup  # whose methods have other names for their arguments in each version


class SimulatedGroup(_ProcessGroup):
    """See above.

    Attributes:
        stream: its own, on which its collectives run.
        aborted: whether :meth:`abort` was called.
        failure: the first thing that went wrong.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.stream = Stream()
        self._received = Stream()  # a batch of messages goes both ways at once
        self.aborted = False
        self.failure: BaseException | None = None
        self._name = ""
        self._under_way: list[Collective] = []
        self._batch: list[SimulatedWork] | None = None

    # -- what a group is asked for itself

    def getBackendName(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]  # where torch.distributed puts objects that are sent

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        if torch.device(device).type != NAME:
            raise RuntimeError(f"{BACKEND} has no backend for {device}")
        return self

    supports_splitting = False

    def failed(self, error: BaseException) -> None:
        """A collective was not carried out."""
        self.failure = self.failure or error

    def abort(self) -> None:
        """Ends what is under way, here and, as their connections close, on the other ranks."""
        self.aborted = True
        if self._size > 1 and self._gloo is not None:
            with suppress(RuntimeError):  # a receive that is given up takes the connections with it
                self._gloo.recv([torch.empty(1, device="cpu")], (self._rank + 1) % self._size, UNSENT).wait(
                    timedelta(milliseconds=1)
                )

    def shutdown(self) -> None:
        """Waits for what is under way, and gives the connections back."""
        device = the_device()
        if not self.aborted:
            for stream in (self.stream, self._received):
                device.queues.until(device.record(stream.stream_id))
            for each in list(self._under_way):
                each.finish()
        self._under_way, self._gloo = [], None

    # -- one collective

    def _issue(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        begin: Begin,
        *,
        on: Stream | None = None,
        stops_host: bool = False,
    ) -> SimulatedWork:
        """Queues it: ``begin`` starts it on aliases of the tensors, which it has already.

        Args:
            name: for people.
            reads, writes: its tensors.
            begin: as above.
            on: another stream than the group's.
            stops_host: whether the host waits for it too.
        """
        device = the_device()
        for tensor in (*reads, *writes):
            if tensor.device.type != NAME:
                raise RuntimeError(
                    f"{BACKEND}: {name} of a tensor on {tensor.device}: it carries tensors of {NAME} only"
                )
            if not tensor.is_contiguous():
                raise RuntimeError(f"{BACKEND}: {name} of a tensor that is not contiguous: call .contiguous() first")
        stream = (on or self.stream).stream_id
        device.wait(stream, device.record(device.current.stream_id))
        collective = Collective(device, self, f"{BACKEND}: {name} at {device.here()}", begin)
        device.launch(name, list(reads), list(writes), collective.start, stream)
        collective.moment = device.record(stream)
        self._under_way = [each for each in self._under_way if not each.is_over]
        self._under_way.append(collective)
        if not device.queues.lags and not collective.is_over:
            blocks = [device.allocator.find(tensor) for tensor in (*reads, *writes)]
            device.under_way(collective, [block for block in blocks if block is not None])
        work = SimulatedWork([collective], collective.moment, [*reads, *writes], stops_host)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> SimulatedWork:
        works, self._batch = self._batch or [], None
        device = the_device()
        device.wait(self.stream.stream_id, device.record(self._received.stream_id))
        return SimulatedWork.together(works, device.record(self.stream.stream_id))

    # -- what torch.distributed asks for

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        flats = _aliases(tensors)
        return self._issue("all_reduce", [], list(tensors), lambda: _joined(self._reduce(flat, op) for flat in flats))

    def broadcast(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        opts = opts or BroadcastOptions()
        flats, mine = _aliases(tensors), opts.rootRank == self._rank
        reads, writes = (list(tensors), []) if mine else ([], list(tensors))
        return self._issue("broadcast", reads, writes, lambda: ([self._gloo.broadcast(flats, opts)], None))

    def reduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        opts = opts or ReduceOptions()
        flats = _aliases(tensors)
        return self._issue("reduce", [], list(tensors), lambda: ([self._gloo.reduce(flats, opts)], None))

    def allgather(self, outs: Any, mine: Any, opts: Any = None) -> SimulatedWork:
        pairs = [(_aliases(out), alias) for out, alias in zip(outs, _aliases(mine), strict=True)]
        return self._issue(
            "all_gather",
            list(mine),
            [tensor for out in outs for tensor in out],
            lambda: ([self._gloo.allgather([into], [source]) for into, source in pairs], None),
        )

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> SimulatedWork:
        return self.all_gather_single_coalesced([out], [mine], opts)

    def all_gather_single_coalesced(self, outs: Any, mine: Any, opts: Any = None) -> SimulatedWork:
        for out, each in zip(outs, mine, strict=True):
            self._check_sizes("all_gather", out, each)
        pairs = list(zip(_aliases(outs), _aliases(mine), strict=True))

        def gather(out: Tensor, source: Tensor) -> Any:
            chunks = list(out.view(-1).chunk(self._size))
            return self._gloo.allgather([chunks], [source.reshape(-1).clone()])  # which may lie in `out`

        return self._issue("all_gather", list(mine), list(outs), lambda: ([gather(*pair) for pair in pairs], None))

    def reduce_scatter(self, outs: Any, parts: Any, opts: Any = None) -> SimulatedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        target, sources = _aliases(outs)[0], _aliases(parts[0])
        return self._issue(
            "reduce_scatter",
            list(parts[0]),
            list(outs),
            lambda: self._reduce_scatter(target, torch.cat([source.reshape(-1) for source in sources]), op),
        )

    def reduce_scatter_single(self, out: Tensor, full: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([out], [full], opts)

    def reduce_scatter_single_coalesced(self, outs: Any, fulls: Any, opts: Any = None) -> SimulatedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for out, full in zip(outs, fulls, strict=True):
            self._check_sizes("reduce_scatter", full, out)
        pairs = list(zip(_aliases(outs), _aliases(fulls), strict=True))
        return self._issue(
            "reduce_scatter",
            list(fulls),
            list(outs),
            lambda: _joined(self._reduce_scatter(out, full.reshape(-1).clone(), op) for out, full in pairs),
        )

    def all_to_all_single(self, out: Tensor, source: Tensor, by: Any, to: Any, opts: Any = None) -> SimulatedWork:
        into, sent = _aliases([out, source])
        send = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
        begin = lambda: ([send(into, sent, list(by or []), list(to or []), AllToAllOptions())], None)  # noqa: E731
        return self._issue("all_to_all", [source], [out], begin)

    def alltoall(self, outs: Any, parts: Any, opts: Any = None) -> SimulatedWork:
        into, sent = _aliases(outs), _aliases(parts)

        def begin() -> Started:
            flat = torch.cat([each.reshape(-1) for each in sent])
            back = torch.empty(sum(each.numel() for each in into), dtype=flat.dtype, device="cpu")
            sizes = [each.numel() for each in into], [each.numel() for each in sent]
            send = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
            return [send(back, flat, *sizes, AllToAllOptions())], partial(_deal, back, into)

        return self._issue("all_to_all", list(parts), list(outs), begin)

    def scatter(self, outs: Any, parts: Any, opts: Any = None) -> SimulatedWork:
        opts = opts or ScatterOptions()
        into, sent = _aliases(outs), [_aliases(each) for each in parts]
        reads = [tensor for each in parts for tensor in each]
        return self._issue("scatter", reads, list(outs), lambda: ([self._gloo.scatter(into, sent, opts)], None))

    def gather(self, outs: Any, mine: Any, opts: Any = None) -> SimulatedWork:
        opts = opts or GatherOptions()
        into, sent = [_aliases(each) for each in outs], _aliases(mine)
        writes = [tensor for each in outs for tensor in each]
        return self._issue("gather", list(mine), writes, lambda: ([self._gloo.gather(into, sent, opts)], None))

    def send(self, tensors: Any, to: int, tag: int = 0) -> SimulatedWork:
        flats = _aliases(tensors)
        return self._issue("send", list(tensors), [], lambda: ([_Waited(self._gloo.send(flats, to, tag))], None))

    def recv(self, tensors: Any, by: int, tag: int = 0) -> SimulatedWork:
        flats = _aliases(tensors)
        begin = lambda: ([_Waited(self._gloo.recv(flats, by, tag))], None)  # noqa: E731
        return self._issue("recv", [], list(tensors), begin, on=self._received)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        one = torch.ones(1, device=NAME)
        alias, op = the_device().allocator.alias(one), dist.ReduceOp.SUM
        return self._issue("barrier", [], [one], lambda: self._reduce(alias, op), stops_host=True)

    # What torch < 2.13 calls them.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- on the CPU

    def _reduce(self, flat: Tensor, op: Any) -> Started:
        mean, options = op == dist.ReduceOp.AVG, AllreduceOptions()
        how: Any = dist.ReduceOp.SUM if mean else op  # Gloo has no means
        options.reduceOp = how
        work = self._gloo.allreduce([flat], options)
        return [work], partial(flat.div_, self._size) if mean else None

    def _reduce_scatter(self, out: Tensor, full: Tensor, op: Any) -> Started:
        works, end = self._reduce(full, op)

        def scattered() -> None:
            if end is not None:
                end()
            out.view(-1).copy_(full.chunk(self._size)[self._rank])

        return works, scattered

    def _check_sizes(self, name: str, full: Tensor, part: Tensor) -> None:
        if full.numel() != part.numel() * self._size or full.dtype != part.dtype:
            raise ValueError(
                f"{BACKEND}: {name} of {self._size} ranks between {tuple(part.shape)} {part.dtype} on each and "
                f"{tuple(full.shape)} {full.dtype}: the whole has {self._size} times the elements, of the same dtype."
            )


class _Waited:
    """A message of Gloo's, which says that it is over only to who waits for it: a thread does."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True, name="shardfold-simulated-message")
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _aliases(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory on the CPU; tensors that are refused stay as they are, until they are."""
    alias = the_device().allocator.alias
    return [alias(tensor) if tensor.device.type == NAME else tensor for tensor in tensors]


def _joined(started: Any) -> Started:
    pairs = list(started)
    ends = [end for _, end in pairs if end is not None]
    return [work for works, _ in pairs for work in works], (lambda: [end() for end in ends]) if ends else None


def _deal(flat: Tensor, into: Sequence[Tensor]) -> None:
    for target, part in zip(into, flat.split([each.numel() for each in into]), strict=True):
        target.view(-1).copy_(part)


def register() -> None:
    """Tells ``torch.distributed`` of it, as what carries tensors of the device."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, SimulatedGroup, devices=[NAME])
