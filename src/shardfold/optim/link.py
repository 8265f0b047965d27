"""The ranks that hold the other parts of this rank's parameters, as an optimizer of ours asks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from shardfold.comm.comm import Comm
from shardfold.plan.cost import Sent
from shardfold.plan.layout import Axes
from shardfold.plan.placement import shard_index

__all__ = ["RankLink"]


class RankLink:
    """The ranks of the axes that master is split over (see ``parts.Link``)."""

    def __init__(self, over: Axes, comm: Comm) -> None:
        mesh = comm.mesh
        self.rank, self.ranks = shard_index(over, mesh.sizes, mesh.coords), mesh.parts(over)
        self.kind = Sent("update", "ALL_TO_ALL", over)
        self._over, self._comm = over, comm

    def sum(self, numbers: Tensor) -> None:
        if self.ranks == 1:
            return
        self._comm.number(numbers, self._over, dist.ReduceOp.SUM, "the optimizer's sums")

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int]) -> None:
        with self._comm.agreement.uninterrupted():
            self._comm.agreement.issue("the optimizer's exchange of matrices")
            group = self._comm.mesh.group(self._over)
            self._comm.transport.exchange(sent, to, received, by, group).wait(self._comm.agreement.wait)
        self._comm.meter.exchange(self.kind, (sum(to) - to[self.rank]) * sent.itemsize)
