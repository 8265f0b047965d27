"""Forwards that work token by token, computed for some tokens at a time and made again so in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.activations.replaced import ReplacedForward
from shardfold.errors import ModelError
from shardfold.nn.tiled import tiles_of
from shardfold.sharding.unit import Unit
from shardfold.torch_internals import NormBase, in_backward, tree_flatten, tree_unflatten

__all__ = ["tiling"]


def tiling(
    place: ReplacedForward, forward: Callable[..., Any], tile: int, needs: Callable[[Unit], None]
) -> Callable[..., Any]:
    """``forward`` of ``place``, of ``tile`` tokens at a time; ``needs`` is told of its unit before it runs again."""
    tried: list[bool] = []

    @torch.compiler.disable
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, shape = tree_flatten((args, kwargs))
        spots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[i] for i in spots]
        _check(place, inputs)
        rest = [None if i in spots else leaf for i, leaf in enumerate(leaves)]

        def of_tile(*parts: Tensor) -> Any:
            if in_backward():
                needs(place.unit)
            given = list(rest)
            for i, part in zip(spots, parts, strict=True):
                given[i] = part
            some, named = tree_unflatten(given, shape)
            return forward(*some, **named)

        if not tried and inputs[0].shape[-2] > 1 and not in_backward():
            _refuse_mixing(place, of_tile, inputs)
            tried.append(True)
        return tiles_of(of_tile, inputs, tile, place.inner)

    return run


def _check(place: ReplacedForward, inputs: Sequence[Tensor]) -> None:
    """
    Raises:
        ModelError: the module is not given tokens.
    """
    shapes = [tuple(each.shape) for each in inputs]
    if not shapes or any(len(shape) < 2 or shape[:-1] != shapes[0][:-1] for shape in shapes):
        raise ModelError(
            f"activations={place.given.mode!r} of {place.path!r}, which is called with "
            f"{'tensors ' + ', '.join(map(str, shapes)) if shapes else 'no tensor'}: it is for modules whose tensors "
            "are all (..., tokens, width), of the same tokens."
        )


def _refuse_mixing(place: ReplacedForward, forward: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Looks at two tokens, together and one alone.

    Raises:
        ModelError: the second one's output depends on the first.
    """
    modes = [(module, module.training) for module in place.inner]
    try:
        _train((module, training and isinstance(module, NormBase)) for module, training in modes)  # without drawing
        with torch.no_grad():
            both, alone = (
                forward(*(each[..., start:2, :].detach().contiguous() for each in inputs)) for start in (0, 1)
            )
    finally:
        _train(modes)
    fault = ""
    if not isinstance(both, Tensor) or both.shape[:-1] != (*inputs[0].shape[:-2], 2):
        given = f"a tensor {tuple(both.shape)}" if isinstance(both, Tensor) else f"a {type(both).__name__}"
        fault = f"gives {given} for inputs {(*inputs[0].shape[:-2], 2, inputs[0].shape[-1])}"
    elif not torch.allclose(both[..., 1:, :], alone, rtol=0, atol=float(both.abs().max()) * _rounding(both)):
        fault = "gives another output for a token when it sees another one"
    if fault:
        raise ModelError(
            f"activations={place.given.mode!r} of {place.path!r}, which {fault}: it is for modules that work token by "
            "token and give one tensor (..., tokens, width), as feed-forward layers."
        )


def _train(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Each of the modules, and none inside of it, is in training or is not."""
    for module, training in modes:
        module.training = training


def _rounding(tensor: Tensor) -> float:
    """Outputs of a token differ by less where matrix products of other shapes round in another order."""
    return torch.finfo(tensor.dtype).eps ** 0.5
