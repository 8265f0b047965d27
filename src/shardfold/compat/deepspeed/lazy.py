"""Names that are imported when they are first asked for, so that ``import deepspeed`` costs almost nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardfold.compat.deepspeed.absent import ABSENT, absent

__all__ = ["attach"]

FACE = __package__


def attach(
    package: str, names: Mapping[str, str] | None = None, modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``(__getattr__, __dir__)`` for a package of the face.

    Args:
        package: its ``__name__``.
        names: of the public objects: the module each is in, below the face if it does not begin with ``shardfold.``;
            ``"module:other"`` where it has another name there, ``"module:"`` for the module itself.
        modules: the package's own submodules that are its attributes without being imported. What
            :data:`~shardfold.compat.deepspeed.absent.ABSENT` has of the package raises when it is used.
    """
    places, submodules = dict(names or {}), set(modules)
    prefix = package.removeprefix(str(FACE)).lstrip(".")
    missing = {name.rpartition(".")[2]: name for name in ABSENT if name.rpartition(".")[0] == prefix}

    def find(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name in places:
            module, other, attribute = places[name].partition(":")
            found = importlib.import_module(module if module.startswith("shardfold.") else f"{FACE}.{module}")
            return getattr(found, attribute or name) if attribute or not other else found
        if name in missing:
            return absent(missing[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def getattribute(name: str) -> Any:
        value = find(name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *submodules, *missing})

    return getattribute, directory
