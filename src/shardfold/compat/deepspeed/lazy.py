"""Names that are imported when they are first asked for, so that ``import deepspeed`` costs almost nothing."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shardfold.compat.deepspeed.absent import ABSENT, MODULES, absent

__all__ = ["attach", "enter_absent"]

PACKAGE = __package__


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: to look through all that torch has made takes longer than the import."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _imported(module: str) -> ModuleType:
    with _uncollected():
        return importlib.import_module(module)


def attach(
    package: str, names: Mapping[str, str] | None = None, modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``(__getattr__, __dir__)`` for a package of the compatibility layer.

    Args:
        package: its ``__name__``.
        names: of the public objects: the module of this layer each is in, relative to this layer; ``"module:"`` for the
            module itself.
        modules: the package's own submodules that are its attributes without being imported. What
            :data:`~shardfold.compat.deepspeed.absent.ABSENT` has of the package raises when it is used.
    """
    prefix = package.removeprefix(str(PACKAGE)).lstrip(".")
    places = dict(names or {})
    submodules = {*modules, *_below(MODULES, prefix)} - places.keys()
    missing = _below(ABSENT, prefix)

    def find(name: str) -> Any:
        if name in submodules:
            return _imported(f"{package}.{name}")
        if name in places:
            found = _imported(f"{PACKAGE}.{places[name].rstrip(':')}")
            return found if places[name].endswith(":") else getattr(found, name)
        if name in missing:
            return absent(missing[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def getattribute(name: str) -> Any:
        value = find(name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *submodules, *missing})

    twins = {name for name, place in places.items() if place.rpartition(".")[2] == name}
    if twins:
        sys.modules[package].__class__ = type("Package", (_Package,), {"twins": frozenset(twins)})
    return getattribute, directory


class _Package(ModuleType):
    """Where a public object and the submodule that has it share a name: importing the one does not hide the other."""

    twins: frozenset[str]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.twins or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def _below(names: Iterable[str], prefix: str) -> dict[str, str]:
    """``{last part: name}`` of the names directly below a prefix."""
    return {last: name for name in names for head, _, last in [name.rpartition(".")] if head == prefix}


class _AbsentModules(MetaPathFinder, Loader):
    """Makes the modules in which nothing is but what is absent. It is asked last, so files come first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{PACKAGE}.") or fullname.removeprefix(f"{PACKAGE}.") not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Names that DeepSpeed has and the compatibility layer has not."
        functions = attach(module.__name__)
        vars(module).update(zip(("__getattr__", "__dir__"), functions, strict=True))


def enter_absent() -> None:
    """Lets the modules be imported."""
    if not any(isinstance(finder, _AbsentModules) for finder in sys.meta_path):
        sys.meta_path.append(_AbsentModules())
