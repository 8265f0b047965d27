"""What a plan is given, a model and a micro-batch, and what is wrong with them in a sentence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardfold.errors import ConfigError, ModelError
from shardfold.torch_internals import tree_iter

__all__ = ["GIVE", "check_given", "check_trains", "not_run", "shapes_of"]

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
