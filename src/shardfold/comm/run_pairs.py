"""Process groups of this rank and one of another run: the runs have no group in common, and each may end by itself.

A pair is made when two ranks have to send each other something, in the store that all runs share, and is of two *lives*
of these runs: who is started again is another one. Whatever goes wrong with it is the other run's end, as far as this
one knows, and no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardfold.comm.answered import Answered, StoreLine
from shardfold.errors import CollectiveError
from shardfold.plan.outer_runs import OuterRuns

__all__ = ["RunPairs"]


class RunPairs:
    """Of one rank.

    Args:
        runs: which there are.
        rank: in this run; the other one has the same in its own.
        limit: seconds that anything may take.

    Attributes:
        store: that all runs share.
        number: of this run.
        failed: whether a run was gone since :meth:`begin`, so that what came is of no use.

    Raises:
        CollectiveError: nobody answers where the store should be.
    """

    def __init__(self, runs: OuterRuns, rank: int, limit: float) -> None:
        try:
            store = TCPStore(
                runs.host, runs.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit)
            )
        except RuntimeError as error:
            raise CollectiveError(
                f"nobody answers at {runs.at}, where runs that come together in outer steps have their store "
                f"({str(error).splitlines()[0]}): start one there, or give OuterRuns.at."
            ) from error
        self.number, self._rank, self._limit = runs.number, rank, timedelta(seconds=limit)
        self.store = Answered(store, limit, StoreLine())
        self._raw = store
        self._ways: dict[tuple[int, int, int], Any] = {}  # by the other run, its life, and this one's
        self._lives: Mapping[int, int] = {}
        self.failed = False

    def begin(self, lives: Mapping[int, int]) -> None:
        """These runs send each other something."""
        self._lives, self.failed = lives, False

    def swap(self, goes: Mapping[int, Tensor], comes: Mapping[int, Tensor]) -> int:
        """Sends a tensor to each of some runs, and receives one from each of some; how many bytes were sent."""
        works, num_bytes = list[Any](), 0
        try:
            for other in sorted({*goes, *comes} - {self.number}):
                way = self._way(other)
                for place, source in enumerate(sorted((self.number, other))):  # both begin with the same one
                    tensor = goes.get(other) if source == self.number else comes.get(other)
                    if tensor is not None and tensor.numel():
                        options = dist.BroadcastOptions()
                        options.rootRank, options.timeout = place, self._limit
                        works.append(way.broadcast([tensor], options))
                        num_bytes += tensor.nbytes * (source == self.number)
        except RuntimeError:
            self.failed = True
        for work in works:
            try:
                work.wait()
            except RuntimeError:
                self.failed = True
        return num_bytes

    def _way(self, other: int) -> Any:
        """
        Raises:
            RuntimeError: the other one is not there.
        """
        if self.failed:
            raise RuntimeError("a run is gone")
        mine, theirs = self._lives[self.number], self._lives[other]
        if (other, theirs, mine) not in self._ways:
            low, high = sorted(((self.number, mine), (other, theirs)))
            name = f"pair/{self._rank}/{low[0]}.{low[1]}/{high[0]}.{high[1]}"
            group = dist.ProcessGroupGloo(PrefixStore(name, self._raw), int(low[0] != self.number), 2, self._limit)
            self._ways[other, theirs, mine] = group
        return self._ways[other, theirs, mine]
