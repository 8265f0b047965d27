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
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardfold import accelerator
from shardfold.activations.recompute import holds_something, is_cache, selective
from shardfold.errors import ConfigError, did_you_mean, nearest
from shardfold.plan.checks import described
from shardfold.sharding.pickling import replace_forward, restore_forward
from shardfold.torch_internals import SELECTS, callback_handler, graph_errors

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
        graphs: that were made of it.
    """

    def __init__(self, name: str, run: Callable[..., Any], backend: str) -> None:
        self.name, self.pieces, self.graphs, self._running = name, "", 0, False
        self.modules: dict[int, nn.Module] = {}
        made: Any = run
        own = FunctionType(made.__code__.replace(co_name=name), made.__globals__, name, None, made.__closure__)
        self._compile = partial(torch.compile, own, backend=backend)
        self._compiled = self._compile(fullgraph=True)

    def add(self, module: nn.Module) -> None:
        """It is of this kind."""
        self.modules[id(module)] = module

    def count(self) -> None:
        """A graph was made; if this kind was called meanwhile, of it."""
        self.graphs += self._running

    def __call__(self, receiver: Any, *args: Any, **kwargs: Any) -> Any:
        self._running = True
        try:
            return self._call(receiver, *args, **kwargs)
        finally:
            self._running = False

    def _call(self, receiver: Any, *args: Any, **kwargs: Any) -> Any:
        if self.pieces:
            return self._compiled(receiver, *args, **kwargs)
        try:
            return self._compiled(receiver, *args, **kwargs)
        except graph_errors() as error:  # as it compiles, so that nothing has run
            said = str(error)
        self._compiled, self.graphs = self._compile(), 0
        self.pieces = _told(said)
        LOG.warning(
            "Runtime(compile='blocks'): %s is no one graph and is compiled in pieces: %s", self.name, self.pieces
        )
        return self._compiled(receiver, *args, **kwargs)


class UnitGraphs:
    """The kinds of a model's units, for as long as an engine lives.

    Args:
        backend: of ``torch.compile``.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._kinds: dict[Any, UnitKind] = {}
        self._watch: Callable[[], None] | None = None  # of what PyTorch compiles, while forwards are in place
        self._began = self._seconds = 0.0
        self._told = 0  # graphs that the log has
        self._methods: list[tuple[nn.Module, Any]] = []  # parts of regions, and what stands in place of objects there

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
        receiver, shared = _called(module, own)
        tensors = chain(module.named_parameters(), module.named_buffers())
        shapes = tuple((name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors)
        parts = [
            (path, part) for path, part in module.named_modules() if part is not module and "forward" in vars(part)
        ]
        keys = tuple((path, _graph_key(vars(part)["forward"])) for path, part in parts)
        for _, part in parts:
            self._replace_object(part)
        key = (type(module), _graph_key(own) if shared is None or receiver is own else shared, shapes, kept, keys)
        if key not in self._kinds:
            name = f"{type(module).__name__}_{len(self._kinds)}"
            self._kinds[key] = UnitKind(name, _runs(shared, own, kept), self._backend)
        kind = self._kinds[key]
        kind.add(module)
        self._watch = self._watch or _watch_compiling(self._begin_compiling, self._end_compiling)

        @wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(map(is_cache, (*args, *kwargs.values()))):
                if not torch.is_grad_enabled() or any(map(holds_something, (*args, *kwargs.values()))):
                    return own(*args, **kwargs)  # it grows with each token, and each block has a place of its own in it
                args = tuple(None if is_cache(value) else value for value in args)
                kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
            return kind(receiver, *args, **kwargs)

        return run

    def _replace_object(self, part: nn.Module) -> None:
        """Of an object that stands in place of a forward PyTorch looks whose it is, of a method which code it runs: an
        object of the package's is called by its method, so that units share a graph."""
        forward: Any = vars(part)["forward"]
        if _is_object(forward):
            method = MethodType(type(forward).__call__, forward)
            replace_forward(part, method)
            self._methods.append((part, method))

    def begin(self) -> None:
        """Forwards are about to be put in place anew, or taken away."""
        for kind in self._kinds.values():
            kind.modules.clear()
        for part, method in self._methods:
            restore_forward(part, method)
        self._methods.clear()
        if self._watch is not None:
            self._watch()
        self._watch = None

    def _begin_compiling(self) -> None:
        self._began = perf_counter()

    def _end_compiling(self, forward: bool) -> None:
        self._seconds += perf_counter() - self._began
        for kind in self._kinds.values() if forward else ():
            kind.count()

    def end_backward(self) -> None:
        """The log says what was compiled since it last did."""
        made = sum(kind.graphs for kind in self._kinds.values())
        if made == self._told:
            return
        self._told = made
        said = [f"{kind.name} x {len(kind.modules)}: {_graphs(kind.graphs)}" for kind in self._present()]
        LOG.info("compiled by %s in %.1f s: %s", self._backend, self._seconds, ", ".join(said))

    def _present(self) -> list[UnitKind]:
        return [kind for kind in self._kinds.values() if kind.modules]

    def explained(self) -> list[str]:
        """What is compiled, in lines of text."""
        kinds = self._present()
        if not kinds:
            return []
        lines = [f"compiled by {self._backend}, each kind as one graph:"]
        for kind in kinds:
            lines.append(f"  {kind.name:<28}  x {len(kind.modules)}{f', in pieces: {kind.pieces}' * bool(kind.pieces)}")
        return lines


def _watch_compiling(begin: Callable[[], None], end: Callable[[bool], None]) -> Callable[[], None]:
    """``begin`` is called as ``torch.compile`` begins to compile, ``end`` as it ends, with whether that was of a
    forward, and not of a backward that was put off. Returns what ends that."""
    handler = callback_handler()
    if handler is None:
        return lambda: None

    def began(_: Any) -> None:
        begin()

    def ended(args: Any) -> None:
        end(args.callback_trigger.name == "DYNAMO")

    handler.register_start_callback(began)
    handler.register_end_callback(ended)

    def stop() -> None:
        for found, each in ((handler.start_callbacks, began), (handler.end_callbacks, ended)):
            if each in found:  # torch._dynamo.reset() takes all away
                found.remove(each)

    return stop


def _graphs(number: int) -> str:
    return "1 graph" if number == 1 else f"{number} graphs"


def _runs(
    shared: Callable[..., Any] | None, own: Callable[..., Any], kept: frozenset[Any] | None
) -> Callable[..., Any]:
    """The forward of a kind, as a function of who receives the call (see :func:`_called`)."""
    forward: Callable[..., Any] = shared or (lambda receiver, *args, **kwargs: own(*args, **kwargs))
    contexts: Any = partial(selective, kept or frozenset())

    def run(receiver: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(receiver, *args, **kwargs)

    def again(receiver: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(forward, receiver)
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


def _called(module: nn.Module, own: Any) -> tuple[Any, Callable[..., Any] | None]:
    """Who receives a call of ``own``, the forward of a module, and the function that runs: the module and its class's,
    or an object of the package's and that of its class; None: it is a function of its own."""
    if getattr(own, "__self__", None) is module:
        return module, own.__func__
    return (own, type(own).__call__) if _is_object(own) else (module, None)


def _is_object(forward: Any) -> bool:
    """Whether it is an object of the package's that a graph can hold."""
    return _shares(forward) and not isinstance(forward, (FunctionType, MethodType))


def _shares(forward: Any) -> bool:
    """Whether the package put it in place of a forward, and a graph can hold it."""
    return getattr(forward, "in_graphs", False)


def _graph_key(forward: Any) -> Any:
    """What is the same of forwards that stand in place of modules' own and can share a graph: what the package says of
    its own ones; of others nothing is known, so that each is alone."""
    key = getattr(forward, "graph_key", None) if _shares(forward) else None
    return id(forward) if key is None else key


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
    if not accelerator.compiles(device):
        raise ConfigError(
            f"Runtime(compile={given!r}): inductor makes no kernels for {device.type}: take another backend, as "
            "'blocks:aot_eager', or leave compile out."
        )
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
