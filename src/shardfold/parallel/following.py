"""A module in which parts are made and used up, where the model's own code says the sizes of whole tensors.

While its forward runs, calls on parts are compared with those that were traced, and sizes that they say of the whole
are changed to the part's. Calls on whole tensors are not looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfold.errors import UsageError
from shardfold.parallel.model_trace import tensors_in
from shardfold.parallel.numbers import numbers_in, replaced

__all__ = ["Expected", "Following", "follow_calls"]


@dataclass(frozen=True)
class Expected:
    """A call on parts.

    Attributes:
        name: of PyTorch's function.
        changes: of numbers among its arguments: which, what the model says, and what it has to be.
    """

    name: str
    changes: tuple[tuple[int, int, int], ...] = ()


@dataclass(eq=False)
class Following:
    """The forward of such a module.

    Attributes:
        module: whose it is.
        path: of it, for messages.
        calls: that it makes on parts, in order.
    """

    module: nn.Module
    path: str
    calls: tuple[Expected, ...]

    def __post_init__(self) -> None:
        self._at = self._inside = 0
        self._parts: dict[int, weakref.ref[Tensor]] = {}

    def __reduce__(self) -> Any:
        return Following, (self.module, self.path, self.calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = type(self.module).forward
        self._begin()
        try:
            with _Mode(self):
                out = forward(self.module, *args, **kwargs)
            if self._at != len(self.calls):
                raise self._other("nothing more")
        finally:
            self._begin()
        return out

    def _begin(self) -> None:
        self._at = self._inside = 0
        self._parts.clear()

    def enter(self, *_: Any) -> None:
        """The forward of a linear layer or an embedding begins: what it does is its own."""
        self._inside += 1

    def leave(self, *_: Any) -> None:
        """It is over."""
        self._inside = max(self._inside - 1, 0)

    def gives_part(self, module: nn.Module, args: Any, out: Any) -> None:
        """A column gave a part."""
        if isinstance(out, Tensor):
            self._parts[id(out)] = weakref.ref(out)

    @property
    def watches(self) -> bool:
        return self._inside == 0

    def has_part(self, tree: Any) -> bool:
        """Whether parts are among the arguments."""
        for tensor in tensors_in(tree):
            known = self._parts.get(id(tensor))
            if known is not None and known() is tensor:
                return True
        return False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on parts."""
        name, changes = getattr(func, "__name__", ""), ()
        expected = self.calls[self._at] if self._at < len(self.calls) else None
        if expected is not None and expected.name == name and expected.changes:
            numbers = numbers_in((args, kwargs))
            if any(place >= len(numbers) or numbers[place] != said for place, said, _ in expected.changes):
                raise self._other(f"{name} with other sizes")
            changes = expected.changes
        if changes:
            args, kwargs = replaced((args, kwargs), {place: local for place, _, local in changes})
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        if made:
            if expected is None or expected.name != name:
                raise self._other(name)
            self._at += 1
        for tensor in made:
            self._parts[id(tensor)] = weakref.ref(tensor)
        return out

    def _other(self, does: str) -> UsageError:
        was = self.calls[self._at].name if self._at < len(self.calls) else "nothing more"
        return UsageError(
            f"{self.path or 'the model'!r} was cut by a trace of it, in which its call {self._at + 1} on parts of "
            f"tensors was {was}, and now it does {does}: give Parallel(tensor=...) inputs as it gets them, "
            "Parallel(tensor=shardfold.parallel.Traced(...)), or a plan of words."
        )


class _Mode(TorchFunctionMode):
    def __init__(self, following: Following) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        following = self._following
        if following.watches and following.has_part((args, kwargs)) and func.__name__ != "__get__":
            return following.call(func, args, kwargs)
        return func(*args, **kwargs)


def follow_calls(
    module: nn.Module, path: str, calls: tuple[Expected, ...], leaves: Sequence[nn.Module], columns: Sequence[nn.Module]
) -> None:
    """The forward of ``module`` is followed from now on. ``leaves``: linear layers and embeddings in it; ``columns``:
    those among them that give parts."""
    following = Following(module, path, calls)
    for leaf in leaves:
        leaf.register_forward_pre_hook(following.enter)
        leaf.register_forward_hook(following.leave, always_call=True)
    for column in columns:
        column.register_forward_hook(following.gives_part)
    vars(module)["forward"] = following
