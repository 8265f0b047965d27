"""The happens-before checker: every use of memory is compared with those that nothing orders it behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from shardfold.testing.simulated.clocks import Clocks
from shardfold.testing.simulated.findings import Access, Findings
from shardfold.testing.simulated.memory import Allocation, Allocator
from shardfold.testing.simulated.regions import region_of
from shardfold.testing.simulated.sites import Site

__all__ = ["Checker"]


class Checker:
    """
    Args:
        clocks: of the streams.
        allocator: of the memory.
        where: gives the caller's site.

    Attributes:
        findings: to which races go.
        uses: how many operations were noted.
    """

    def __init__(self, clocks: Clocks, allocator: Allocator, where: Callable[[], Site]) -> None:
        self._clocks, self._allocator, self._where = clocks, allocator, where
        self.findings = Findings()
        self.uses = 0

    def note(self, what: str, stream: int, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> list[Tensor]:
        """``stream`` uses these tensors now. Memory that the first use of new memory may overwrite is given back."""
        self.uses += 1
        time = self._clocks.tick(stream)
        site: Site | None = None
        overwritten: list[Tensor] = []
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                block = self._allocator.find(tensor)
                if block is None:
                    continue
                site = site or self._where()
                use = Access(stream, time, region_of(tensor), write, what, site)
                if block.freed:
                    self.findings.race("freed", use, None, block.nbytes, block.site)
                    continue
                first = stream not in block.entered
                if self._use(block, use) and first:
                    self._enter(block, use)
                overwritten += block.former
                block.former = []
        return overwritten

    def _use(self, block: Allocation, now: Access) -> bool:
        """Whether it is in order with all others."""
        kept: list[Access] = []
        in_order = True
        for use in block.uses:
            ordered = self._clocks.knows(now.stream, use.stream, use.time)
            if not ordered and (now.write or use.write) and now.region.overlaps(use.region):
                self.findings.race("unordered", now, use, block.nbytes, block.site)
                in_order = False
            # Whoever is behind `now` is behind `use` too, and `now` conflicts with at least as much.
            more = now.write or (not use.write and use.stream == now.stream)
            if not (ordered and more and now.region.covers(use.region)):
                kept.append(use)
        kept.append(now)
        block.uses = kept
        return in_order

    def _enter(self, block: Allocation, now: Access) -> None:
        """The first use of an allocation by a stream that is in order with the others: what had this memory before
        must be over."""
        block.entered.add(now.stream)
        for use, allocated in block.earlier.values():
            if not self._clocks.knows(now.stream, use.stream, use.time):
                self.findings.race("reused", now, use, block.nbytes, allocated)
