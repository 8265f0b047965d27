"""A model without memory: the same modules around parameters and buffers that have shapes and dtypes, but no values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.torch_internals import tree_flatten, tree_unflatten

__all__ = ["fill", "hollow", "hollow_values"]


def hollow(model: nn.Module, make: Callable[[Tensor, torch.dtype], Tensor], dtypes: Mapping[str, torch.dtype]) -> Any:
    """A copy of the model whose parameters and buffers are what ``make(tensor, dtype)`` gives; nothing of theirs is
    copied. ``dtypes``: of parameters and buffers, by name, where that is not their own."""
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in memo:
            made = nn.Parameter(make(p, dtypes.get(name, p.dtype)), requires_grad=p.requires_grad)
            vars(made).update(vars(p))
            memo[id(p)] = made
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in memo:
            memo[id(buffer)] = make(buffer, dtypes.get(name, buffer.dtype))
    return copy.deepcopy(model, memo)


def fill(model: nn.Module, make: Callable[[Tensor, torch.dtype], Tensor]) -> None:
    """Puts what ``make(tensor, dtype)`` gives in the place of parameters and buffers."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _like(tensor, make)
                    held[name] = made[id(tensor)][1]


def _like(tensor: Tensor, make: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
    new = make(tensor, tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        vars(new).update(vars(tensor))
    return new


def hollow_values(values: Any, make: Callable[[Tensor, torch.dtype], Tensor]) -> Any:
    """The same nested values with tensors that ``make(tensor, dtype)`` gives."""
    leaves, shape = tree_flatten(values)
    return tree_unflatten([make(v, v.dtype) if isinstance(v, Tensor) else v for v in leaves], shape)
