"""How ``import deepspeed`` finds this layer: in this process by a finder, in others by a directory on ``PYTHONPATH``.

The finder is asked before any other. To ``deepspeed`` and all that is under it, it gives the module of the same name
under ``shardfold.compat``, the very same object, and to ``importlib.metadata`` this layer's own record. The directory,
``path/`` beside this file, holds that record and a package ``deepspeed`` of one line, which enters the finder: a child
process, which inherits no finder, finds these first. Both stand before ``site-packages``, so a DeepSpeed that is
installed there is not seen.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from shardfold.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["ELASTIC", "VERSION", "Finder", "enter", "environment", "install", "is_elastic", "uninstall"]

VERSION = "0.19.8"
"""Of the DeepSpeed whose interface this is."""

ELASTIC = "SHARDFOLD_ELASTIC"
"""The variable by which a launcher says that engines go on without a rank that is killed."""

NAME = "deepspeed"
PACKAGE = f"{__package__}.{NAME}"
PATH = Path(__file__).with_name("path")


class Finder(MetaPathFinder):
    """Gives modules and metadata of the compatibility layer under DeepSpeed's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        here = importlib.util.find_spec(f"{__package__}.{fullname}")
        if here is None:
            return None
        spec = ModuleSpec(fullname, Alias(), origin=here.origin, is_package=here.submodule_search_locations is not None)
        spec.submodule_search_locations = here.submodule_search_locations
        return spec

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        from importlib.metadata import PathDistribution

        wanted = getattr(context, "name", None)
        if wanted is None or wanted.replace("_", "-").lower() == NAME:
            yield PathDistribution(PATH / f"{NAME}-{VERSION}.dist-info")

    def invalidate_caches(self) -> None:
        """There are none."""


class Alias(Loader):
    """Loads a module of the compatibility layer under its other name: one module, with the spec that it has."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{__package__}.{spec.name}")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just set the alias's

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m deepspeed...``."""
        spec = importlib.util.find_spec(f"{__package__}.{fullname}")
        return spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None


def is_elastic() -> bool:
    """Whether the launcher has said, of several ranks, that engines go on without one that is killed."""
    return bool(os.environ.get(ELASTIC)) and int(os.environ.get("WORLD_SIZE", "1")) > 1


def install() -> None:
    """Makes ``deepspeed`` the compatibility layer in this process, and in processes that it starts from now on.

    Programs that ask for the package's metadata are told :data:`VERSION`. A DeepSpeed that is installed is not seen.
    Calling it again changes nothing.

    Raises:
        UsageError: the real DeepSpeed is imported already.

    Examples:
        >>> sf.compat.install()
        >>> import deepspeed
        >>> deepspeed.__version__ == sf.compat.VERSION
        True
        >>> sf.compat.uninstall()
    """
    loaded = sys.modules.get(NAME)
    if loaded is not None and not _is_ours(loaded):
        raise UsageError(
            f"DeepSpeed itself is imported already, from {getattr(loaded, '__file__', 'elsewhere')}: call "
            "shardfold.compat.install() before the first import of deepspeed and of the libraries that use it."
        )
    _finders()
    if str(PATH) not in sys.path:
        sys.path.insert(0, str(PATH))  # multiprocessing hands it to the processes it spawns
    os.environ.update(environment())


def uninstall() -> None:
    """Takes back what :func:`install` did, and what this layer gave to PyTorch's classes for its split parameters;
    modules of the compatibility layer that were imported stay usable.

    Examples:
        >>> sf.compat.install()
        >>> sf.compat.uninstall()
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    sys.path[:] = [entry for entry in sys.path if entry != str(PATH)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == NAME and _is_ours(module):
            del sys.modules[name]
    attributes = sys.modules.get(f"{PACKAGE}.zero.attributes")  # nothing was given before it was imported
    if attributes is not None:
        attributes.uninstall()
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(PATH))]
    os.environ.pop("PYTHONPATH", None)
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``base`` with the compatibility layer first on ``PYTHONPATH``, for a process that is to be started.

    Examples:
        >>> "PYTHONPATH" in sf.compat.environment({})
        True
    """
    entries = [str(PATH), *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    return {**base, "PYTHONPATH": os.pathsep.join(dict.fromkeys(entries))}


def enter() -> None:
    """What the package in the directory does when it is imported: from then on the finder answers."""
    _finders()
    sys.modules[NAME] = importlib.import_module(PACKAGE)


def _finders() -> None:
    """Puts one finder before all others."""
    ours: Iterable[MetaPathFinder] = [finder for finder in sys.meta_path if isinstance(finder, Finder)] or [Finder()]
    sys.meta_path[:] = [*ours, *(finder for finder in sys.meta_path if not isinstance(finder, Finder))]  # pyright: ignore


def _is_ours(module: ModuleType) -> bool:
    return module.__name__ == PACKAGE or module.__name__.startswith(f"{PACKAGE}.")
