"""What autograd holds for backward, watched from outside: real storages and when they die, whoever holds them and why.

Nothing here knows of modes or plans, so that what an engine says of itself can be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardfold.torch_internals import (
    DispatchMode,
    Pack,
    expired,
    free_weak,
    storage_key,
    tree_iter,
    weak_storage,
)

__all__ = ["HeldBytes"]


@contextmanager
def _packs_seen(through: Callable[[Pack], Pack]) -> Iterator[None]:
    """Inside, each ``pack`` that anyone pushes, PyTorch's checkpoints too, is replaced with what ``through`` makes of
    it."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    push = autograd._push_saved_tensors_default_hooks
    autograd._push_saved_tensors_default_hooks = lambda pack, unpack: push(through(pack), unpack)
    try:
        yield
    finally:
        autograd._push_saved_tensors_default_hooks = push


class HeldBytes(DispatchMode):
    """Inside, the most bytes of activations at once: of storages that an operation made and that

    - were handed to be saved for a backward, in forward or as a forward ran again, and not given up again at once; or
    - were still there when forward was over (:meth:`end_forward`), for whatever reason.

    They are counted as long as they live, after every operation; temporary values and gradients under way are not.

    Args:
        beside: tensors whose storages do not count, such as parameters and a batch.

    Attributes:
        peak: the most at once.
        live: the most at once of all that operations made, with what is temporary.
    """

    def __init__(self, beside: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = self.live = 0
        self._beside = {storage_key(tensor.untyped_storage()) for tensor in beside}
        self._known: dict[int, tuple[Any, int]] = {}
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._meet(value)
        self._look()
        return out

    @contextmanager
    def watching(self) -> Iterator[HeldBytes]:
        """Forward and backward run inside."""

        def seen(pack: Pack) -> Pack:
            # A checkpoint's forward drops what it is handed.
            return pack if pack.__qualname__.startswith("_checkpoint_hook.") else self._noting(pack)

        with (
            _packs_seen(seen),
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
            self,
        ):
            yield self

    def end_forward(self) -> None:
        """Forward is over: what lives is held."""
        self._look()
        self._held |= self._known.keys()
        self._look()

    def _noting(self, pack: Pack) -> Pack:
        @wraps(pack)
        def noting(tensor: Tensor) -> Any:
            packed = pack(tensor)
            self._meet(tensor)
            self._held.add(storage_key(tensor.untyped_storage()))
            self._look()
            return packed

        return noting

    def _meet(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._known and storage_key(storage) not in self._beside:
                self._known[storage_key(storage)] = (weak_storage(storage), storage.nbytes())

    def _look(self) -> None:
        for key, (weak, _) in list(self._known.items()):
            if expired(weak):
                free_weak(weak)
                del self._known[key]
                self._held.discard(key)
        self.live = max(self.live, sum(size for _, size in self._known.values()))
        self.peak = max(self.peak, sum(size for key, (_, size) in self._known.items() if key in self._held))
