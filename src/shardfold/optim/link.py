"""The ranks that hold the other parts of this rank's parameters, as an optimizer of ours asks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.comm import Comm
from shardfold.plan.cost import Sent
from shardfold.plan.layout import Axes
from shardfold.plan.placement import shard_index

__all__ = ["RankLink"]


class RankLink:
    """The ranks of the axes that master is split over (see ``parts.Link``)."""

    def __init__(self, over: Axes, comm: Comm, beside: Axes = ()) -> None:
        mesh = comm.mesh
        self._own, self._comm = over, comm
        self._over = tuple(axis for axis in mesh.sizes if axis in (*over, *beside))  # as ranks of the group are counted
        self.rank, self.ranks = shard_index(self._over, mesh.sizes, mesh.coords), mesh.parts(self._over)
        self.kind = Sent("update", "ALL_TO_ALL", self._over)
        rows = next(ranks for ranks in mesh.sizes.rows(self._over) if mesh.rank in ranks)
        coords = [mesh.sizes.coords(rank) for rank in rows]
        self.places: Sequence[tuple[int, int]] = [
            (shard_index(over, mesh.sizes, at), shard_index(beside, mesh.sizes, at)) for at in coords
        ]

    def beside(self, axes: Axes) -> RankLink:
        return RankLink(self._own, self._comm, axes) if axes else self

    def join(self, axes: Axes) -> None:
        """Makes :meth:`exchange` possible of these ranks and those along more axes; all ranks call it."""
        self._comm.mesh.add_group(self.beside(axes)._over)

    def product_dtype(self) -> torch.dtype:
        """In which dtype all ranks of the program multiply matrices fast; all of them call it.

        Ranks whose CPUs or GPUs differ would choose otherwise each, and replicas that each updates for itself would
        drift apart: if one has to take fp32, all do.
        """
        own = accelerator.product_dtype(self._comm.memory.device)
        return torch.float32 if self._comm.any_rank([own is torch.float32], "dtypes of products")[0] else own

    def sum(self, numbers: Tensor) -> None:
        if self.ranks > 1:
            self._comm.number(numbers, self._over, dist.ReduceOp.SUM, "the optimizer's sums")

    def most(self, numbers: Tensor) -> None:
        if self.ranks > 1:
            self._comm.number(numbers, self._over, dist.ReduceOp.MAX, "the optimizer's greatest numbers")

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int]) -> None:
        with self._comm.agreement.uninterrupted():
            self._comm.agreement.issue("the optimizer's exchange of matrices")
            group = self._comm.mesh.group(self._over)
            self._comm.transport.exchange(sent, to, received, by, group).wait(self._comm.agreement.wait)
        self._comm.meter.exchange(self.kind, (sum(to) - to[self.rank]) * sent.itemsize)
