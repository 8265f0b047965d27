"""The simulated device of this process: streams that compute beside the host, and memory of its own.

operations   (operations.py) are queued here with what they read and write
order        (clocks.py) is what events and waits say
memory       (memory.py) belongs to streams
the checker  (checker.py) compares each use with those that nothing orders it behind
queues       (queues.py) run what is queued: at once, or late and in any legal order
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardfold.errors import UsageError
from shardfold.testing.simulated._checker import Checker
from shardfold.testing.simulated.clocks import Clocks, Moment, is_over
from shardfold.testing.simulated.findings import Findings
from shardfold.testing.simulated.memory import Allocation, Allocator, contiguous, spoil
from shardfold.testing.simulated.queues import Lagging, Poll, PromptQueues, Queues
from shardfold.testing.simulated.regions import span
from shardfold.testing.simulated.sites import Site, here
from shardfold.torch_internals import in_backward

__all__ = ["PROCESS", "SimulatedDevice", "the_device"]


class PendingCollective(Protocol):
    """A collective under way, of a process group (group.py)."""

    moment: Moment

    def finish(self) -> None:
        """Returns when it is over."""

    def poll(self) -> bool:
        """Whether it is over."""
        ...


class SimulatedDevice:
    """Attributes:
    clocks, allocator, checker, queues: see above.
    generator: of its random numbers, one of the CPU, in whose kernels they are drawn.
    default: the stream of what names none.
    """

    default: torch.Stream

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clocks = Clocks()
        self.allocator = Allocator(self.clocks, self.here)
        self.checker = Checker(self.clocks, self.allocator, self.here)
        self.queues: Queues = PromptQueues()
        self.generator = torch.Generator()
        self._error: BaseException | None = None
        self._threads = threading.local()
        self._backwards: list[tuple[torch.Stream, Site]] = []
        self._collectives: list[PendingCollective] = []

    # -- where and when

    @property
    def findings(self) -> Findings:
        return self.checker.findings

    def here(self) -> Site:
        """The caller's site."""
        return here(self._backwards[-1][1] if self._backwards else None)

    @property
    def current(self) -> torch.Stream:
        """The stream into which this thread queues."""
        stream = getattr(self._threads, "stream", None)
        if stream is not None:
            return stream
        # Autograd's thread: as if the whole forward had run on the stream that backward was called on.
        return self._backwards[-1][0] if self._backwards and in_backward() else self.default

    def enter(self, stream: torch.Stream | None) -> torch.Stream | None:
        """This thread queues into ``stream`` from now on; the one that it named before, if it did."""
        before = getattr(self._threads, "stream", None)
        self._threads.stream = stream
        return before

    @property
    def entered(self) -> list[torch.Stream | None]:
        """What this thread goes back to at the ends of its ``with stream`` blocks."""
        return self._threads.__dict__.setdefault("entered", [])

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, a backward runs that was called from here."""
        entry = self.current, here()
        self._backwards.append(entry)
        try:
            yield
        finally:
            self._backwards.remove(entry)

    # -- order

    def record(self, stream: int) -> Moment:
        """What an event records."""
        with self.lock:
            moment = self.clocks.record(stream)
            self.queues.record(stream, moment)
        return moment

    def wait(self, stream: int, moment: Moment) -> None:
        """``stream`` goes on behind ``moment``."""
        with self.lock:
            self.clocks.wait(stream, moment)
            self.queues.wait(stream, moment)

    def wait_on_host(self, moment: Moment) -> None:
        """The host waits for ``moment``.

        Raises:
            Exception: what an operation or a collective raised on the device since the host last waited for it.
        """
        self._await(moment)
        self._raise()

    def _await(self, moment: Moment) -> None:
        self._reach(moment)
        with self.lock:
            self.clocks.host_waited(moment)

    def _reach(self, moment: Moment) -> None:
        """Returns when the device has been there, which nobody is to count on."""
        self.queues.until(moment)
        for each in self._before(moment):
            each.finish()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def is_done(self, moment: Moment) -> bool:
        """Whether the device has come to ``moment``; what the host queues from then on is behind it."""
        return self._saw(moment, moment.done)

    def is_idle(self, stream: int) -> bool:
        """Whether everything that ``stream`` waits for, or has queued, is done; what the host queues from then on is
        behind it."""
        with self.lock:
            moment = Moment(dict(self.clocks[stream]))
        return self._saw(moment, self.queues.is_idle(stream))

    def _saw(self, moment: Moment, done: bool) -> bool:
        if not done or not all([each.poll() for each in self._before(moment)]):
            return False
        with self.lock:
            self.clocks.host_waited(moment)
        return True

    def _before(self, moment: Moment) -> list[PendingCollective]:
        return [each for each in list(self._collectives) if is_over(each.moment, moment)]

    def synchronize(self, streams: Iterable[int] | None = None) -> None:
        """The host waits for these streams, or for all; this is not noted."""
        for moment in [self.record(stream) for stream in (self.clocks.streams if streams is None else streams)]:
            self._await(moment)
        self._raise()

    def host_sync(self, what: str, stream: int | None = None) -> None:
        """The host waits for a stream, or the current one, in ``what``."""
        self.findings.host_sync(what, self.here())
        self.synchronize([self.current.stream_id if stream is None else stream])

    def failed(self, error: BaseException) -> None:
        """What runs on the device raised: whoever waits for it next hears of the first."""
        self._error = self._error or error

    # -- work

    def note(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], stream: int | None = None) -> None:
        """An operation that has been done, or is none of ours, used these."""
        with self.lock:
            self.checker.note(what, self.current.stream_id if stream is None else stream, reads, writes)

    def launch(
        self,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        call: Callable[[], Poll | None],
        stream: int | None = None,
    ) -> None:
        """Queues ``call``, which reads and writes these, into ``stream`` or the current one."""
        stream = self.current.stream_id if stream is None else stream
        with self.lock:
            overwritten = self.checker.note(what, stream, reads, writes)
            if self.queues.lags:
                for memory in overwritten:  # as if it lay in the same place
                    self.queues.run(stream, partial(spoil, memory))
                self.queues.run(stream, call)
                return
        for tensor in (*reads, *writes):
            block = self.allocator.find(tensor)
            if block is not None:
                block.finish()
        self.queues.run(stream, call)

    def under_way(self, collective: PendingCollective, blocks: Iterable[Allocation]) -> None:
        """A collective runs beside the host: whoever uses its memory, or waits for its stream, finishes it."""
        self._collectives.append(collective)
        for block in blocks:
            block.pending.append(collective)

    def over(self, collective: PendingCollective) -> None:
        """It is over."""
        if collective in self._collectives:
            self._collectives.remove(collective)

    # -- memory

    def allocate(self, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
        """A tensor in the pool of the current stream.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        stride = contiguous(size) if stride is None else stride
        self._make_room(span(size, stride) * dtype.itemsize)
        with self.lock:
            return self.allocator.allocate(size, stride, dtype, self.current.stream_id)

    def _make_room(self, nbytes: int) -> None:
        """The host waits for streams that use memory that was freed, where so many bytes fit only then."""
        if self.allocator.arena.limit is None:
            return
        self.allocator.collect()
        streams = self.allocator.arena.wanting(nbytes, self.queues.is_idle)
        if streams:
            self.findings.host_sync("an allocation that waits for freed memory", self.here())
        for stream in streams:
            self._reach(self.record(stream))

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """The memory of ``tensor`` is given to nobody before what ``stream`` has queued by the time it is freed."""
        with self.lock:
            block = self.allocator.find(tensor)
            if block is not None:
                block.recorded.add(stream)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Frees the memory of a storage, or gives it its memory back.

        Raises:
            UsageError: it would have to grow.
            torch.OutOfMemoryError: there is no room.
        """
        if nbytes:
            self._make_room(nbytes)
        with self.lock:
            block = self.allocator.at(storage)
            if block is None or block.memory is None:
                return
            if nbytes > block.nbytes:
                raise UsageError(
                    f"A storage of the simulated device has {block.nbytes} bytes and cannot grow to {nbytes}: "
                    "make a new tensor."
                )
            if nbytes == 0 and not block.freed:
                self.allocator.free(block)
            elif nbytes and block.freed:
                self.allocator.refill(block, self.current.stream_id)
                if not self.queues.lags and not block.pending:
                    spoil(block.memory)

    # -- modes

    def use(self, queues: Queues, findings: Findings, memory: int | None = None) -> tuple[Queues, Findings, int | None]:
        """From now on work runs by ``queues``, what is found goes to ``findings`` and there are ``memory`` bytes; what
        was there before is given back. The host waits for everything queued before."""
        try:
            self.synchronize()
        finally:
            with self.lock:
                self.allocator.collect()
                before = self.queues, self.checker.findings, self.allocator.arena.begin(memory)
                self.queues, self.checker.findings = queues, findings
        return before

    def reset(self) -> None:
        """Forgets what the last user left: errors that nobody has heard of, a stream that is still current, findings,
        and, where an aborted group left some, collectives."""
        with suppress(Exception):
            self.use(PromptQueues(), Findings())
        self._threads.__dict__.clear()
        self._collectives.clear()

    def lagging(self, seed: int, lag: int) -> Queues:
        """Queues for :meth:`use` that stay behind."""
        return Lagging(seed, lag, self.failed)


class _DeviceProcess:
    """Attributes:
    device: that of this process: PyTorch has one place for a device of this kind, which is given once.
    refused: why it cannot be used, if it cannot.
    forked: whether this process is a child of the one that made it.
    """

    device: SimulatedDevice | None = None
    refused = ""
    forked = False


PROCESS = _DeviceProcess()


def the_device() -> SimulatedDevice:
    """That of this process.

    Raises:
        UsageError: it is not installed, or this process is a fork of the one that it is in.
    """
    if PROCESS.forked:
        raise UsageError(
            "The simulated device cannot be used in a forked process, as CUDA's cannot: start the process with the "
            "method 'spawn' or 'forkserver', and enter shardfold.testing.simulated() there."
        )
    if PROCESS.device is None:
        raise UsageError("This process has no simulated device: enter shardfold.testing.simulated() first.")
    return PROCESS.device
