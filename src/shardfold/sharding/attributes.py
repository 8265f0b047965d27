"""What PyTorch has to be told by assigning it: which memory a tensor has, and what a parameter's gradient is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

__all__ = ["drop_grads", "point", "show_grads"]


def point(tensor: Tensor, memory: Tensor) -> None:
    """From now on ``memory`` is what the tensor shows; the object, its ties and its version counter stay."""
    tensor.data = memory


def show_grads(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Each parameter for which there is one of ``grads`` has it in ``.grad``; the others are left alone."""
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = grad


def drop_grads(parameters: Iterable[Tensor]) -> None:
    """These have nothing in ``.grad`` any more."""
    for parameter in parameters:
        parameter.grad = None
