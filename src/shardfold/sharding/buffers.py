"""Buffers are rank 0's on every rank, as under DDP.

DDP broadcasts all buffers before each forward that follows a training forward. The same values come out of sending them
only when some rank changed one (the statistics of a batch normalization change in every training forward, rotary
tables and masks never do), and that costs nothing to find out: the meeting before a forward carries one flag for it.
What is done between passes (``gathered()``, a save) begins with a meeting too, and finds buffers equal; a state dict is
each rank's own, as DDP's is.

``[Note: what changed]`` A buffer that is replaced is another object, and one that is written has another version. What
PyTorch's kernels or ``buffer.data`` write leaves no such trace (``F.batch_norm`` with statistics of a module's own), so
that values are compared besides. On the CPU that is done each time. Where it would stop the host it is done behind the
first training forward, and what changed without a trace in that counts as changed by each one from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
import xxhash
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.comm.coalesced import BATCH
from shardfold.comm.comm import Comm
from shardfold.plan.layout import Axes
from shardfold.plan.placement import shard_index
from shardfold.torch_internals import set_versions, version_of

__all__ = ["Buffers", "take_first_rank"]


class _Seen(NamedTuple):
    """A buffer as it was; an object whose number another has since is not that other."""

    buffer: ReferenceType[Tensor]
    version: int | None  # None: nobody counts
    digest: int | None  # of the values; None: they were not looked at

    def left_trace(self, now: Tensor) -> bool:
        """Whether what is there now is another, or was written in a way that shows."""
        return self.buffer() is not now or self.version != version_of(now)

    def other_values(self, now: Tensor) -> bool:
        return self.digest is not None and self.digest != _digest(now)


class Buffers:
    """The buffers of a model on this rank.

    Args:
        always: whether values are compared each time also where that stops the host.

    Attributes:
        any: whether there are any.
        due: whether a forward of training came since ranks last looked, so that they may differ between ranks.
        asks: whether ranks meet before the next forward because of that; all ranks say the same.
    """

    def __init__(self, model: nn.Module, comm: Comm, *, always: bool = False) -> None:
        self._comm = comm
        self._alone = comm.mesh.parts(comm.mesh.sizes.alike) == 1
        self._always = always or not accelerator.has_streams(comm.memory.device)
        self._looks = True  # whether values are still to be compared once
        self._silent = False  # whether that found any that change without a trace
        self.due = self.asks = False
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Looks for the model's buffers anew; their present values count as known, unless one was changed before."""
        changed = self.changed()
        modules = list(model.modules())
        self._places = [(module, name) for module in modules for name, b in module._buffers.items() if b is not None]
        self.any = bool(self._places)
        self._known: list[_Seen] | None = None if changed else self._state()

    def trained(self, *, alone: bool) -> None:
        """A forward of training begins; ``alone``: other ranks may run none."""
        self.due = self.any
        self.asks = self.any and (self.asks or not alone)

    def went_apart(self) -> None:
        """Ranks may each have changed them: before the next forward they meet because of that."""
        self.asks = self.any

    def changed(self) -> bool:
        """Whether this rank changed one since they were last equal."""
        if not self.due or self._alone:
            return False
        known, now = self._known, self._present()
        if known is None or len(known) != len(now):
            return True
        traces = [seen.left_trace(buffer) for seen, buffer in zip(known, now, strict=True)]
        if self._always:
            return any(traces) or any(seen.other_values(buffer) for seen, buffer in zip(known, now, strict=True))
        if self._looks:
            self._looks = False
            others = [seen.other_values(buffer) for seen, buffer in zip(known, now, strict=True)]
            self._silent = any(other and not trace for other, trace in zip(others, traces, strict=True))
        return self._silent or any(traces)

    def synchronize(self, changed: bool, *, forward: bool = True) -> None:
        """Gives every rank rank 0's values if any rank changed one. What is no ``forward`` leaves the next one to look
        as it would have done: users may change one in between."""
        if forward:
            self.due = self.asks = False
        if changed and not self._alone:
            take_first_rank(self._comm, self._present(), "the broadcast of buffers")
            self._known = self._state()

    def _present(self) -> list[Tensor]:
        found = (module._buffers.get(name) for module, name in self._places)
        return [buffer for buffer in found if buffer is not None]

    def _state(self) -> list[_Seen]:
        looks = not self._alone and (self._always or self._looks)
        return [_Seen(ref(each), version_of(each), _digest(each) if looks else None) for each in self._present()]


def _digest(buffer: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def take_first_rank(
    comm: Comm, buffers: Sequence[Tensor], what: str, detail: str = "", over: Axes | None = None
) -> None:
    """Buffers get the values of the first rank along the axes ``over`` (None: of the group) on all of them, at most
    64 MiB, or one, in a broadcast. ``what`` and ``detail`` are for messages."""
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
                    aligned = part.clone()  # for its dtype
                    _take(buffer, aligned.view(buffer.dtype).view(buffer.shape))


def _take(buffer: Tensor, value: Tensor) -> None:
    """Writes without a trace, as DDP does. Autograd may have kept the buffer: the statistics of a normalization, which
    their backward does not read in training, or a table, which has the same values as before. What users write, on
    whatever rank, has a version of its own, which stays."""
    target = buffer
    for dim, (step, size) in enumerate(zip(buffer.stride(), buffer.shape, strict=True)):
        if not step and size > 1:  # of an expanded buffer: once where elements share memory
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if buffer.is_inference():
        with torch.inference_mode():
            target.copy_(value)
        return
    version = buffer._version
    target.copy_(value)
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
