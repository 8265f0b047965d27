"""Streams and events, as ``torch.cuda`` has them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from shardfold.errors import UsageError
from shardfold.testing.simulated.clocks import Moment
from shardfold.testing.simulated.device import the_device
from shardfold.torch_internals import PRIVATE_DEVICE

__all__ = ["SimulatedEvent", "Stream", "a_stream"]


class Stream(torch.Stream):
    """A queue of the device; what is in it runs in its order, and in no order with that of other streams.

    Args:
        device: the only one.
        priority: accepted, and without effect: an order that holds for all priorities holds for each.
        stream_id: of a stream that there is already.
    """

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any) -> Stream:
        if stream_id is None:
            sim = the_device()
            with sim.lock:
                stream_id = sim.clocks.add()
        return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=int(PRIVATE_DEVICE))

    def wait_event(self, event: Any) -> None:
        """What is queued here from now on runs behind ``event``, if that was recorded."""
        if not isinstance(event, SimulatedEvent):
            raise UsageError(f"wait_event({event!r}): it takes an event of the simulated device, as torch.sim.Event().")
        if event.moment is not None:
            the_device().wait(self.stream_id, event.moment)

    def wait_stream(self, other: Any) -> None:
        """What is queued here from now on runs behind what is in the other stream now."""
        sim = the_device()
        sim.wait(self.stream_id, sim.record(a_stream(other, "wait_stream").stream_id))

    def record_event(self, event: Any = None) -> SimulatedEvent:
        """An event behind what is queued here now."""
        event = event if event is not None else SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for this stream."""
        the_device().host_sync("stream.synchronize", self.stream_id)

    def query(self) -> bool:
        """Whether all of it is done."""
        return the_device().is_idle(self.stream_id)

    def __enter__(self) -> Stream:
        sim = the_device()
        sim.entered.append(sim.enter(self))
        return self

    def __exit__(self, *_: Any) -> None:
        sim = the_device()
        sim.enter(sim.entered.pop())


def a_stream(value: Any, what: str) -> Any:
    """The argument of ``what``.

    Raises:
        UsageError: it is no stream of the device.
    """
    if not isinstance(getattr(value, "stream_id", None), int):
        raise UsageError(f"{what}({value!r}): it takes a stream of the simulated device, as torch.sim.Stream().")
    return value


class SimulatedEvent(torch.Event):
    """A place in a stream that others, and the host, can wait for.

    Args:
        device: the only one.
        enable_timing: whether :meth:`elapsed_time` may be asked.

    Attributes:
        moment: what the last :meth:`record` saw; None before.
    """

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, **_: Any) -> SimulatedEvent:
        return super().__new__(cls, device=the_device().default.device)

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.moment: Moment | None = None
        self._timed, self._at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        """Behind what is queued in ``stream``, or the current one, now."""
        sim = the_device()
        self._at = perf_counter()
        self.moment = sim.record((stream if stream is not None else sim.current).stream_id)

    def wait(self, stream: Any = None) -> None:
        """``stream``, or the current one, waits."""
        (stream if stream is not None else the_device().current).wait_event(self)

    def query(self) -> bool:
        """Whether the device has come here."""
        return self.moment is None or the_device().is_done(self.moment)

    def synchronize(self) -> None:
        """The host waits."""
        if self.moment is not None:
            sim = the_device()
            sim.findings.host_sync("event.synchronize", sim.here())
            sim.wait_on_host(self.moment)

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds between the calls of both :meth:`record`: of the host's time, as the device has none.

        Raises:
            UsageError: an event was made without ``enable_timing=True``, or was not recorded.
        """
        if not (self._timed and other._timed) or self.moment is None or other.moment is None:
            raise UsageError("elapsed_time needs two recorded events that were made with enable_timing=True.")
        return 1000 * (other._at - self._at)
