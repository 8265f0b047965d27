"""Forwards that run again in backward: as they ran first to the bit, in random numbers, autocast, buffers, caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardfold.activations.partitioned_inputs import SliceBuffer, Sliced, Slicer
from shardfold.activations.replaced import ReplacedForward
from shardfold.activations.saved_tensors import Movers
from shardfold.activations.selective import Selection
from shardfold.errors import UsageError
from shardfold.sharding.autograd import inside_checkpoint
from shardfold.sharding.freed import FreedParameter
from shardfold.sharding.unit import Unit
from shardfold.torch_internals import SELECTS, NormBase, tree_flatten, tree_unflatten, version_of

__all__ = ["KEPT", "holds_something", "is_cache", "recomputing", "selective", "without_filling"]

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


def recomputing(
    place: ReplacedForward,
    forward: Callable[..., Any],
    needs: Callable[[Unit], None],
    movers: Movers,
    *,
    whole: bool,
    slicer: Slicer | None = None,
    room: SliceBuffer | None = None,
    graph: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """``whole``: torch.compile does not look into it. ``slicer``: cuts what is kept of inputs, None: it is kept whole.
    ``room``: where slices lie, None: each for itself. ``graph``: does the same as one compiled graph."""
    given = place.current
    kept = KEPT | set(place.current.kept) if place.current.mode == "select" else frozenset[Any]()
    compiled: dict[str, Any] = {"context_fn": partial(selective, kept), **SELECTS} if kept else {}
    statistics = any(isinstance(module, NormBase) for module in place.inner)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # torch.compile recomputes in the graph
            return checkpoint(forward, *args, use_reentrant=False, **compiled, **kwargs)
        left = place.leave(inside_checkpoint()) or place.leaves
        if left or any(holds_something(value) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        if graph is not None:
            return graph(*args, **kwargs)
        again = _RecomputedForward(place, forward, needs, (args, kwargs))
        if slicer is not None:
            again.cut(slicer, room)
        contexts: dict[str, Any] = {}
        if kept:
            count = partial(movers.counter.count, place.unit.name) if movers.counter is not None else None
            again.selection = Selection(kept, count)
            contexts = {"context_fn": again.selection.contexts, **SELECTS}
        before = _weights(place.inner)
        away = None
        if given.inputs != "device":  # what a checkpoint saves before its function runs: the inputs
            away = movers.begin(place.unit.name, given.inputs, given.folder, given.smallest, again.leaves)
        try:
            result = checkpoint(again, *again.leaves, use_reentrant=False, **contexts)
        finally:
            again.leaves = []
            if away is not None:
                movers.end(away, place.unit.name)
        _refuse_written(place, before, _weights(place.inner))
        return result

    # A graph of torch.compile would count a batch in running statistics once more as it recomputes.
    apart = bool(slicer) or given.inputs != "device"  # nor would it slice, or move, what it keeps
    return torch.compiler.disable(run) if statistics or whole or apart else run


def selective(kept: frozenset[Any]) -> Any:
    """What torch.compile takes for its graphs, in which nothing is changed in place: results of ``kept`` are not made
    again."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _weights(modules: Sequence[nn.Module]) -> dict[int, tuple[str, int, int]]:
    """Of each parameter that is there: its name, its version and where it lies."""
    return {
        id(p): (name, p._version, p.data_ptr())
        for module in modules
        for name, p in module._parameters.items()
        if p is not None and type(p) is not FreedParameter
    }


def _refuse_written(
    place: ReplacedForward, before: dict[int, tuple[str, int, int]], after: dict[int, tuple[str, int, int]]
) -> None:
    """
    Raises:
        UsageError: a forward that is to run again wrote into its weights, and would write once more in backward.
    """
    for key, (name, *was) in before.items():
        if key in after and list(after[key][1:]) != was:
            raise UsageError(
                f"{place.path or 'the model'!r} writes into its weight {name!r} in forward, and activations="
                f"{place.given.mode!r} would run that again in backward: give it another mode, for example "
                f"activations={{{place.path!r}: 'keep', '*': {place.given.mode!r}}}."
            )


