"""Which transport carries an engine's data; nobody else knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.comm.near import NearTransport
from shardfold.comm.transport import GlooTransport, NcclTransport, Transport, Waiter

__all__ = ["data_transport"]


def data_transport(
    backend: str,
    device: torch.device,
    groups: Sequence[tuple[Any, Sequence[int]]],
    rank: int,
    *,
    empty: Callable[[int, torch.dtype], Tensor],
    recycle: Callable[[Tensor], None],
    exchange: Callable[[str, str], list[str]],
    waiter: Waiter,
) -> Transport:
    """The transport of a backend: ``gloo``, ``nccl``, or ``none`` for one rank, where it is never asked.

    Args:
        backend: as above.
        device: of the tensors.
        groups: process groups that this rank is in, each with its ranks.
        rank: this one.
        empty: makes a temporary of so many elements of a dtype; ``recycle`` takes it back.
        exchange: ``exchange(key, text)`` gives every rank's text.
        waiter: waits for a work, or raises when another rank gave up.
    """
    if backend == "nccl":
        return NcclTransport()
    gloo = GlooTransport(empty, recycle)
    if backend == "none" or device.type != "cpu":
        return gloo
    return NearTransport(gloo, groups, rank, exchange, waiter)
