"""Options that would do nothing under the others: each is refused, in one sentence that names what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any

from shardfold.errors import ConfigError

__all__ = ["Effect", "check_effects", "idle", "without_effect"]


@dataclass(frozen=True)
class Effect:
    """What an option needs to do anything.

    Attributes:
        option: its name, as a field or an argument has it.
        acts: whether it does something, of an object with all options.
        why: the reason where it does not, as it stands behind "as".
        mend: what to give for it; empty where leaving it out is all there is.
    """

    option: str
    acts: Callable[[Any], bool]
    why: str
    mend: str = ""


def without_effect(option: str, why: str, mend: str = "") -> str:
    """The sentence that refuses an option; of its field's name."""
    return f"--{option.replace('_', '-')} has no effect here, as {why}: {f'{mend}, or ' if mend else ''}leave it out."


def idle(options: Any, defaults: Mapping[str, Any], effects: Iterable[Effect]) -> dict[str, Effect]:
    """Options that are given and do nothing, each with the first rule that says so.

    Args:
        options: an object that has all of them. What has its default is not given: config files that were written with
            all settings are read again.
        defaults: theirs.
        effects: the rules; an option may have several.
    """
    found: dict[str, Effect] = {}
    for each in effects:
        given = getattr(options, each.option) != defaults[each.option]
        if given and each.option not in found and not each.acts(options):
            found[each.option] = each
    return found


def check_effects(command: Callable[..., Any], given: Mapping[str, Any], effects: Iterable[Effect]) -> None:
    """The same of a command's arguments, whose defaults are in its signature.

    Raises:
        ConfigError: one does nothing.
    """
    defaults = {name: each.default for name, each in signature(command).parameters.items()}
    for name, each in idle(SimpleNamespace(**given), defaults, effects).items():
        raise ConfigError(without_effect(name, each.why, each.mend))
