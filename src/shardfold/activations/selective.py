"""Results of a forward that ``select`` keeps, for the runs in backward that make the rest again.

    kept        what operations of a set give in the first run
    made again  of these: what is written into, by way of whatever view of its memory; what the forward returns, as
                nobody here sees what becomes of it; and what has been given back for good

PyTorch's own contexts (``create_selective_checkpoint_contexts``, which torch.compile takes) know a change by the
version of what they keep. Views of ``unsafe_chunk``, as recurrent modules write into, and of ``.data`` count their
changes by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.sharding.autograd import tensors_in
from shardfold.torch_internals import (
    DispatchMode,
    alias,
    in_backward,
    keeps_graph,
    storage_key,
    tree_flatten,
    tree_unflatten,
)

__all__ = ["Selection"]


class _Result(NamedTuple):
    """What one operation gave."""

    leaves: list[Any]
    shape: Any
    versions: list[int]  # of the leaves
    random: tuple[torch.device, Tensor] | None  # the state of random numbers behind it, where it drew some
    counted: list[Any]  # what lives as long as it is held

    @property
    def changed(self) -> bool:
        return self.versions != _versions(self.leaves)


class Selection:
    """Of one forward.

    Args:
        operations: whose results are kept; one that writes into its arguments is made again in any case.
        count: called with each tensor that is kept; it is held as long as the answer.
        random: whether runs have random numbers, and draw the same.

    Attributes:
        over: the first run.
    """

    def __init__(
        self, operations: frozenset[Any], count: Callable[[Tensor], Any] | None = None, *, random: bool = True
    ) -> None:
        self._operations, self._count, self._random = operations, count, random
        self._results: dict[Any, _Result] = {}  # by operation and number
        self._within: dict[int, list[Any]] = {}  # which of them a storage is of, during the first run
        self.over = False

    def contexts(self) -> tuple[Any, Any]:
        """What the first run and each other one happen in."""
        others = _Replayed(self)
        return _First(self, others), others

    def chooses(self, operation: Any) -> bool:
        return operation in self._operations and not _writes(operation)

    def first(self, key: Any, operation: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operation and keeps what it gives."""
        seeded = self._random and torch.Tag.nondeterministic_seeded in operation.tags
        device = next((tensor.device for tensor in tensors_in([args, kwargs])), None) if seeded else None
        before = accelerator.rng_state(device) if device is not None else None
        out = operation(*args, **kwargs)
        random = None
        if device is not None and before is not None:
            behind = accelerator.rng_state(device)
            random = None if torch.equal(before, behind) else (device, behind)
        leaves, shape = tree_flatten(out)
        leaves = [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._results[key] = _Result(leaves, shape, _versions(leaves), random, [])
        for storage in _storages(leaves):
            self._within.setdefault(storage, []).append(key)
        return out

    def written(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """The first run is about to write into some of these arguments."""
        if self._results:
            arguments = operation._schema.arguments
            for argument, value in [
                *zip(arguments, args, strict=False),
                *((argument, kwargs.get(argument.name)) for argument in arguments),
            ]:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._drop(tensors_in(value))

    def end(self, result: Any) -> None:
        """The first run is over and returns ``result``."""
        self._drop(tensors_in(result))
        self._within.clear()
        self.over = True
        if self._count is not None:
            for kept in self._results.values():
                kept.counted.extend(self._count(leaf) for leaf in kept.leaves if isinstance(leaf, Tensor))

    def take(self, key: Any) -> tuple[Any] | None:
        """What was kept of an operation, for a run behind the first; None: it is to be made again."""
        result = self._results.get(key)
        if result is None:
            return None
        if result.changed:
            del self._results[key]
            return None
        if result.random is not None:
            accelerator.set_rng_state(*result.random)
        if self.over and in_backward() and not keeps_graph():
            del self._results[key]
        copy = alias if self.over else torch.clone  # the first run may still write into it
        leaves = [copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in result.leaves]
        return (tree_unflatten(leaves, result.shape),)

    def _drop(self, tensors: Sequence[Tensor]) -> None:
        for storage in _storages(tensors):
            for key in self._within.pop(storage, ()):
                self._results.pop(key, None)


class _SelectMode(DispatchMode):
    supports_higher_order_operators = True

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self._selection = selection

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _First(_SelectMode):
    def __init__(self, selection: Selection, others: _Replayed) -> None:
        super().__init__(selection)
        self._others = others
        self._numbers: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._others.numbers:  # a backward inside of the forward asks for another run in the midst of the first
            return func(*args, **kwargs)
        if _writes(func):
            self._selection.written(func, args, kwargs)
        if not self._selection.chooses(func):
            return func(*args, **kwargs)
        self._numbers[func] += 1
        return self._selection.first((func, self._numbers[func]), func, args, kwargs)


class _Replayed(_SelectMode):
    def __init__(self, selection: Selection) -> None:
        super().__init__(selection)
        self.numbers: list[Counter[Any]] = []  # of each run that is under way

    def __enter__(self) -> Any:
        self.numbers.append(Counter())
        return super().__enter__()

    def __exit__(self, *error: object) -> Any:
        self.numbers.pop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._selection.chooses(func):
            numbers = self.numbers[-1]
            numbers[func] += 1
            found = self._selection.take((func, numbers[func]))
            if found is not None:
                return found[0]
        return func(*args, **(kwargs or {}))


def _writes(operation: Any) -> bool:
    """Not so one that is made of functions, which has no schema."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and schema.is_mutable


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]


def _storages(values: Sequence[Any]) -> set[int]:
    """Of tensors among them that are plain memory."""
    return {
        storage_key(value.untyped_storage())
        for value in values
        if isinstance(value, Tensor) and value.layout is torch.strided
    }
