"""What a plan is given, a model and a micro-batch: what is wrong with them in a sentence, and the same without memory.

Without memory are the same modules around parameters and buffers that have shapes and dtypes, but no values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardfold.errors import ConfigError, ModelError
from shardfold.torch_internals import tree_flatten, tree_iter, tree_unflatten

__all__ = ["GIVE", "check_given", "check_trains", "fill", "hollow", "hollow_values", "not_run", "shapes_of"]


GIVE = "Give a micro-batch that its forward takes"
"""How refusals that blame a micro-batch end."""


def check_given(model: nn.Module, batch: Any) -> None:
    """Refuses what nothing can be planned of.

    Raises:
        ConfigError: the micro-batch has no tensors, or no samples.
        ModelError: parameters have no shapes yet.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"{type(model).__name__} has a parameter, {name!r}, that gets its shape from the first batch: give its "
                "layer all sizes, as nn.Linear in place of nn.LazyLinear."
            )
    tensors = [value for value in tree_iter(batch) if isinstance(value, Tensor)]
    if not tensors:
        raise ConfigError(
            f"the micro-batch is a {type(batch).__name__} without a tensor: give what the model's forward takes, a "
            "tensor, a tuple of them, or a dict of them by name."
        )
    if any(tensor.dim() and not tensor.shape[0] for tensor in tensors):
        raise ConfigError(f"the micro-batch has no samples ({shapes_of(batch)}): give one of two samples or more.")


def check_trains(model: nn.Module) -> None:
    """Refuses a model that nothing of is trained.

    Raises:
        ModelError: it has no parameters, or all are frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        frozen = any(True for _ in model.parameters())
        raise ModelError(
            f"{type(model).__name__} has no parameter that is trained"
            f"{': requires_grad is False of all, set it for those to train' if frozen else ', as it has none'}. "
            "To plan for serving it, `shardfold plan --inference`."
        )


def not_run(model: nn.Module, batch: Any, error: Exception, does: str = "train") -> ModelError:
    """What to raise where a forward or backward fails on a micro-batch."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
    else_ = ", or another precision, as bf16-autocast" if "same dtype" in first else ""
    return ModelError(
        f"{type(model).__name__} does not {does} on this micro-batch ({shapes_of(batch)}): {first}. {GIVE}{else_}."
    )


def shapes_of(batch: Any) -> str:
    """Shapes and dtypes of the tensors of a micro-batch, by name where they have names."""
    named = batch.items() if isinstance(batch, dict) else [("", batch)]
    return ", ".join(
        f"{name}{' ' * bool(name)}{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, values in named
        for value in tree_iter(values)
        if isinstance(value, Tensor)
    )


# -- without memory


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
