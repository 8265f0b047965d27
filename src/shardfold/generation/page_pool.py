"""Keys and values of all layers in pages.

For each layer two tensors ``(pages, size, key_heads, dim)``, made when the layer first stores: heads, width and dtype
are those that come. So an axis of tensor parallelism, under which a rank has some of the heads, needs no word here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["PagePool"]

STEP = 1.25
"""By what the pool grows, where there is no limit."""
HOST_STEP = 2.0
"""The same in the host's memory, where only what is written takes memory."""


class LayerPages(NamedTuple):
    keys: Tensor
    values: Tensor


class PagePool:
    """Args:
    size: tokens of a page.
    limit: pages, all made at once; None: as many as are asked for, made as they are.
    """

    def __init__(self, size: int, limit: int | None) -> None:
        self.size = size
        self._pages, self._room, self._grows = limit or 0, limit or 0, limit is None
        self._layers: dict[nn.Module, LayerPages] = {}
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Held by all pages that are made, whether they are in use or not."""
        return sum(each[:1].nbytes for kept in self._layers.values() for each in kept) * self._pages

    @property
    def page_nbytes(self) -> int:
        """Of one page with all its layers; 0 before the first forward."""
        return self.nbytes // self._pages if self._pages else 0

    @property
    def is_rounded(self) -> bool:
        """Whether it holds fewer than 32 bits of a number: what lies between two calls has no more then."""
        first = next(iter(self._layers.values()), None)
        return first is not None and first.keys.dtype.itemsize < 4

    @property
    def layers(self) -> list[nn.Module]:
        """Those that have stored."""
        return list(self._layers)

    def make(self, end: int, written: Callable[[], Iterable[tuple[int, int]]], count: int) -> None:
        """From now on there are pages of numbers below ``end``; layer by layer, so that one layer at most is there
        twice.

        Args:
            written: which of them were in use at some time, as stretches; others have nothing to keep.
            count: how many those are.
        """
        if not self._grows:
            return
        if end > self._room:
            self._room = max(end, int(self._room * self._step) + 1)
            for layer, kept in self._layers.items():
                self._layers[layer] = LayerPages(*(self._longer(each, written()) for each in kept))
        self._pages = count if self._step == HOST_STEP else self._room

    def store(self, layer: nn.Module, keys: Tensor, values: Tensor, where: Tensor, copied: Tensor, to: Tensor) -> None:
        """Puts tokens where they belong, then copies tokens from page to page.

        Args:
            keys: ``(tokens, key_heads, dim)``.
            where: ``(tokens,)`` int64: of each its page times ``size`` plus its place in the page, as are the next.
            copied: which are read.
            to: where they are put besides.
        """
        kept = self._layers.get(layer)
        if kept is None:
            kept = self._layers[layer] = LayerPages(self._made(keys), self._made(values))
        for each, new in zip(kept, (keys, values), strict=True):
            flat = each.flatten(0, 1)
            flat.index_copy_(0, where, new)
            if copied.numel():
                flat.index_copy_(0, to, flat.index_select(0, copied))

    def tokens(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """All keys and all values where they rest, ``(key_heads, pages * size, dim)``."""
        keys, values = self._layers[layer]
        return keys.flatten(0, 1).transpose(0, 1), values.flatten(0, 1).transpose(0, 1)

    def read(self, layer: nn.Module, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of texts, in memory that the next call writes anew.

        Args:
            tables: ``(texts, pages)`` int64: the pages of each, in order.

        Returns:
            Both ``(texts, key_heads, pages * size, dim)``.
        """
        kept = self._layers[layer]
        keys, values = (self._read(each, tables, number) for number, each in enumerate(kept))
        return keys, values

    def _read(self, kept: Tensor, tables: Tensor, number: int) -> Tensor:
        flat = kept.flatten(1)
        need = tables.numel() * flat.shape[1]
        scratch = self._scratch.get((number, kept.dtype))
        if scratch is None or scratch.numel() < need:
            scratch = self._scratch[number, kept.dtype] = kept.new_empty(need)
        found = torch.index_select(flat, 0, tables.view(-1), out=scratch[:need].view(-1, flat.shape[1]))
        return found.view(len(tables), -1, *kept.shape[2:]).transpose(1, 2)

    @property
    def _step(self) -> float:
        first = next(iter(self._layers.values()), None)
        return STEP if first is not None and first.keys.device.type != "cpu" else HOST_STEP

    def _made(self, new: Tensor) -> Tensor:
        # Zeros: what no token fills is masked, and 0 times inf would not be 0.
        return self._zeros(new, (self._room, self.size, *new.shape[1:]))

    def _longer(self, old: Tensor, written: Iterable[tuple[int, int]]) -> Tensor:
        new = self._zeros(old, (self._room, *old.shape[1:]))
        for first, end in written:  # pages that are not written yet take no memory
            new[first : min(end, len(old))] = old[first:end]
        return new

    def _zeros(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self._grows or like.device.type != "cpu":
            return like.new_zeros(shape)
        # NumPy takes them from the system, which has zeros without writing any.
        return torch.from_numpy(np.zeros(math.prod(shape) * like.element_size(), np.uint8)).view(like.dtype).view(shape)
