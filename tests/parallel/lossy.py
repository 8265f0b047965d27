"""A way to other ranks that loses one message: what each collective of a step is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

import shardfold as sf
from shardfold.comm.mesh_group import MeshGroup
from shardfold.comm.transport import Pending, Transport

__all__ = ["Lossy", "losing"]


class Lossy:
    """Carries collectives as ``transport`` does, but for the one of number ``lost``: its result is what this rank has
    without the others, with zeros in place of what would have come. All ranks lose the same one.

    Attributes:
        seen: what each collective was.
    """

    def __init__(self, transport: Transport, lost: int | None) -> None:
        self._transport, self._lost = transport, lost
        self.seen: list[str] = []

    def lose(self, what: str) -> bool:
        self.seen.append(what)
        return len(self.seen) - 1 == self._lost

    def all_gather(self, full: Tensor, group: Any, *, resident: Tensor | None = None) -> Pending:
        if not self.lose(f"gather of {full.numel()}"):
            return self._transport.all_gather(full, group, resident=resident)
        for rank, chunk in enumerate(full.chunk(dist.get_world_size(group))):
            if rank != dist.get_rank(group):
                chunk.zero_()
        return Pending([])

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        if not self.lose(f"reduce-scatter of {full.numel()}"):
            return self._transport.reduce_scatter(full, out, group, add=add)
        mine = full.chunk(dist.get_world_size(group))[dist.get_rank(group)].to(out.dtype, copy=True)
        (out.add_ if add else out.copy_)(mine)
        return Pending([])

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        if not self.lose(f"all-reduce of {tensor.numel()}"):
            return self._transport.all_reduce(tensor, group)
        return Pending([])

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        if not self.lose(f"exchange of {sent.numel()}"):
            return self._transport.exchange(sent, to, received, by, group)
        me = dist.get_rank(group)
        received.zero_()
        received.split(list(by))[me].copy_(sent.split(list(to))[me])
        return Pending([])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@contextmanager
def losing(engine: sf.Engine, lost: int | None) -> Iterator[list[str]]:
    """Inside, the collective of number ``lost`` carries nothing, of those that carry floating-point numbers of tensors
    or of norms; gives what each was. Agreements of the hosts are none of them."""
    comm = engine.sharded.comm
    lossy = Lossy(comm.transport, lost)
    number, most = comm.number, MeshGroup.max

    def lossy_number(value: Tensor, over: Any, op: Any, what: str) -> None:
        if not value.is_floating_point() or comm.mesh.parts(over) == 1 or not lossy.lose(what):
            number(value, over, op, what)

    def lossy_max(link: MeshGroup, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and lossy.lose(f"maximum of {tensor.numel()}"):
            return tensor
        return most(link, tensor)

    before, comm.transport = comm.transport, lossy
    comm.number, MeshGroup.max = lossy_number, lossy_max  # type: ignore[method-assign]
    try:
        yield lossy.seen
    finally:
        comm.transport, MeshGroup.max = before, most  # type: ignore[method-assign]
        del vars(comm)["number"]
