"""How many micro-batches of a step each rank computes: fewer where one is slower than the others.

Who is slow, and by how much, all ranks know at the same step from what they tell each other anyway (``pace``), so all
come to the same shares without a message. Virtual ranks are shared out: with no more of them than ranks there is
nothing to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from shardfold.plan.report import Straggler

__all__ = ["RankShares"]

AGAIN = 64
"""Steps behind which a rank that is slow still, with less to do, is given less again: until then its times are partly
those of the share before."""
TRIED = 1024
"""Steps behind which all have the same share again, as a rank may be as fast as the others by then."""


class RankShares:
    """Of some virtual ranks among ranks.

    Args:
        virtual: how many are shared out.
        ranks: among how many.

    Attributes:
        counts: how many each rank has.
    """

    def __init__(self, virtual: int, ranks: int) -> None:
        self._virtual = virtual
        self._speeds = [1.0] * ranks
        self._slow: int | None = None  # the rank that was given less last
        self._since = 0  # at which step
        self.counts = self._counted(self.owners())

    def owners(self) -> list[int]:
        """By virtual rank the rank that reads for it: the one that would have done with one more first."""
        counts, found = [0] * len(self._speeds), list[int]()
        for _ in range(self._virtual):
            first = min(range(len(counts)), key=lambda rank: ((counts[rank] + 1) / self._speeds[rank], rank))
            counts[first] += 1
            found.append(first)
        return found

    def follow(self, slowest: Straggler | None, steps: int) -> bool:
        """Whether shares are others now, as this is what makes steps longer behind so many of them."""
        if len(set(self._speeds)) > 1 and steps - self._since >= TRIED:
            return self._become([1.0] * len(self._speeds), None, steps)
        if slowest is None or (rank := slowest.rank) is None or self._virtual < 2 * len(self._speeds):
            return False
        if rank == self._slow and steps - self._since < AGAIN:
            return False
        others = median(count for other, count in enumerate(self.counts) if other != rank)
        speeds = self._speeds.copy()
        speeds[rank] = max(self.counts[rank], 1) / (slowest.factor * max(others, 1))
        return self._become(speeds, rank, steps)

    def _become(self, speeds: Sequence[float], slow: int | None, steps: int) -> bool:
        before, self._speeds = self.counts, list(speeds)
        self._slow, self._since = slow, steps
        self.counts = self._counted(self.owners())
        return self.counts != before

    def _counted(self, owners: Sequence[int]) -> list[int]:
        return [owners.count(rank) for rank in range(len(self._speeds))]
