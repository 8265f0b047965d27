"""Bytes that formats hold besides while they encode and decode, found by letting them do it."""

from __future__ import annotations

from functools import cache

import torch

from shardfold.plan.blocks import AT_ONCE
from shardfold.plan.formats import FORMATS
from shardfold.planner.live import LiveBytes
from shardfold.sharding.segment import TORCH_DTYPES

__all__ = ["coding_bytes"]


@cache
def coding_bytes(name: str, dtype: str, numel: int, *, decodes: bool, parts: int = 1) -> int:
    """The most bytes of temporaries of a format that encodes, or ``decodes``, so many elements of a dtype.

    Args:
        name: of the format.
        dtype: of what is encoded, or what payloads become.
        numel: elements of a part; formats in blocks work on :data:`AT_ONCE` of them at most.
        decodes: instead.
        parts: of so many elements, which do not lie together.
    """
    form = FORMATS[name]
    numel = min(-(-numel // form.block) * form.block, max(AT_ONCE // form.block, 1) * form.block)
    values = torch.zeros(parts, 2, numel, dtype=TORCH_DTYPES[dtype])[:, 0]
    payload = torch.zeros(parts, form.nbytes(numel), dtype=torch.uint8)
    state = torch.zeros(parts, 2, numel)[:, 0] if form.state is not None and not decodes else None
    live = LiveBytes([values, payload, *([state] if state is not None else [])])
    with torch.no_grad():
        form.encode(values, payload, state)  # what is decoded are codes
        with live:
            if decodes:
                form.decode(payload, values)
            else:
                form.encode(values, payload, state)
    return live.peak
