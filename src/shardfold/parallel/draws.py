"""Random numbers of what is divided along an axis of tensor, the rule of Megatron-LM (arXiv 1909.08053, section 3).

Dropout between columns and rows, of attention's weights as of activations, takes other numbers on each rank, because
each has other heads and hidden units. Dropout of what is the same on all ranks takes the same.

What columns give is a part, and so is what PyTorch's functions make of parts. While a module runs whose children are
columns or rows, its calls are looked at, and those that draw for parts begin at a number of this rank's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfold.parallel.module_group import ModuleGroup
from shardfold.parallel.shared_input import SharedInput
from shardfold.parallel.stream import apart_draws

__all__ = ["Parts", "look_at_draws"]

DRAWING = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.scaled_dot_product_attention,
        torch.dropout,
        torch.dropout_,
        torch.native_dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.feature_alpha_dropout,
        torch.bernoulli,
        torch.rand_like,
        torch.randn_like,
        torch.multinomial,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.multinomial,
        Tensor.uniform_,
        Tensor.normal_,
        Tensor.exponential_,
    }
)
"""Functions that may draw, with a tensor among their arguments."""


class Parts:
    """Which tensors of a model are parts just now. Copies know of none."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._inside = 0  # layers that run which are cut

    def __reduce__(self) -> Any:
        return Parts, ()

    def add(self, tensor: Tensor) -> None:
        """It is a part, as long as it lives."""
        key, known = id(tensor), self._known

        def gone(which: weakref.ref[Tensor]) -> None:
            if known.get(key) is which:
                del known[key]

        known[key] = weakref.ref(tensor, gone)

    def among(self, values: Any) -> bool:
        """Whether one is among arguments, lists of them included."""
        for value in values:
            if isinstance(value, Tensor):
                known = self._known.get(id(value))
                if known is not None and known() is value:
                    return True
            elif isinstance(value, (list, tuple)) and self.among(value):
                return True
        return False

    def enter(self) -> None:
        """A layer runs that is cut; until :meth:`leave` what is done is its own."""
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1

    def __bool__(self) -> bool:
        return bool(self._known) and not self._inside


class _Looking(TorchFunctionMode):
    def __init__(self, parts: Parts, group: ModuleGroup) -> None:
        super().__init__()
        self._parts, self._group = parts, group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, parts = kwargs or {}, self._parts
        if not parts or not (parts.among(args) or (kwargs and parts.among(kwargs.values()))):
            return func(*args, **kwargs)
        if func in DRAWING and _draws(func, args, kwargs):
            with apart_draws(_device_of(args, kwargs), self._group):
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(each, Tensor):
                parts.add(each)
        return out


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """False: attention without dropout, or dropout in evaluation, which leave generators alone."""
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return bool(kwargs.get("training", True)) and kwargs.get("p", 1.0) != 0.0


def _device_of(args: Any, kwargs: Any) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


@dataclass(eq=False)
class Looked:
    """The forward of a module that columns or rows are in: it runs again where it is recomputed, which hooks may not.

    Attributes:
        module: whose it is.
        forward: in place of its class's, if any.
        parts: of the model.
        group: the ranks that have the others.
        shared: what its columns are given, until it is over.
    """

    module: nn.Module
    forward: Callable[..., Any] | None
    parts: Parts
    group: ModuleGroup
    shared: Sequence[SharedInput] = ()

    @property
    def in_graphs(self) -> bool:
        """Whether torch.compile may look into it: nothing in it seems to draw numbers, which a graph draws alike on all
        ranks."""
        named = (item for part in self.module.modules() for item in (*vars(part).items(), ("drop", _rate(part))))
        return not any("drop" in name and isinstance(value, float) and value > 0 for name, value in named)

    @property
    def graph_key(self) -> Any:
        """See :class:`shardfold.parallel.split.Forward`."""
        return "looked at", getattr(self.forward, "graph_key", self.forward and id(self.forward))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        forward: Any = type(self.module).forward
        return self.forward or MethodType(forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if torch.compiler.is_compiling():
                forward: Any = type(self.module).forward
                return self.forward(*args, **kwargs) if self.forward else forward(self.module, *args, **kwargs)
            if not self.module.training:
                return self.__wrapped__(*args, **kwargs)
            with _Looking(self.parts, self.group):
                return self.__wrapped__(*args, **kwargs)
        finally:
            for shared in self.shared:
                shared.forget()


def _rate(module: nn.Module) -> Any:
    """Of a dropout layer."""
    return getattr(module, "p", 0.0) if "Drop" in type(module).__name__ else 0.0


def look_at_draws(module: nn.Module, parts: Parts, group: ModuleGroup, shared: Sequence[SharedInput] = ()) -> None:
    """Calls in the forward of ``module``, which columns or rows are in, are looked at from now on, in training;
    ``shared`` inputs of its columns are forgotten behind it."""
    vars(module)["forward"] = Looked(module, vars(module).get("forward"), parts, group, shared)
