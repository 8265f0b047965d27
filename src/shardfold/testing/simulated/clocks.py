"""Vector clocks: what each stream, and the host, knows to have happened.

A stream counts its operations. Its clock has, of every stream, the last operation that is over whenever the next one of
its own runs. An event copies the clock of the stream that records it; a stream that waits for the event merges the copy
into its own. What the host has waited for, every operation that it queues later knows too.
"""

from __future__ import annotations

__all__ = ["Clock", "Clocks", "Moment", "is_over", "merge"]

Clock = dict[int, int]
"""By stream, the number of its last operation that is known to be over."""


def merge(into: Clock, other: Clock) -> None:
    """``into`` knows what ``other`` knows too."""
    for stream, time in other.items():
        if into.get(stream, 0) < time:
            into[stream] = time


class Moment:
    """A place in the order of a stream, as an event records it.

    Attributes:
        clock: what is over then.
        done: whether the device has come there.
    """

    __slots__ = ("clock", "done")

    def __init__(self, clock: Clock) -> None:
        self.clock, self.done = clock, False


def is_over(moment: Moment, at: Moment) -> bool:
    """Whether the device has been at ``moment`` whenever it is at ``at``."""
    return all(at.clock.get(stream, 0) >= time for stream, time in moment.clock.items())


class Clocks:
    """Of all streams, and of the host."""

    def __init__(self) -> None:
        self._streams: dict[int, Clock] = {0: {}}
        self._host: Clock = {}

    def add(self) -> int:
        """A new stream."""
        stream = len(self._streams)
        self._streams[stream] = {}
        return stream

    @property
    def streams(self) -> list[int]:
        return list(self._streams)

    def __getitem__(self, stream: int) -> Clock:
        return self._streams[stream]

    def tick(self, stream: int) -> int:
        """The host queues an operation; its number."""
        clock = self._streams[stream]
        merge(clock, self._host)
        clock[stream] = time = clock.get(stream, 0) + 1
        return time

    def record(self, stream: int) -> Moment:
        """Behind everything queued in ``stream`` so far."""
        self.tick(stream)
        return Moment(dict(self._streams[stream]))

    def wait(self, stream: int, moment: Moment) -> None:
        """What is queued in ``stream`` from now on runs behind ``moment``."""
        merge(self._streams[stream], moment.clock)

    def host_waited(self, moment: Moment) -> None:
        """The host has waited for ``moment``."""
        merge(self._host, moment.clock)

    def knows(self, stream: int, other: int, time: int) -> bool:
        """Whether the next operation of ``stream`` is behind operation ``time`` of ``other``."""
        return stream == other or self._streams[stream].get(other, 0) >= time
