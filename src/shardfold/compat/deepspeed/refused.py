"""What the face raises for a call that DeepSpeed's documentation rules out."""

from __future__ import annotations

from shardfold.errors import ConfigError, UsageError

__all__ = ["WrongArgument", "WrongCall"]


class WrongCall(UsageError, AssertionError):
    """A call that is not legal now. Also an ``AssertionError``, which is what DeepSpeed raises for most of them."""


class WrongArgument(ConfigError, AssertionError):
    """Arguments of ``initialize`` that are missing or contradict each other; a ``ValueError`` too."""
