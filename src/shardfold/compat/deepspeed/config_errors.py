"""What a wrong config raises."""

from __future__ import annotations

from shardfold.errors import ConfigError

__all__ = ["DeepSpeedConfigError"]


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A config that cannot be honoured; one sentence says what, where and how to mend it.

    Also a ``ValueError`` and an ``AssertionError``, as scripts that catch DeepSpeed's own errors expect.
    """
