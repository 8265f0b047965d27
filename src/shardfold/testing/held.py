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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["HeldBytes"]

_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_STORAGE: Any = torch.UntypedStorage


class HeldBytes(TorchDispatchMode):
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
        self._beside = {tensor.untyped_storage()._cdata for tensor in beside}
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
        push = _AUTOGRAD._push_saved_tensors_default_hooks

        def pushed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Any]) -> None:
            # A checkpoint's forward drops what it is handed.
            if not pack.__qualname__.startswith("_checkpoint_hook."):
                pack = self._noting(pack)
            push(pack, unpack)

        _AUTOGRAD._push_saved_tensors_default_hooks = pushed
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), self:
                yield self
        finally:
            _AUTOGRAD._push_saved_tensors_default_hooks = push

    def end_forward(self) -> None:
        """Forward is over: what lives is held."""
        self._look()
        self._held |= self._known.keys()
        self._look()

    def _noting(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        @wraps(pack)
        def noting(tensor: Tensor) -> Any:
            packed = pack(tensor)
            self._meet(tensor)
            self._held.add(tensor.untyped_storage()._cdata)
            self._look()
            return packed

        return noting

    def _meet(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in self._beside:
                self._known[storage._cdata] = (_STORAGE._weak_ref(storage), storage.nbytes())

    def _look(self) -> None:
        for key, (weak, _) in list(self._known.items()):
            if _STORAGE._expired(weak):
                _STORAGE._free_weak_ref(weak)
                del self._known[key]
                self._held.discard(key)
        self.live = max(self.live, sum(size for _, size in self._known.values()))
        self.peak = max(self.peak, sum(size for key, (_, size) in self._known.items() if key in self._held))
