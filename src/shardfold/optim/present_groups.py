"""What groups of ranks send each other in an outer step of which some are away.

A collective over the axis takes all of its ranks. Here each two groups have a process group of their own, rank by rank,
and those that take part use only what is between them: each has the sum of one part, and sends it to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardfold.comm.comm import Comm
from shardfold.comm.run_pairs import RunPairs
from shardfold.comm.transport import Pending
from shardfold.plan.cost import Sent
from shardfold.plan.program import Op

__all__ = ["OuterMeeting", "PresentGroups", "PresentRuns"]


@dataclass(frozen=True)
class OuterMeeting:
    """An outer step that is held.

    Attributes:
        groups: that take part, in rising order.
        shares: of each in the sum, by its tokens; they add up to 1.
        behind: those of them that have not the newest global weights.
        source: the first that has them.
        steps: how far rounds are, in steps.
        version: of the global weights behind it.
        lives: of groups that are runs of their own, as often as each was started.
    """

    groups: tuple[int, ...]
    shares: tuple[float, ...]
    behind: tuple[int, ...]
    source: int
    steps: int
    version: int = 0
    lives: tuple[int, ...] = ()


class PresentGroups:
    """One rank's way to the ranks of other groups that have the same parts of the states; all ranks make it.

    Args:
        comm: of the engine.
        axis: along which the groups are.

    Attributes:
        meeting: the present outer step.
    """

    def __init__(self, comm: Comm, axis: str) -> None:
        self._comm = comm
        self._row = next(row for row in comm.mesh.sizes.rows((axis,)) if comm.mesh.rank in row)
        self._group = self._row.index(comm.mesh.rank)
        self.meeting: OuterMeeting | None = None
        comm.mesh.join_pairs(axis)

    @property
    def is_whole(self) -> bool:
        """Whether all has come that was to; a rank that is gone is an error of all."""
        return True

    def begin(self, meeting: OuterMeeting) -> None:
        """An outer step of these groups."""
        self.meeting = meeting

    def parts(self, numel: int) -> dict[int, slice]:
        """Which elements of a shard each group that takes part sums."""
        assert self.meeting is not None
        count = len(self.meeting.groups)
        bounds = [numel * place // count for place in range(count + 1)]
        return {group: slice(*bounds[place : place + 2]) for place, group in enumerate(self.meeting.groups)}

    def swap(self, op: Op, goes: Mapping[int, Tensor], comes: Mapping[int, Tensor]) -> Pending:
        """Begins to send a tensor to each of some groups, and to receive one from each of some: of two groups both name
        the other, with as many elements."""
        comm, works, num_bytes = self._comm, list[Any](), 0
        with comm.job.uninterrupted():
            comm.job.aside(f"{op} among groups {', '.join(map(str, self.meeting.groups if self.meeting else ()))}")
            for other in sorted({*goes, *comes} - {self._group}):
                way = comm.mesh.way(comm.mesh.rank, self._row[other])
                for source in sorted((self._group, other)):  # both begin with the same one
                    tensor = goes.get(other) if source == self._group else comes.get(other)
                    if tensor is not None and tensor.numel():
                        works.append(dist.broadcast(tensor, src=self._row[source], group=way, async_op=True))
                        num_bytes += tensor.nbytes * (source == self._group)
            comm.meter.send(Sent(op.purpose, op.verb, op.axes), num_bytes)
        return Pending(works)


class PresentRuns(PresentGroups):
    """The same, of groups that are runs of their own.

    Args:
        comm: of the engine.
        pairs: with ranks of other runs.
    """

    def __init__(self, comm: Comm, pairs: RunPairs) -> None:
        self._comm, self._pairs, self._group = comm, pairs, pairs.number
        self.meeting: OuterMeeting | None = None

    @property
    def is_whole(self) -> bool:
        return not self._pairs.failed

    def begin(self, meeting: OuterMeeting) -> None:
        super().begin(meeting)
        self._pairs.begin(dict(zip(meeting.groups, meeting.lives, strict=True)))

    def swap(self, op: Op, goes: Mapping[int, Tensor], comes: Mapping[int, Tensor]) -> Pending:
        """Sends and receives, and has come; if a run is gone, :attr:`is_whole` says so."""
        self._comm.meter.send(Sent(op.purpose, op.verb, op.axes), self._pairs.swap(goes, comes))
        return Pending([])
