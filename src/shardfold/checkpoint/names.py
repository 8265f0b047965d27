"""Names of parameters, where those of a checkpoint differ from those of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from shardfold.errors import ConfigError

__all__ = ["Rename", "renamer"]

Rename = Mapping[str, str] | Callable[[str], str]
"""Regular expressions and what they are replaced with, in order; or a function of a name."""


def renamer(rename: Rename | None, where: str) -> Callable[[str], str]:
    """The function that ``rename`` stands for; ``where`` names the call in messages.

    Raises:
        ConfigError: it is neither, or a pattern is none.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    if not isinstance(rename, Mapping) or not all(isinstance(each, str) for rule in rename.items() for each in rule):
        raise ConfigError(
            f"{where}(rename={rename!r}): give a dict of regular expressions and what they are replaced with, or a "
            "function of a name."
        )
    try:
        rules: Sequence[tuple[re.Pattern[str], str]] = [(re.compile(old), new) for old, new in rename.items()]
    except re.error as error:
        raise ConfigError(f"{where}(rename={dict(rename)!r}): {error.pattern!r} is not a pattern: {error}.") from None

    def renamed(name: str) -> str:
        for pattern, new in rules:
            name = pattern.sub(new, name)
        return name

    return renamed
