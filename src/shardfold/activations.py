"""WHERE what autograd saves for backward is meanwhile: kept, made again, or resting in host memory or on disk.

    keep        on the device, as in plain PyTorch
    recompute   a unit's inputs are kept; its forward runs again in backward (arXiv 1604.06174)
    select      the same, but products of matrices, convolutions and attention are kept: what is cheap is made again
    host        copies in (pinned) host memory, which come back one unit ahead of backward
    disk        copies in a file, written and read by a thread

A mode holds for a unit, or for a module that a rule of its own names. It takes the place of the module's ``forward``,
so that hooks run once, outside of it; in backward the engine has gathered the unit by the time its forward runs again,
so recomputation gathers nothing. Values are those without it, to the bit: random numbers, autocast and buffers are as
they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardfold.copies import replace_forward, restore_forward
from shardfold.errors import ModelError
from shardfold.hooks import inside_checkpoint, tensors_in
from shardfold.layout import MODES, Activations, Layout
from shardfold.report import SavedReport, SavedRow
from shardfold.rules import EVERYTHING, Patterns, pairs, text_of
from shardfold.saved import Counter, Movers, counted, held
from shardfold.unit import Unit

__all__ = ["MODES", "Activations", "Place", "Replacements", "in_table"]

RECOMPUTED = ("recompute", "select")
MOVED = ("host", "disk")

SMALL = 64 * 1024
"""Bytes of the largest buffer that a forward may change, such as running statistics, and be recomputed as it was."""

_ATEN = torch.ops.aten
KEPT: frozenset[Any] = frozenset(
    getattr(_ATEN, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_int_mm",
        "_scaled_mm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
    if hasattr(_ATEN, name)
)
"""Operations whose results ``select`` keeps."""


@dataclass(eq=False)
class Place:
    """A module whose forward is replaced.

    Attributes:
        path: of the module in the model.
        unit: that it is, or is a part of.
        inner: it and the modules in it.
        left: it last ran inside of a checkpoint of the model's own, to which it is left.
    """

    path: str
    module: nn.Module
    unit: Unit
    given: Activations
    inner: list[nn.Module] = field(default_factory=list[nn.Module])
    left: bool = False

    def __post_init__(self) -> None:
        self.inner = list(self.module.modules())

    @property
    def leaves(self) -> bool:
        """Whether the model recomputes this, or parts of it, itself (``gradient_checkpointing`` of transformers)."""
        return any(vars(module).get("gradient_checkpointing") for module in self.inner)


def in_table(layout: Layout, given: Any) -> tuple[Layout, Any]:
    """The table of an engine whose argument is ``given``, and the rules that hold: those, or else the table's cell.

    Raises:
        ConfigError: the rules are none, or a mode is unknown.
    """
    if given is None:
        return layout, layout.activations
    rules = pairs(given, "activations", (str, Activations), "mode")
    rest = next((value for pattern, value in rules if pattern == EVERYTHING), layout.activations)
    return layout.replace(activations=rest), given


class Replacements:
    """The places of a model, for as long as an engine lives.

    Args:
        model: whose modules are meant.
        given: the engine's argument: a mode, an :class:`Activations`, or ordered rules of these.
        device: that trains.

    Raises:
        ConfigError: the rules are none, or a mode is unknown.
        ModelError: a rule matches no module.
    """

    def __init__(self, model: nn.Module, given: Any, device: torch.device) -> None:
        rules = pairs(given, "activations", (str, Activations), "mode")
        self._model = model
        self._values = [Activations.named(value) for _, value in rules]
        self._patterns = Patterns([pattern for pattern, _ in rules], "activations")
        self._patterns.check(model)
        self.places: list[Place] = []
        self._movers = Movers(model, device)
        self._units: Sequence[Unit] = ()

    def attach(self, units: Sequence[Unit], needs: Callable[[Unit], None]) -> None:
        """Puts forwards in place of those of these units, and takes away what was there.

        Args:
            units: of the model.
            needs: called with a unit whose forward is about to run again.

        Raises:
            ModelError: parts of what is recomputed have a mode of their own, or nothing has the mode that is asked for.
        """
        self.remove()
        self.places = list(self._find(units))
        if not self.places and any(value.mode != "keep" for value in self._values):
            asked = next(value.mode for value in self._values if value.mode != "keep")
            raise ModelError(
                f"activations={asked!r} applies to no unit of this model, in which nothing but single layers was "
                "found: name its blocks with units=, or leave it out."
            )
        self._units = units
        self._movers.follow([storage for unit in units for storage in unit.storages()])
        for place in self.places:
            own = place.module.forward
            moved = place.given.mode in MOVED
            replaced = _moving(place, own, self._movers) if moved else _recomputing(place, own, needs, self._movers)
            replace_forward(place.module, replaced)

    def remove(self) -> None:
        """Gives every module its own forward."""
        for place in self.places:
            restore_forward(place.module)
        self.places = []

    def close(self) -> None:
        """Ends threads and gives back files."""
        self._movers.close()

    def counted(self) -> AbstractContextManager[SavedReport]:
        """See :meth:`Engine.activations`."""
        return counted(self._model, self._units, self.described(), self._movers)

    def held(self) -> tuple[SavedRow, ...]:
        """See :attr:`MemoryReport.activations`."""
        return held(self._units, self.described(), self._movers)

    def described(self) -> dict[str, str]:
        """What happens in each unit, by its name, where that is not ``keep``."""
        said: dict[str, list[str]] = {}
        for place in self.places:
            mode = place.given.mode
            if place.left or (mode in RECOMPUTED and place.leaves):
                mode = "left to the model's own checkpointing"
            whole = any(place.module is module for module in place.unit.modules)
            said.setdefault(place.unit.name, []).append(mode if whole else f"{place.path}: {mode}")
        return {name: ", ".join(modes) for name, modes in said.items()}

    def _find(self, units: Sequence[Unit]) -> Iterator[Place]:
        rule = self._patterns.assign(self._model)
        unit_of: dict[int, Unit] = {}
        for unit in sorted(units, key=lambda unit: not unit.spec.root):  # the root's are those that no other has
            for module in unit.modules:
                unit_of.update({id(inner): unit for inner in module.modules()})
        tops = {id(module) for unit in units if not unit.spec.root for module in unit.modules}
        around: set[str] = {""}  # paths of what contains units
        modules = dict(self._model.named_modules())
        for path, module in modules.items():
            if id(module) in tops:
                around.update(path[:i] for i, letter in enumerate(path) if letter == ".")
        found: dict[str, Place] = {}
        for path, module in modules.items():
            outer = path.rpartition(".")[0]
            number = rule[id(module)]
            if path in around or (id(module) not in tops and number == rule[id(modules[outer])]):
                continue
            value, enclosing = self._values[number], _enclosing(found, path)
            if enclosing is not None and enclosing.given.mode in RECOMPUTED:
                raise ModelError(
                    f"activations= has {value.mode!r} for {path!r} by its rule for "
                    f"{text_of(self._patterns.patterns[number])}, and {enclosing.given.mode!r} for {enclosing.path!r}, "
                    "which contains it and is made again as a whole: leave one of them out."
                )
            if value.mode == "keep" or id(module) not in unit_of:
                continue
            if value.mode in RECOMPUTED and isinstance(module, (nn.Embedding, nn.Linear)):
                continue  # what it saves is its input
            found[path] = Place(path, module, unit_of[id(module)], value)
        yield from found.values()


def _enclosing(places: dict[str, Place], path: str) -> Place | None:
    while path:
        path = path.rpartition(".")[0]
        if path in places:
            return places[path]
    return None


def _moving(place: Place, forward: Callable[..., Any], movers: Movers) -> Callable[..., Any]:
    given = place.given

    @partial(torch.compiler.disable, recursive=False)  # what it calls is compiled, under the hooks of its frame
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        begun = movers.begin(place.unit.name, given.mode, given.folder, given.smallest, (args, kwargs))
        place.left = begun is None
        if begun is None:
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            movers.end(begun, place.unit.name)

    return run


# -- recomputation


def _recomputing(
    place: Place, forward: Callable[..., Any], needs: Callable[[Unit], None], movers: Movers
) -> Callable[..., Any]:
    kept = KEPT | set(place.given.kept) if place.given.mode == "select" else frozenset[Any]()
    contexts: dict[str, Any] = {"context_fn": partial(_selective, kept)} if kept else {}
    statistics = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in place.inner)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # torch.compile recomputes in the graph
            return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
        place.left = inside_checkpoint()
        if place.left or place.leaves or any(_holds_something(value) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        again = _Again(place, forward, needs, (args, kwargs))
        counter = movers.counter if kept else None
        with _Counting(kept, counter, place.unit.name, again.counted) if counter is not None else nullcontext():
            return checkpoint(again, *again.leaves, use_reentrant=False, **contexts)

    # A graph of torch.compile would count a batch in running statistics once more as it recomputes.
    return torch.compiler.disable(run) if statistics else run


def _selective(kept: frozenset[Any]) -> Any:
    """What a checkpoint runs forward and its recomputation under, so that results of ``kept`` are not made again."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Counting(TorchDispatchMode):
    """Inside, results of ``kept`` are counted for a unit, as held while ``counted`` is."""

    def __init__(self, kept: frozenset[Any], counter: Counter, unit: str, counted: list[Any]) -> None:
        super().__init__()
        self._kept, self._counter, self._unit, self._counted = kept, counter, unit, counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._kept:
            self._counted += [self._counter.count(self._unit, tensor) for tensor in tensors_in(out)]
        return out


