"""One collective on its way, and the work that a program holds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from shardfold.testing.simulated.clocks import Moment
from shardfold.testing.simulated.device import SimulatedDevice, the_device
from shardfold.testing.simulated.queues import Poll

__all__ = ["Begin", "Collective", "SimulatedWork"]

Begin = Callable[[], tuple[list[Any], Callable[[], object] | None]]
"""Starts a collective on the CPU; gives Gloo's works, and what is to be done when they are over."""


class CollectiveOwner(Protocol):
    """A process group."""

    aborted: bool

    def failed(self, error: BaseException) -> None:
        """A collective was not carried out."""


class Collective:
    """Gloo carries it. Its errors are no error of whoever waits for it, but of the device.

    Args:
        device: on which it runs.
        group: whose it is.
        name: for people, with its place.
        begin: starts it.

    Attributes:
        moment: when it is over on the device, once it is queued.
        failure: what went wrong, once it is over.
    """

    moment: Moment

    def __init__(self, device: SimulatedDevice, group: CollectiveOwner, name: str, begin: Begin) -> None:
        self._device, self._group, self._name, self._begin = device, group, name, begin
        self._works: list[Any] = []
        self._end: Callable[[], object] | None = None
        self._over = False
        self.failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is over, well or not, as far as anybody looked."""
        return self._over

    def start(self) -> Poll | None:
        """It is its turn on the group's stream."""
        if self._group.aborted:
            self._finish(None)
            return None
        try:
            with torch.no_grad():
                self._works, self._end = self._begin()
        except RuntimeError as error:  # connections are closed already
            self._finish(error)
            return None
        return self.poll

    def poll(self) -> bool:
        """Whether it is over."""
        if not self._over and (self._group.aborted or all(work.is_completed() for work in self._works)):
            self.finish()
        return self._over

    def finish(self) -> None:
        """Returns when it is over, well or not."""
        if self._over:
            return
        failure = None
        if not self._group.aborted:
            try:
                for work in self._works:
                    work.wait()
                if self._end is not None:
                    with torch.no_grad():
                        self._end()
            except RuntimeError as error:
                failure = error
        self._finish(failure)

    def _finish(self, error: BaseException | None) -> None:
        self._over, self._works, self._end = True, [], None
        self._device.over(self)
        if error is None and self._group.aborted:
            error = RuntimeError("the process group was aborted")
        if error is not None:
            self.failure = RuntimeError(f"{self._name} failed: {error}")
            self.failure.__cause__ = error
            self._group.failed(self.failure)
            if not self._group.aborted:
                self._device.failed(self.failure)


_Work: Any = distributed_c10d.Work  # whose methods have other defaults in each version


class SimulatedWork(_Work):
    """What a program holds of collectives that were queued together.

    Args:
        collectives: those.
        moment: when they are over on the device.
        kept: their tensors, which are kept until somebody waits, as NCCL keeps them.
        stops_host: whether the host waits too, as for a barrier.
    """

    def __init__(
        self, collectives: Sequence[Collective], moment: Moment, kept: list[Tensor], stops_host: bool = False
    ) -> None:
        super().__init__()
        self._collectives, self._moment, self._kept, self._stops_host = collectives, moment, kept, stops_host
        self._tensors = list(kept)

    @classmethod
    def together(cls, works: Sequence[SimulatedWork], moment: Moment) -> SimulatedWork:
        """One for all of them."""
        collectives = [each for work in works for each in work._collectives]
        return cls(collectives, moment, [tensor for work in works for tensor in work._kept])

    def wait(self, timeout: Any = None) -> bool:
        """What this thread queues from now on is behind it; the host goes on."""
        device = the_device()
        device.wait(device.current.stream_id, self._moment)
        self._kept = []
        if self._stops_host:
            device.host_sync("barrier")
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        lags = the_device().queues.lags
        return self._moment.done if lags else all([each.poll() for each in self._collectives])

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """What went wrong, as soon as that is known."""
        return next((each.failure for each in self._collectives if each.failure is not None), None)

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """One that is done: the current stream waits here, and not the stream of its callbacks."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future
