"""The ranks that run one program, and the small messages that all of them take part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm._words import REDUCED, Words
from shardfold.comm.mesh import DataMesh
from shardfold.torch_internals import all_gather_single

__all__ = ["Peers"]

HEAD = 256
"""Bytes of the first message of an exchange, of which 8 tell the length of the text: most texts fit in it."""
SMALL = 64 * 1024
"""Bytes that a rank sends to all others together so that each reduces by itself."""
ROUND = 16 * 1024 * 1024
"""Bytes that a further message of an exchange brings from all ranks together."""


class _SentToEach:
    """As a ``torch.distributed`` work: each sends its values to each, who reduces by itself. Gloo's all-reduce is a
    ring: of so small a message all that counts is how often one waits for another, which there is twice as often as
    there are ranks, and here once."""

    def __init__(self, values: Tensor, op: Any, group: Any, size: int) -> None:
        self._values, self._op, self._size = values, op, size
        sent = values.flatten().repeat(size)
        self._received = torch.empty_like(sent)
        self._work: Any = dist.all_to_all_single(self._received, sent, group=group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta) -> None:
        """Returns when the values are reduced.

        Raises:
            RuntimeError: as that of the group's works.
        """
        self._work.wait(timeout)
        self._values.copy_(REDUCED[self._op](self._received.view(self._size, -1)).view_as(self._values))


class Peers:
    """Ranks that do the same passes, steps and exchanges in one order.

    Args:
        mesh: that they are of. Its groups and its store end with it, so nothing here keeps them.
        ranks: of the job, in the order of their group; None: all of the mesh.
        group: gives a Gloo group of them.

    Attributes:
        name: of them among all that this process is in; equal on all of them.
        ranks: as above.
        rank: this one.
    """

    def __init__(
        self, mesh: DataMesh, ranks: Sequence[int] | None = None, group: Callable[[], Any] | None = None
    ) -> None:
        self._mesh, self._group = mesh, group
        self._words: Words | None = None
        self.ranks = tuple(range(mesh.world) if ranks is None else ranks)
        self.rank = mesh.rank
        self._prefix = "" if group is None else f"peers/{min(self.ranks)}"
        self.name = mesh.name if group is None else f"{mesh.name}/{min(self.ranks)}"

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def store(self) -> Any:
        """A key-value store that they share with nobody else; None: this rank is alone, or the mesh is closed."""
        store = self._mesh.store
        if store is None or self._group is None:
            return store
        return dist.distributed_c10d.PrefixStore(self._prefix, store)

    @property
    def group(self) -> Any:
        return self._mesh.control if self._group is None else self._group()

    def carry(self, words: Words | None) -> None:
        """Small messages go that way from now on; all of them say so at the same place."""
        self._words = words

    def reduce(self, values: Tensor, op: Any) -> Any:
        """Begins to reduce a small tensor in place; the work, to be waited for."""
        if self._words is not None and self._words.takes(values, op):
            return self._words.reduce(values, op)
        if self.size * values.nbytes <= SMALL and op in REDUCED:
            return _SentToEach(values, op, self.group, self.size)
        return dist.all_reduce(values, op, group=self.group, async_op=True)

    def exchange(self, data: bytes, send: Callable[[Callable[[], Any], int], None]) -> list[bytes]:
        """What every rank says, in their order: one message of :data:`HEAD` bytes, and more if any has a longer text.

        ``send`` is called with what begins each message and with its bytes, and returns when it is there.
        """
        first = self._gather(len(data).to_bytes(8, "big") + data[: HEAD - 8], HEAD, send)
        lengths = [int.from_bytes(text[:8], "big") for text in first]
        texts = [text[8:] for text in first]
        longest, width = max(lengths), max(ROUND // self.size, HEAD)
        for start in range(HEAD - 8, longest, width):
            stop = min(start + width, longest)
            more = self._gather(data[start:stop], stop - start, send)
            texts = [text + part for text, part in zip(texts, more, strict=True)]
        return [text[:length] for text, length in zip(texts, lengths, strict=True)]

    def _gather(self, data: bytes, width: int, send: Callable[[Callable[[], Any], int], None]) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        full = torch.empty(self.size * width, dtype=torch.uint8)
        send(
            lambda: all_gather_single(full, mine, group=self.group, async_op=True), full.nbytes // 2
        )  # of which an all-reduce sends as much
        whole = full.numpy().tobytes()
        return [whole[i * width : (i + 1) * width] for i in range(self.size)]
