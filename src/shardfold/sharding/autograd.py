"""What autograd is doing at this moment, and what it could save of a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfold.torch_internals import in_backward, no_subclass_functions, top_saved_hooks

__all__ = ["Kept", "accumulator_of", "hear", "inside_checkpoint", "is_heard", "keep", "outside_inference", "tensors_in"]

HEARD = "shardfold"
"""In the metadata of a node of autograd's whose gradients an engine takes."""


def accumulator_of(parameter: nn.Parameter) -> Any:
    """The node that adds to the parameter's ``.grad``; one that is freed, or frozen for a while, has a node too."""
    with no_subclass_functions():
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        parameter.requires_grad_(wanted)
    return node


def hear(parameter: nn.Parameter) -> Any:
    """The parameter's node, marked. Who keeps it keeps the mark: a parameter refers to its node weakly."""
    node = accumulator_of(parameter)
    node.metadata[HEARD] = True
    return node


def is_heard(parameter: nn.Parameter) -> bool:
    """Whether the parameter has the node still that was marked: ``Tensor.set_`` makes autograd forget it."""
    return HEARD in accumulator_of(parameter).metadata


@contextmanager
def outside_inference() -> Iterator[None]:
    """Inside, tensors are made whose changes are counted and which autograd takes, also where the user is inside of
    ``torch.inference_mode``; a function that it decorates runs so."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def inside_checkpoint() -> bool:
    """Whether what runs is recomputed anyway, by a checkpoint around it, or is being recomputed."""
    top = top_saved_hooks()
    return in_backward() or (top is not None and top[0].__module__ == "torch.utils.checkpoint")


class Kept(NamedTuple):
    """What hooks save in place of a tensor that stays where it is. Under hooks PyTorch compares no versions, and a
    backward would compute with what was written into it since."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place; in PyTorch's words, which are those without hooks.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead."
            )
        return self.tensor


def keep(tensor: Tensor) -> Kept:
    """``tensor`` for hooks that are about to save it. What an operation gave would, by its node, keep itself alive."""
    return Kept(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples, mappings, dataclasses and plain objects that hold such."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        for item in vars(value).values():  # an output object of the user's
            if isinstance(item, (Tensor, list, tuple, Mapping)):
                _collect(item, found)
