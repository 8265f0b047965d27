"""Which transport carries an engine's data; nobody else knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.comm._near import NearTransport
from shardfold.comm._sockets import SocketTransport
from shardfold.comm.transport import GlooTransport, StreamTransport, Transport, Waiter

__all__ = ["data_transport"]


def data_transport(
    device: torch.device,
    groups: Sequence[tuple[Any, Sequence[int]]],
    talking: Sequence[tuple[Any, Sequence[int]]],
    rank: int,
    *,
    on_streams: bool,
    empty: Callable[[int, torch.dtype], Tensor],
    recycle: Callable[[Tensor], None],
    exchange: Callable[[str, str], list[str]],
    waiter: Waiter,
) -> Transport:
    """The transport of a device's tensors; for one rank it is never asked.

    Args:
        device: of the tensors.
        on_streams: whether the backend queues collectives on streams of the device, as NCCL does.
        groups: process groups that this rank is in, each with its ranks.
        talking: those that small messages go over.
        rank: this one.
        empty: makes a temporary of so many elements of a dtype; ``recycle`` takes it back.
        exchange: ``exchange(key, text)`` gives every rank's text.
        waiter: waits for a work, or raises when another rank gave up.
    """
    if on_streams:
        return StreamTransport()
    gloo = GlooTransport(empty, recycle)
    if not groups or accelerator.has_streams(device):
        return gloo
    near = NearTransport(gloo, groups, rank, exchange, waiter, talking)
    # All ranks ask: one that does not want connections, as its environment says, leaves all of them without.
    if not near.is_everywhere and all(text == "True" for text in exchange("sockets", str(SocketTransport.wanted()))):
        apart, silent = ([(g, () if near.near(g) else ranks) for g, ranks in each] for each in (groups, talking))
        near.leave_others(SocketTransport(gloo, apart, silent, rank, exchange))
    return near
