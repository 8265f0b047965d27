"""The ranks that hold the other parts of this rank's parameters, as an optimizer of ours asks them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.comm import Comm
from shardfold.comm.mesh_group import MeshGroup
from shardfold.optim.parts import PartRanks
from shardfold.plan.cost import Sent
from shardfold.plan.layout import Axes
from shardfold.plan.placement import shard_index

__all__ = ["MasterRanks"]


class MasterRanks(PartRanks):
    """The ranks of the axes that master is split over, and of those ``beside`` them."""

    def __init__(self, over: Axes, comm: Comm, beside: Axes = ()) -> None:
        mesh = comm.mesh
        self._own, self._comm = over, comm
        self._over = tuple(axis for axis in mesh.sizes if axis in (*over, *beside))  # as ranks of the group are counted
        self.group, self.kind = _MasterGroup(self._over, comm), Sent("update", "ALL_TO_ALL", self._over)
        rows = next(ranks for ranks in mesh.sizes.rows(self._over) if mesh.rank in ranks)
        coords = [mesh.sizes.coords(rank) for rank in rows]
        self.places = [(shard_index(over, mesh.sizes, at), shard_index(beside, mesh.sizes, at)) for at in coords]

    def beside(self, axes: Axes) -> MasterRanks:
        return MasterRanks(self._own, self._comm, axes) if axes else self

    def join(self, axes: Axes) -> None:
        """Makes exchanges possible of these ranks and those along more axes; all ranks call it."""
        self._comm.mesh.add_group(self.beside(axes)._over)

    def product_dtype(self) -> torch.dtype:
        """In which dtype all ranks of the program multiply matrices fast; all of them call it.

        Ranks whose CPUs or GPUs differ would choose otherwise each, and replicas that each updates for itself would
        drift apart: if one has to take fp32, all do.
        """
        own = accelerator.product_dtype(self._comm.memory.device)
        return torch.float32 if self._comm.any_rank([own is torch.float32], "dtypes of products")[0] else own


class _MasterGroup(MeshGroup):
    """Its sums are of a few numbers: control messages, over axes that may have no group of their own together."""

    def __init__(self, over: Axes, comm: Comm) -> None:
        super().__init__(over, comm, who="the optimizer", purpose="update")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._numbers(tensor, dist.ReduceOp.SUM, "the optimizer's sums")

    def max(self, tensor: Tensor) -> Tensor:
        return self._numbers(tensor, dist.ReduceOp.MAX, "the optimizer's greatest numbers")

    def _numbers(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        out = tensor.clone()
        if self.size > 1:
            self._comm.number(out, self._axes, op, what)
        return out
