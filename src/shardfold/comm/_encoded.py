"""Collectives of what does not travel as it lies: encoded before, decoded when the transport has brought it.

A gather encodes this rank's chunk and decodes all of them, its own too, so that every rank reads the same values. A
reduce-scatter cannot add payloads: each rank encodes what every other is to have, the payloads are exchanged, and each
decodes and adds what came, in rank order and in fp32 (fp64 into fp64). Sums are rounded by no format, and no transport
or backend shows in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.transport import Pending, Transport
from shardfold.plan.formats import Format
from shardfold.tiers.device import DeviceTier

__all__ = ["gather_bundle", "gather_encoded", "scatter_bundle", "scatter_encoded"]


def gather_encoded(
    transport: Transport, memory: DeviceTier, form: Format, full: Tensor, group: Any, codes: Tensor | None = None
) -> tuple[Pending, Pending]:
    """Completes ``full``, in which this rank's chunk is in place, or of which there are ``codes``; to be waited for in
    this order."""
    return gather_bundle(transport, memory, form, (full,), group, codes)


def gather_bundle(
    transport: Transport,
    memory: DeviceTier,
    form: Format,
    fulls: Sequence[Tensor],
    group: Any,
    codes: Tensor | None = None,
) -> tuple[Pending, Pending]:
    """The same of several, which travel as one: each rank's payload has its chunk of each, one behind the other, or
    these ``codes``."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    several = [full.view(ranks, -1) for full in fulls]
    sizes = [form.nbytes(values.shape[1]) for values in several]
    payload = memory.empty(ranks * sum(sizes), torch.uint8)
    rows = payload.view(ranks, -1).split(sizes, 1)
    with torch.no_grad():
        if codes is not None:
            payload.view(ranks, -1)[me].copy_(codes)
        for values, row in zip(several, rows, strict=True) if codes is None else ():
            _encode(memory, form, values[me : me + 1], row[me : me + 1], None)
    return transport.all_gather(payload, group), Pending([], partial(_decode, memory, form, payload, rows, several))


def scatter_encoded(
    transport: Transport,
    memory: DeviceTier,
    form: Format,
    full: Tensor,
    out: Tensor,
    group: Any,
    *,
    add: bool,
    state: Tensor | None,
    parts: int = 1,
) -> tuple[Pending, Pending]:
    """Sums ``full`` over the group; this rank's chunk goes to (``add``: is added to) ``out``, which may be in ``full``;
    to be waited for in this order. ``state``: what the format keeps, ``(len(full),)``. ``parts``: of so many equal
    parts of ``full`` this rank's chunk has its slice of each, one behind the other (see ``hops``)."""
    ranks = dist.get_world_size(group)
    size = form.nbytes(full.numel() // ranks)
    sent, received = (memory.empty(ranks * size, torch.uint8) for _ in range(2))
    with torch.no_grad():
        values, kept = (None if each is None else each.view(parts, ranks, -1) for each in (full, state))
        assert values is not None
        rows = sent.view(ranks, parts, -1)
        for rank in range(ranks) if parts > 1 else ():
            form.encode(values[:, rank], rows[rank], None if kept is None else kept[:, rank])
        if parts == 1:
            form.encode(values[0], rows[:, 0], None if kept is None else kept[0])
    sizes = [size] * ranks
    exchanged = transport.exchange(sent, sizes, received, sizes, group)
    return exchanged, Pending([], partial(_sums, memory, form, sent, received, [size], [out], add))


def scatter_bundle(
    transport: Transport,
    memory: DeviceTier,
    form: Format,
    fulls: Sequence[Tensor],
    outs: Sequence[Tensor],
    group: Any,
    *,
    states: Sequence[Tensor | None],
) -> tuple[Pending, Pending]:
    """As :func:`scatter_encoded`, of several, which travel as one: what a rank is to have of each lies one behind the
    other."""
    ranks = dist.get_world_size(group)
    sizes = [form.nbytes(full.numel() // ranks) for full in fulls]
    sent, received = (memory.empty(ranks * sum(sizes), torch.uint8) for _ in range(2))
    with torch.no_grad():
        rows = sent.view(ranks, -1).split(sizes, 1)
        for full, row, state in zip(fulls, rows, states, strict=True):
            _encode(memory, form, full.view(ranks, -1), row, None if state is None else state.view(ranks, -1))
    lengths = [sum(sizes)] * ranks
    exchanged = transport.exchange(sent, lengths, received, lengths, group)
    return exchanged, Pending([], partial(_sums, memory, form, sent, received, sizes, outs, add=False))


def _encode(memory: DeviceTier, form: Format, values: Tensor, rows: Tensor, state: Tensor | None) -> None:
    """Into rows that lie among others: in one piece first, as several rows are encoded at once where they touch."""
    whole = rows if rows.is_contiguous() else memory.empty(rows.numel(), torch.uint8).view(rows.shape)
    form.encode(values, whole, state)
    if whole is not rows:
        rows.copy_(whole)
        memory.recycle(whole.view(-1))


def _decode(
    memory: DeviceTier, form: Format, payload: Tensor, rows: Sequence[Tensor], several: Sequence[Tensor]
) -> None:
    accelerator.used_here(payload)  # the side stream made it
    with torch.no_grad():
        for row, values in zip(rows, several, strict=True):
            form.decode(row.contiguous(), values)
    memory.recycle(payload)


def _sums(
    memory: DeviceTier,
    form: Format,
    sent: Tensor,
    received: Tensor,
    sizes: Sequence[int],
    outs: Sequence[Tensor],
    add: bool,
) -> None:
    accelerator.used_here(sent)  # the side stream made it; that the collective has read it, only this one knows
    accelerator.used_here(received)
    for row, out in zip(received.view(-1, sum(sizes)).split(list(sizes), 1), outs, strict=True):
        _sum(memory, form, row.contiguous(), out, add)
    memory.recycle(sent)
    memory.recycle(received)


def _sum(memory: DeviceTier, form: Format, received: Tensor, out: Tensor, add: bool) -> None:
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    values = memory.empty(2 * out.numel(), wide)
    total, row = both = values.view(2, -1)
    with torch.no_grad():
        form.decode(received[:2], both[: len(received)])
        for number in range(1, len(received)):
            if number > 1:
                form.decode(received[number : number + 1], row.view(1, -1))
            total.add_(row)
        out.add_(total) if add else out.copy_(total)
    memory.recycle(values)
