"""What is done when an object is collected."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["AtCollection"]


class AtCollection(weakref.finalize):
    """Calls ``call`` when ``owner`` is collected, and not when the interpreter exits, where ``weakref.finalize`` would.

    Args:
        owner: that is referred to weakly.
        call: called with ``given``, which may not refer to the owner.
    """

    __slots__ = ()

    def __init__(self, owner: object, call: Callable[..., Any], /, *given: Any) -> None:
        super().__init__(owner, call, *given)
        self.atexit = False
