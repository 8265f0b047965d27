"""Bytes of storages that operations made, as long as they live: of real tensors, and of those without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardfold.plan.blocks import AT_ONCE
from shardfold.plan.formats import FORMATS
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.torch_internals import DispatchMode, storage_key, tree_iter

__all__ = ["LiveBytes", "coding_bytes"]


class LiveBytes(DispatchMode):
    """Inside, the bytes of all storages that operations make, each until it is given back, whoever holds it.

    Args:
        beside: tensors whose storages do not count.
        told: called behind each operation with it, its arguments and its result.

    Attributes:
        level: bytes that live now.
        peak: the most since :meth:`mark`.
    """

    def __init__(self, beside: Iterable[Tensor] = (), told: Callable[[Any, Any, Any, Any], None] | None = None) -> None:
        super().__init__()
        self.level = self.peak = 0
        self._beside = {storage_key(tensor.untyped_storage()) for tensor in beside}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._told = told
        self._tops: list[int] = []
        self._grown = False  # since something was given back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for value in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._meet(value.untyped_storage())
        self.peak = max(self.peak, self.level)
        if self._told is not None:
            self._told(func, args, kwargs, out)
        return out

    def leave_out(self, values: Any) -> None:
        """Storages of tensors of nested ``values`` do not count either, as those of a micro-batch: a view of one is an
        operation's result."""
        tensors = [value for value in tree_iter(values) if isinstance(value, Tensor) and value.layout is torch.strided]
        self._beside |= {storage_key(tensor.untyped_storage()) for tensor in tensors}

    def mark(self) -> int:
        """The peak since the last mark; from now on it is that of what follows."""
        peak, self.peak = self.peak, self.level
        self._tops, self._grown = [], True
        return peak

    def tops(self) -> list[int]:
        """The levels since the last mark from which something was given back, and the one now: whatever the sizes of
        tensors, one of them is the peak."""
        return [*self._tops, self.level]

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._known or key in self._beside:
            return
        size = storage.nbytes()
        self.level += size
        self._grown = True
        self._known[key] = weakref.ref(storage, lambda _: self._lose(key, size))

    def _lose(self, key: int, size: int) -> None:
        if self._grown:
            self._tops.append(self.level)
            self._grown = False
        self.level -= size
        self._known.pop(key, None)


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