class _Again:
    """One forward, which runs now and once more in each backward.

    Attributes:
        leaves: the arguments, flat: a checkpoint looks for tensors, and so for the devices whose random numbers it
            keeps, among positional arguments only.
        counted: what is counted of results that are not made again.
    """

    def __init__(
        self, place: Place, forward: Callable[..., Any], needs: Callable[[Unit], None], call: tuple[Any, Any]
    ) -> None:
        self._place, self._forward, self._needs = place, forward, needs
        self.leaves, self._shape = tree_flatten(call)
        self.counted: list[Any] = []
        self._before: list[_Buffer] | None = None  # until it has run

    def __call__(self, *leaves: Any) -> Any:
        # Each run fills an empty cache of its own, as running twice would fill one twice.
        args, kwargs = tree_unflatten([deepcopy(leaf) if _is_cache(leaf) else leaf for leaf in leaves], self._shape)
        if self._before is None:
            buffers = list(_small_buffers(self._place.inner))
            try:
                return self._forward(*args, **kwargs)
            finally:
                self._before = [buffer for buffer in buffers if buffer.changed()]
        self._needs(self._place.unit)
        with _as_they_were(self._before):
            return self._forward(*args, **kwargs)


class _Buffer(NamedTuple):
    """A buffer and its value before a forward."""

    owner: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    version: int
    value: Tensor
    statistics: bool  # of a normalization, which PyTorch changes without a word

    def changed(self) -> bool:
        found = self.owner.get(self.name)
        return self.statistics or found is not self.buffer or self.buffer._version != self.version


def _small_buffers(modules: Sequence[nn.Module]) -> Iterator[_Buffer]:
    for module in modules:
        statistics = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.nbytes <= SMALL:
                value = buffer.detach().clone()
                yield _Buffer(module._buffers, name, buffer, buffer._version, value, statistics)


@contextmanager
def _as_they_were(buffers: Sequence[_Buffer]) -> Iterator[None]:
    """Inside, buffers have their values from before, and changes of them are lost: they were made once already."""
    now = [buffer.owner.get(buffer.name) for buffer in buffers]
    for buffer in buffers:
        buffer.owner[buffer.name] = buffer.value.clone()
    try:
        yield
    finally:
        for buffer, value in zip(buffers, now, strict=True):
            buffer.owner[buffer.name] = value


def _holds_something(value: Any) -> bool:
    """Whether it is a cache of keys and values (transformers') from before, which forward has to see and to fill."""
    return _is_cache(value) and bool(int(value.get_seq_length()))


def _is_cache(value: Any) -> bool:
    return not isinstance(value, (Tensor, nn.Module)) and callable(getattr(value, "get_seq_length", None))
