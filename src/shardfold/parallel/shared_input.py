"""What the columns of one parent are given, as long as the parent's forward runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfold.torch_internals import version_of

__all__ = ["SharedInput"]


@dataclass(eq=False)
class SharedInput:
    """What the columns of one parent are given: one tensor for several of them is copied, and its gradients are summed,
    once."""

    given: Tensor | None = None
    version: int | None = None
    copied: Tensor | None = None

    def copy(self, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``make`` gives of ``x``, or gave of it before."""
        if torch.compiler.is_compiling():  # a change in place shows in the copy, which is a view
            if self.copied is None or self.given is not x:
                self.given, self.copied = x, make(x)
            return self.copied
        version = version_of(x)  # None: it may have been changed, and nobody would know
        if self.copied is None or self.given is not x or self.version != version or version is None:
            copied = make(x)
            self.given, self.version, self.copied = x, version, copied
            return copied
        return self.copied

    def forget(self, *_: Any) -> None:
        """The parent's forward is over."""
        self.given = self.copied = None

    def __reduce__(self) -> Any:
        return SharedInput, ()
