"""What lets a command begin sooner: garbage is not looked for meanwhile, and what only trainings use stays away."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["QuickStart"]

MASKS = "_trace_wrapped_higher_order_op"
"""Module of the compiler, of which transformers has a class in its masks."""
RULES = "torch._meta_registrations"
"""Module of PyTorch: what operations without memory give that are no part of its library, a quarter of its import."""
NEEDS_RULES = (
    *("torch._dynamo", "torch._inductor", "torch._prims", "torch._refs", "torch._decomp"),
    "torch.utils._content_store",
)
"""Modules of PyTorch that are in a circle with these: the rules have to be imported first."""
UNUSED = ("is_accelerate_available", "is_vision_available", "is_scipy_available", "is_torch_distributed_available")
"""Questions of transformers, whose answer decides what it imports besides."""


class QuickStart:
    """How a process of the command line begins, which has no code but ours and that of packages.

    Attributes:
        alone: there is such a process; else tools are called in somebody's own.
        only_answers: it trains and compiles nothing.
    """

    alone = only_answers = _incomplete = False

    @classmethod
    @contextmanager
    def uncollected(cls) -> Iterator[None]:
        """Inside, no garbage is collected. What is there at its end, modules above all, is not looked through later in
        a process that is ours alone: in another there may be somebody's garbage."""
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if cls.alone:
                gc.freeze()
            if collects:
                gc.enable()

    @classmethod
    def import_torch(cls) -> None:
        """Import PyTorch, in a process that only answers without the rules of its operations on tensors that have no
        memory: a model that is made without it needs those of no more than a few, which the library has."""
        if not cls.only_answers or "torch" in sys.modules:
            return
        sys.modules[RULES] = ModuleType(RULES)
        try:
            torch = importlib.import_module("torch")
        finally:
            del sys.modules[RULES]
        vars(torch).pop(RULES.partition(".")[2], None)
        cls._incomplete = True
        sys.meta_path.insert(0, _Completing())

    @classmethod
    def complete_torch(cls) -> bool:
        """Import what :meth:`import_torch` left out; whether it has left anything out."""
        incomplete, cls._incomplete = cls._incomplete, False
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Completing)]
        if incomplete:
            importlib.import_module(RULES)
        return incomplete

    @classmethod
    def import_models(cls) -> None:
        """Import what all models of transformers stand on.

        It marks functions for torch.compile as it is imported, and has base classes for trainings over its own meshes:
        the compiler, sympy, accelerate and scipy take longer to import than all the rest. A process that only answers
        has none of that. And what it has found in the files of all its models is not looked for a second time.
        """
        from shardfold.torch_internals import COMPILER

        if not cls.only_answers or COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
            return
        utils: Any = importlib.import_module("transformers.utils")
        for module in (utils, utils.import_utils):
            for name in UNUSED:
                setattr(module, name, _never)
        names = (COMPILER, f"{COMPILER}.{MASKS}")
        marks, masks = map(ModuleType, names)
        marks.__dict__.update(__path__=[], __getattr__=_mark_nothing)
        masks.__dict__["__getattr__"] = partial(_later, names[1])
        sys.modules.update(zip(names, (marks, masks), strict=True))
        found: Any = sys.modules["transformers"]
        look = utils.import_utils.define_import_structure
        utils.import_utils.define_import_structure = partial(_found, found, look)
        try:
            importlib.import_module("transformers.models")
            importlib.import_module("transformers.masking_utils")
            importlib.import_module("transformers.modeling_utils")
        except ImportError:  # of a version that asks for more: it is imported whole
            pass
        finally:
            utils.import_utils.define_import_structure = look
            for name in names:
                del sys.modules[name]


class _Completing(MetaPathFinder, Loader):
    """Before one of :data:`NEEDS_RULES` is imported PyTorch has all that it has else."""

    _own: ModuleSpec | None = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in NEEDS_RULES:
            return None
        QuickStart.complete_torch()
        made = sys.modules.get(fullname)
        if made is None:
            return None
        self._own = made.__spec__  # the rules imported it: it must not be made a second time
        made.__spec__ = ModuleSpec(fullname, self)  # the import system takes that of what is there already
        return made.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


def _found(package: Any, look: Callable[..., Any], path: str, prefix: str | None = None) -> Any:
    """Which names the files of models have, as the whole package has found it; ``look`` reads them all again."""
    structure = getattr(package, "_import_structure", None)
    if prefix is not None or not isinstance(structure, dict) or not path.endswith("models/__init__.py"):
        return look(path, prefix)
    models = {name[len("models.") :]: set(of) for name, of in structure.items() if name.startswith("models.")}
    missing = {name.split(".", 1)[1] for name in package._object_missing_backend if name.startswith("models.")}
    return {frozenset(): {name: of for name, of in models.items() if name not in missing}}


def _never(*_args: Any, **_kwargs: Any) -> bool:
    return False


def _mark_nothing(name: str) -> Callable[..., Any]:
    """In place of a decorator of the compiler's."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda function=None, *_, **__: function if function is not None else lambda given: given


def _later(module: str, name: str) -> Callable[..., Any]:
    """In place of a class of the compiler's, which is imported once one is made."""
    if name.startswith("__"):
        raise AttributeError(name)

    def made(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return made
