"""The ranks that hold the other parts of this rank's parameters, as an optimizer of ours asks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from shardfold.agreement import Agreement
from shardfold.cost import Sent
from shardfold.layout import Axes
from shardfold.mesh import DataMesh
from shardfold.meter import Meter
from shardfold.shards import shard_index
from shardfold.wires.plain import PlainWire

__all__ = ["RankLink"]


class RankLink:
    """The ranks of the axes that master is split over (see ``parts.Link``)."""

    def __init__(self, mesh: DataMesh, over: Axes, agreement: Agreement, wire: PlainWire, meter: Meter) -> None:
        self.rank, self.ranks = shard_index(over, mesh.sizes, mesh.coords), mesh.parts(over)
        self.kind = Sent("update", "ALL_TO_ALL", over)
        self._mesh, self._over, self._agreement, self._wire, self._meter = mesh, over, agreement, wire, meter

    def sum(self, numbers: Tensor) -> None:
        if self.ranks == 1:
            return
        self._agreement.issue("the optimizer's sums")
        self._agreement.wait(dist.all_reduce(numbers, group=self._mesh.group(self._over), async_op=True))
        self._meter.control(numbers.nbytes)

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int]) -> None:
        self._agreement.issue("the optimizer's exchange of matrices")
        group = self._mesh.group(self._over)
        self._wire.exchange(sent, to, received, by, group).wait(self._agreement.wait)
        self._meter.exchange(self.kind, (sum(to) - to[self.rank]) * sent.itemsize)
