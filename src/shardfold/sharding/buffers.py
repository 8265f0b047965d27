"""Buffers are rank 0's on every rank, as under DDP.

DDP broadcasts all buffers before each forward that follows a training forward. The same values come out of sending them
only when some rank changed one (the statistics of a batch normalization change in every training forward, rotary
tables and masks never do), and that costs nothing to find out: the meeting before a forward carries one flag for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.comm.coalesced import BATCH
from shardfold.comm.comm import Comm
from shardfold.plan.layout import Axes
from shardfold.plan.placement import shard_index
from shardfold.torch_internals import set_versions

__all__ = ["Buffers", "take_first_rank"]


class Buffers:
    """The buffers of a model on this rank.

    Attributes:
        any: whether there are any.
        due: whether the forward before this one was one of training, so that they may differ between ranks.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._comm = comm
        self.due = False
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Looks for the model's buffers anew; their present values count as known, unless one was changed before."""
        changed = self.changed()
        modules = list(model.modules())
        self._places = [(module, name) for module in modules for name, b in module._buffers.items() if b is not None]
        self.any = bool(self._places)
        self._known = [] if changed else self._state()

    def changed(self) -> bool:
        """Whether this rank changed one since they were last equal."""
        return self.due and self._state() != self._known

    def synchronize(self, changed: bool) -> None:
        """Gives every rank rank 0's values if any rank changed one."""
        self.due = False
        if not changed or self._comm.mesh.parts(self._comm.mesh.sizes.alike) == 1:
            return
        known = set(self._known)
        unchanged = {identity for identity, version in self._state() if (identity, version) in known}
        take_first_rank(self._comm, self._present(), "the broadcast of buffers", unchanged=unchanged)
        self._known = self._state()

    def _present(self) -> list[Tensor]:
        found = (module._buffers.get(name) for module, name in self._places)
        return [buffer for buffer in found if buffer is not None]

    def _state(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self._present()]


def take_first_rank(
    comm: Comm, buffers: Sequence[Tensor], what: str, detail: str = "", unchanged: Collection[int] = (),
    over: Axes | None = None,
) -> None:  # fmt: skip
    """Buffers get the values of the first rank along the axes ``over`` (None: of the group) on all of them, at most
    64 MiB, or one, in a broadcast; autograd, which may have kept one, does not see what has them already as written.

    ``what`` and ``detail`` are for messages; ``unchanged``: ids of buffers that this rank has not changed since they
    were equal.
    """
    over = comm.mesh.sizes.alike if over is None else over
    if comm.mesh.parts(over) == 1:
        return
    with torch.no_grad():
        for batch in _batches([buffer for buffer in buffers if buffer.numel()]):
            # A copy, because elements of an expanded buffer share memory; as bytes, because not every dtype travels.
            flat = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in batch])
            comm.broadcast(flat, what, over=over, detail=detail)
            if shard_index(over, comm.mesh.sizes, comm.mesh.coords):
                for buffer, part in zip(batch, flat.split([b.numel() * b.itemsize for b in batch]), strict=True):
                    value = part.clone().view(buffer.dtype).view(buffer.shape)  # a clone is aligned for its dtype
                    _take(buffer, value, unchanged=id(buffer) in unchanged)


def _take(buffer: Tensor, value: Tensor, *, unchanged: bool) -> None:
    if not accelerator.has_streams(buffer.device):
        if not torch.equal(value, buffer):
            buffer.copy_(value)
        return
    # Here to compare would stop the host, once for each buffer and forward. What this rank has not changed is written
    # without a trace: nearly always it is what is there already, as rotary tables and masks are.
    version = buffer._version
    buffer.copy_(value)
    if unchanged:
        set_versions((buffer,), (version,))


def _batches(buffers: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    size = 0
    for buffer in buffers:
        num_bytes = buffer.numel() * buffer.itemsize  # of an expanded one too
        if batch and size + num_bytes > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(buffer)
        size += num_bytes
    if batch:
        yield batch
