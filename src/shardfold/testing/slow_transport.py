"""A transport that delays and drops: a slow or broken link on any machine, without root.

    late = Late.around(engine, latency=0.01, rate=12.5e6)      # from now on: 10 ms, and 12.5 MB/s for each rank
    late.drop_next()                                           # what is sent next never comes

What is sent does arrive at once, by the transport that there was; only nobody is told of it earlier than a link of that
rate and latency would have brought it, one collective behind another. Ranks that wait wait as they do for Gloo, so that
what is dropped ends as a lost message does: with an error on every rank that says who waited for what.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import inf
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardfold.comm.transport import Pending, Transport, Waiter
from shardfold.errors import ConfigError
from shardfold.sharding.model import Owner

__all__ = ["SlowTransport"]


class _Due:
    """As a ``torch.distributed`` work, what is done at a time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def is_completed(self) -> bool:
        return monotonic() >= self.at

    def wait(self, limit: timedelta | None = None) -> bool:
        left = self.at - monotonic()
        most = inf if limit is None else limit.total_seconds()
        if left > most:
            sleep(most)
            raise RuntimeError("a collective that is late timed out")
        sleep(max(left, 0.0))
        return True


class _SlowPending(Pending):
    def __init__(self, inner: Pending, due: _Due) -> None:
        super().__init__([due])
        self._inner = inner

    def done(self) -> bool:
        return super().done() and self._inner.done()

    def wait(self, waiter: Waiter) -> None:
        super().wait(waiter)
        self._inner.wait(waiter)


class SlowTransport(Transport):
    """
    Args:
        inner: what carries the bytes.
        latency: seconds from the end of sending to the arrival.
        rate: bytes per second that a rank sends; None: any number.

    Raises:
        ConfigError: one of them is negative, or the rate 0.
    """

    def __init__(self, inner: Transport, *, latency: float = 0.0, rate: float | None = None) -> None:
        if latency < 0 or (rate is not None and rate <= 0):
            raise ConfigError(
                f"SlowTransport(latency={latency!r}, rate={rate!r}): seconds of 0 or more, and bytes per second above "
                "0 or None."
            )
        self._inner, self._latency, self._rate = inner, latency, rate
        self.kind = inner.kind
        self._free = 0.0  # when the link has sent what it was given
        self._drops = False

    @classmethod
    def around(cls, engine: Owner, *, latency: float = 0.0, rate: float | None = None) -> SlowTransport:
        """What an engine sends from now on goes over such a link."""
        comm = engine.sharded.comm
        comm.transport = slow = cls(comm.transport, latency=latency, rate=rate)
        return slow

    def drop_next(self) -> None:
        """The next collective of this rank never ends for it."""
        self._drops = True

    def _sent(self, inner: Pending, num_bytes: float) -> Pending:
        self._free = max(self._free, monotonic()) + (num_bytes / self._rate if self._rate is not None else 0.0)
        due, self._drops = _Due(inf if self._drops else self._free + self._latency), False
        return _SlowPending(inner, due)

    def all_gather(self, full: Tensor, group: Any, *, resident: Tensor | None = None) -> Pending:
        pending = self._inner.all_gather(full, group, resident=resident)
        return self._sent(pending, full.nbytes * _others(group))

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        return self._sent(self._inner.reduce_scatter(full, out, group, add=add), full.nbytes * _others(group))

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        return self._sent(self._inner.all_reduce(tensor, group), 2 * tensor.nbytes * _others(group))

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        other = sum(to) - to[dist.get_rank(group)]
        return self._sent(self._inner.exchange(sent, to, received, by, group), other * sent.itemsize)

    def fence(self, waiter: Waiter, resident: Tensor | None = None) -> None:
        self._inner.fence(waiter, resident)

    def sever(self) -> None:
        self._inner.sever()

    def close(self) -> None:
        self._inner.close()


def _others(group: Any) -> float:
    """The part of a whole that a rank sends to others, or they to it."""
    ranks = dist.get_world_size(group)
    return (ranks - 1) / ranks
