"""What is found: races, stops of the host, tensors of two devices in one operation."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from shardfold.testing.simulated.regions import ByteRange
from shardfold.testing.simulated.sites import Site

__all__ = ["Access", "Findings", "Found", "Race"]

ADVICE = {
    "unordered": "nothing orders stream {now} behind stream {before}: let it wait before, with "
    "stream.wait_stream(other), or an event that the other records (stream.wait_event(event)){collective}",
    "reused": "this memory was given out again while stream {before} may still use what was there: call "
    "tensor.record_stream(stream) for every other stream that uses a tensor before it is freed, or let the stream "
    "that it was allocated on wait for them",
    "freed": "the storage has no memory now: give it its memory back with resize_() first, or free it later",
}
"""By kind of race, the sentence that helps."""
COLLECTIVES = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "scatter",
    "gather",
    "send",
    "recv",
    "barrier",
}


class Access(NamedTuple):
    """One operation's use of one range of memory.

    Attributes:
        stream: it was queued in.
        time: its number there.
        region: bytes of the allocation.
        write: whether it changes them.
        what: the operation.
        site: where it was called.
    """

    stream: int
    time: int
    region: ByteRange
    write: bool
    what: str
    site: Site

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} by {self.what} on stream {self.stream} at {self.site}"

    def __repr__(self) -> str:
        return f"<{self}, bytes {self.region.start} to {self.region.stop}>"


class Race(NamedTuple):
    """Two uses of the same memory that nothing orders.

    Attributes:
        kind: ``unordered``: of two streams, at least one a write; ``reused``: the memory was another tensor's, which a
            stream may still use; ``freed``: the storage has no memory.
        now: the use that was queued later.
        before: the one that it has to be ordered behind; of ``freed``, nothing.
        nbytes: of the allocation that is used now.
        allocated: where it was made; of ``reused``, where that was made which had the memory before.
    """

    kind: str
    now: Access
    before: Access | None
    nbytes: int
    allocated: Site

    @property
    def sites(self) -> tuple[str, str]:
        """Both places: of the later use, and of the earlier one (of ``freed``: where the memory was allocated)."""
        return str(self.now.site), str(self.before.site if self.before is not None else self.allocated)

    @property
    def advice(self) -> str:
        """How to mend it."""
        before = "?" if self.before is None else self.before.stream
        among = COLLECTIVES & {self.now.what, *(() if self.before is None else (self.before.what,))}
        collective = ", or the wait() of the collective" if among else ""
        return ADVICE[self.kind].format(now=self.now.stream, before=before, collective=collective)

    def __str__(self) -> str:
        memory = f"memory of {self.nbytes} bytes, allocated at {self.allocated}"
        if self.kind == "reused":
            memory = f"a tensor that had this memory before, allocated at {self.allocated}"
        earlier = f"freed {memory}" if self.before is None else f"{self.before}, of {memory}"
        return f"[{self.kind}] {self.now}\n    after {earlier}\n    {self.advice}"


class Found(NamedTuple):
    """What was found since the last look.

    Attributes:
        races: each pair of places once.
        host_syncs: how often the host waited for the device, by operation and place.
        mixed: operations on tensors of two devices, by operation and place.
    """

    races: list[Race]
    host_syncs: Counter[tuple[str, str]]
    mixed: Counter[tuple[str, str]]


class Findings:
    """Attributes:
    races: each pair of places once.
    host_syncs: how often the host waited for the device, by operation and place.
    mixed: operations on tensors of two devices, by operation and place.
    silent: while not 0, nothing is noted.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.host_syncs: Counter[tuple[str, str]] = Counter()
        self.mixed: Counter[tuple[str, str]] = Counter()
        self.silent = 0
        self._seen: set[object] = set()

    def race(self, kind: str, now: Access, before: Access | None, nbytes: int, allocated: Site) -> None:
        key = (kind, now.what, now.site, None if before is None else (before.what, before.site))
        if self.silent or key in self._seen:
            return
        self._seen.add(key)
        self.races.append(Race(kind, now, before, nbytes, allocated))

    def host_sync(self, what: str, site: Site) -> None:
        if not self.silent:
            self.host_syncs[what, str(site)] += 1

    def mix(self, what: str, site: Site) -> None:
        if not self.silent:
            self.mixed[what, str(site)] += 1

    def take(self) -> Found:
        """What was found, which is forgotten."""
        found = Found(self.races, self.host_syncs, self.mixed)
        self.races, self.host_syncs, self.mixed, self._seen = [], Counter(), Counter(), set()
        return found
