"""One compiled graph for all units of a kind: ``torch.compile`` of a unit's own forward, inside of the engine's hooks.

    module(...)                 hooks of the engine: gather, free, watch          as they are
      module.forward(...)       an activation mode, if one holds                  as it is; ``select`` is in the graph
        the unit's own forward                                                    compiled, as one graph

A kind is a class with the same shapes, dtypes and flags of parameters: the blocks of a model share one graph, so that a
model of many is compiled as fast as one of few. Parameters are inputs of the graph, so that it does not matter whose
they are, nor that their memory comes and goes. Each kind has a code object of its own: PyTorch keeps what it compiled,
and the sizes that it has seen change, by that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from itertools import chain
from logging import getLogger
from os import environ
from pathlib import Path
from shutil import which
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardfold.activations.recompute import holds_something, is_cache, selective
from shardfold.errors import ConfigError, did_you_mean, nearest
from shardfold.plan.checks import described
from shardfold.torch_internals import SELECTS, graph_errors

__all__ = ["UnitGraphs"]

LOG = getLogger("shardfold")

BLOCKS = "blocks"
PACKAGE = Path(__file__).parents[1]


class UnitKind:
    """Units that share a graph.

    Args:
        name: for people, and of the code.
        run: a forward, of the module and its arguments.
        backend: of ``torch.compile``.

    Attributes:
        modules: of this kind.
        pieces: why it is not one graph; empty: it is.
    """

    def __init__(self, name: str, run: Callable[..., Any], backend: str) -> None:
        self.name, self.pieces = name, ""
        self.modules: dict[int, nn.Module] = {}
        made: Any = run
        own = FunctionType(made.__code__.replace(co_name=name), made.__globals__, name, None, made.__closure__)
        self._compile = partial(torch.compile, own, backend=backend)
        self._compiled = self._compile(fullgraph=True)

    def add(self, module: nn.Module) -> None:
        """It is of this kind."""
        self.modules[id(module)] = module

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.pieces:
            return self._compiled(module, *args, **kwargs)
        try:
            return self._compiled(module, *args, **kwargs)
        except graph_errors() as error:  # as it compiles, so that nothing has run
            said = str(error)
        self._compiled = self._compile()
        self.pieces = _told(said)
        LOG.warning(
            "Runtime(compile='blocks'): %s is no one graph and is compiled in pieces: %s", self.name, self.pieces
        )
        return self._compiled(module, *args, **kwargs)


class UnitGraphs:
    """The kinds of a model's units, for as long as an engine lives.

    Args:
        backend: of ``torch.compile``.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._kinds: dict[Any, UnitKind] = {}

    @classmethod
    def named(cls, given: Any, device: torch.device) -> UnitGraphs | None:
        """What ``Runtime(compile=given)`` asks for on ``device``; None: nothing.

        Raises:
            ConfigError: it is unknown, or nothing there can compile.
        """
        if given is None:
            return None
        if not isinstance(given, str):
            raise ConfigError(f"Runtime(compile=...) is {described(given)}: it is 'blocks', 'blocks:BACKEND', or None.")
        what, _, backend = given.partition(":")
        if what != BLOCKS:
            near = nearest(what, [BLOCKS])
            raise ConfigError(
                f"Runtime(compile={given!r}) is unknown.{f' Did you mean {near!r}?' if near else ''} It is 'blocks' or "
                "'blocks:BACKEND'; a whole model is compiled by its own compile()."
            )
        backend = backend or "inductor"
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(
                f"Runtime(compile={given!r}): torch.compile has no such backend.{did_you_mean(backend, known)}"
            )
        if backend == "inductor":
            _check_compiler(given, device)
        return cls(backend)

    def regions(self, tops: Sequence[nn.Module]) -> list[nn.Module]:
        """The largest modules in ``tops``, they included, that have none of the others inside and do more than one
        layer of PyTorch's."""
        borders = {id(top) for top in tops}
        found = chain.from_iterable(_regions(top, borders) for top in tops)
        return list({id(module): module for module in found}.values())

    def forward(
        self, module: nn.Module, own: Callable[..., Any], kept: frozenset[Any] | None = None
    ) -> Callable[..., Any]:
        """``own``, the module's forward, as it is compiled for its kind. In training it leaves a cache of keys empty;
        with one that is to be filled or read it runs as it is.

        Args:
            module: a region.
            own: its forward.
            kept: operations whose results are not made again in backward, as all others are; None: none is.
        """
        shared = getattr(own, "__func__", None) if getattr(own, "__self__", None) is module else None
        tensors = chain(module.named_parameters(), module.named_buffers())
        shapes = tuple((name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors)
        # PyTorch looks whose an object is that stands in place of a forward, as in blocks that ranks share.
        alone = id(module) if any("forward" in vars(part) for part in module.modules()) else None
        key = (type(module), shared or own, shapes, kept, alone)
        if key not in self._kinds:
            name = f"{type(module).__name__}_{len(self._kinds)}"
            self._kinds[key] = UnitKind(name, _runs(shared, own, kept), self._backend)
        kind = self._kinds[key]
        kind.add(module)

        @wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(map(is_cache, (*args, *kwargs.values()))):
                if not torch.is_grad_enabled() or any(map(holds_something, (*args, *kwargs.values()))):
                    return own(*args, **kwargs)  # it grows with each token, and each block has a place of its own in it
                args = tuple(None if is_cache(value) else value for value in args)
                kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
            return kind(module, *args, **kwargs)

        return run

    def begin(self) -> None:
        """Forwards are about to be put in place anew."""
        for kind in self._kinds.values():
            kind.modules.clear()

    def explained(self) -> list[str]:
        """What is compiled, in lines of text."""
        kinds = [kind for kind in self._kinds.values() if kind.modules]
        if not kinds:
            return []
        lines = [f"compiled by {self._backend}, each kind as one graph:"]
        for kind in kinds:
            lines.append(f"  {kind.name:<28}  x {len(kind.modules)}{f', in pieces: {kind.pieces}' * bool(kind.pieces)}")
        return lines


def _runs(
    shared: Callable[..., Any] | None, own: Callable[..., Any], kept: frozenset[Any] | None
) -> Callable[..., Any]:
    """The forward of a kind, as a function of the module: the class's, or where a module has one of its own, that."""
    forward: Callable[..., Any] = shared or (lambda module, *args, **kwargs: own(*args, **kwargs))
    contexts: Any = partial(selective, kept or frozenset())

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    def again(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = partial(forward, module)
        return checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **SELECTS, **kwargs)

    return run if kept is None else again


def _regions(module: nn.Module, borders: set[int]) -> Iterator[nn.Module]:
    if _is_apart(module):
        return
    inner = any(id(each) in borders or _is_apart(each) for each in module.modules() if each is not module)
    if not inner and _works(module):
        yield module
        return
    for child in module.children():
        if id(child) not in borders:
            yield from _regions(child, borders)


def _works(module: nn.Module) -> bool:
    """Whether it has a forward of its own, and more to do in it than one layer of PyTorch's."""
    kind = type(module)
    single = kind.__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return not single and (kind.forward is not nn.Module.forward or "forward" in vars(module))


def _is_apart(module: nn.Module) -> bool:
    """Whether ranks share its work by a forward that the package has put in place of its own, and that no graph can
    hold."""
    forward = vars(module).get("forward")
    own = str(getattr(getattr(forward, "func", forward), "__module__", "")).startswith("shardfold.")
    return own and not getattr(forward, "in_graphs", False)


def _told(said: str) -> str:
    """The first line of what PyTorch says, and where in the user's code."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ") and __file__ not in line]
    own = [line for line in places if line.startswith(f'File "{PACKAGE}')]
    why = "it calls a function of Shardfold's that no graph holds" if own else next(iter(lines), "it does not say why")
    theirs = [line for line in places if line not in own]
    return why + (f" ({theirs[-1]})" if theirs else "")


def _check_compiler(given: str, device: torch.device) -> None:
    """
    Raises:
        ConfigError: inductor has nothing to compile with.
    """
    if device.type != "cpu":
        if find_spec("triton") is None:
            raise ConfigError(
                f"Runtime(compile={given!r}): inductor needs Triton on {device.type}, which is not installed: pip "
                "install triton, or leave compile out."
            )
        return
    compiler = environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if which(compiler) is None:
        raise ConfigError(
            f"Runtime(compile={given!r}): inductor needs a C++ compiler on the CPU and finds no {compiler!r}: install "
            "one, such as g++ (CXX names another), or leave compile out."
        )