class _RecomputedForward:
    """One forward, which runs now and once more in each backward.

    Attributes:
        leaves: the arguments, flat, or what is kept of them: a checkpoint looks for tensors, and so for the devices
            whose random numbers it keeps, among positional arguments only. Gone once it has run, as the checkpoint has
            them and may have moved them.
        selection: results that are not made again.
    """

    def __init__(
        self, place: ReplacedForward, forward: Callable[..., Any], needs: Callable[[Unit], None], call: tuple[Any, Any]
    ) -> None:
        self._place, self._forward, self._needs = place, forward, needs
        self.leaves, self._shape = tree_flatten(call)
        self.selection: Selection | None = None
        self._before: list[_Buffer] | None = None  # until it runs
        self._ran = False
        self._originals: list[Any] = []  # of what is sliced, until it has run
        self._sliced: Sliced | None = None

    def cut(self, slicer: Slicer, room: SliceBuffer | None) -> None:
        """What is kept of the arguments is this rank's slices; the first run has the originals."""
        place = self._place
        who = repr(place.path) if place.path else "the model"
        self._originals = self.leaves
        self.leaves, self._sliced = slicer.cut(
            self.leaves, place.current.smallest, who, compare=not place.compared, room=room
        )
        place.end_comparison()

    def __call__(self, *leaves: Any) -> Any:
        first = self._before is None  # not so what a backward inside of the first run asks for
        if self._ran:
            self._needs(self._place.unit)
        if self._sliced is not None:
            leaves = tuple(self._originals if first else self._sliced.whole(leaves))
            self._originals = []
        # Each run fills an empty cache of its own, as running twice would fill one twice.
        args, kwargs = tree_unflatten([_own(leaf) for leaf in leaves], self._shape)
        if self._before is not None:
            with _as_they_were(self._before):
                return self._forward(*args, **kwargs)
        self._before = list(_small_buffers(self._place.inner))
        try:
            result = self._forward(*args, **kwargs)
            if self.selection is not None:
                self.selection.end(result)
            return result
        finally:
            self._before = [buffer for buffer in self._before if buffer.changed()]
            self._ran = True


class _Buffer(NamedTuple):
    """A buffer and its value before a forward."""

    owner: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    version: int | None
    value: Tensor
    statistics: bool  # of a normalization, which PyTorch changes without a word

    def changed(self) -> bool:
        found = self.owner.get(self.name)
        return self.statistics or found is not self.buffer or version_of(self.buffer) != self.version


def _small_buffers(modules: Sequence[nn.Module]) -> Iterator[_Buffer]:
    for module in modules:
        statistics = isinstance(module, NormBase) and module.training
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.nbytes <= SMALL:
                value = buffer.detach().clone()
                yield _Buffer(module._buffers, name, buffer, version_of(buffer), value, statistics)


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


def holds_something(value: Any) -> bool:
    """Whether it is a cache of keys and values (transformers') from before, which forward has to see and to fill."""
    return is_cache(value) and bool(int(value.get_seq_length()))


def _own(value: Any) -> Any:
    """A copy of an empty cache; anything else as it is."""
    return deepcopy(value) if is_cache(value) and not holds_something(value) else value


def without_filling(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that in training fills an empty cache of its own: units that are recomputed leave one empty, and would
    take it for one from before if others filled it."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = tuple(map(_own, args)), {name: _own(value) for name, value in kwargs.items()}
        return forward(*args, **kwargs)

    return run


def is_cache(value: Any) -> bool:
    """Whether it is a cache of keys and values, as models of transformers fill."""
    return not isinstance(value, (Tensor, nn.Module)) and callable(getattr(value, "get_seq_length", None))
