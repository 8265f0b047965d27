"""What autograd is doing at this moment, and what it could save of a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.torch_internals import in_backward, no_subclass_functions, top_saved_hooks

__all__ = ["accumulator_of", "hear", "inside_checkpoint", "is_heard", "tensors_in"]

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


def inside_checkpoint() -> bool:
    """Whether what runs is recomputed anyway, by a checkpoint around it, or is being recomputed."""
    top = top_saved_hooks()
    return in_backward() or (top is not None and top[0].__module__ == "torch.utils.checkpoint")


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
