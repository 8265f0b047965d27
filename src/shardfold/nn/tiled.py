"""Functions of single tokens, computed for some tokens at a time, so that long sequences fit.

A feed-forward layer widens each token several times over, and keeps that for backward. Computed tile by tile, and made
again tile by tile in backward, it exists for one tile at a time (Arctic Long Sequence Training, arXiv 2506.13996,
section 3). Inputs are saved before the first tile is computed: where a checkpoint around the function runs it again in
order to have them, it stops there, so that what is recomputed anyway is made again once, and not once more by tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shardfold.errors import ConfigError
from shardfold.plan.checks import described, is_integer, known_arguments
from shardfold.torch_internals import untraced

__all__ = ["tiled", "tiles_of"]

TOKENS = -2  # the dimension
NARROW = (torch.float16, torch.bfloat16)


@known_arguments
def tiled(function: Callable[..., Tensor], *inputs: Tensor, tile: int) -> Tensor:
    """``function(*inputs)``, of ``tile`` tokens at a time, in backward too.

    What ``function`` saves for backward exists for one tile at a time: between forward and backward the inputs are kept
    alone, and the forward of each tile runs once more. Outputs and gradients are those of the function for all tokens
    at once, up to the rounding of sums; gradients of parameters come once, as the sum over tiles, which for 16-bit
    parameters of an ``nn.Module`` is in fp32. torch.compile leaves it out of its graphs.

    Args:
        function: of tokens that do not see each other, as a feed-forward layer; a module or any function. Random
            numbers are drawn for each tile, and in backward are those of forward.
        inputs: ``(..., tokens, width)``, all of one number of tokens.
        tile: tokens; the last tile may have fewer.

    Returns:
        ``(..., tokens, width of the output)``.

    Raises:
        ConfigError: ``tile`` is no number of tokens, inputs have several, or the function does not give a tensor with
            as many.

    Examples:
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> tokens = torch.randn(1, 100, 8)
        >>> torch.allclose(sf.nn.tiled(mlp, tokens, tile=16), mlp(tokens), atol=1e-6)
        True
    """
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return tiles_of(function, inputs, tile, modules)


@untraced
def tiles_of(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], tile: int, modules: Iterable[nn.Module]
) -> Tensor:
    """See :func:`tiled`; the parameters of ``modules`` are those that the function reads."""
    tokens = _check(inputs, tile)
    tiles = list(zip(*(each.split(tile, TOKENS) for each in inputs), strict=True))
    if not torch.is_grad_enabled():
        return _joined([_call(function, parts) for parts in tiles])
    held = _Inputs(inputs, len(tiles))
    # By which a checkpoint knows the device of random numbers; in a list, where it is not saved.
    marker = [inputs[0].new_empty(0)]
    sums = _WideSums(modules if tokens > tile else ())
    found: list[Tensor] = []
    for number, parts in enumerate(tiles):
        again = _Tile(function, held, number * tile, parts)
        with sums.of_tile():
            found.append(checkpoint(again, marker, use_reentrant=False))  # pyright: ignore[reportArgumentType]
    return _joined(found)


class _Hold(torch.autograd.Function):
    """Saves inputs for whoever has the node; its output goes nowhere, so that backward does not come here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("what holds the inputs of tiles has no gradient")


class _Inputs:
    """Inputs between forward and backward: asked for once in a backward, as checkpoints want it, and held until the
    last tile has its part."""

    def __init__(self, inputs: Sequence[Tensor], tiles: int) -> None:
        self._node: Any = _Hold.apply(torch.empty(0, requires_grad=True), *inputs).grad_fn  # pyright: ignore
        self._tiles = self._left = tiles
        self._back: Sequence[Tensor] = ()

    def part(self, start: int, length: int) -> list[Tensor]:
        whole = self._back = self._back or self._node.saved_tensors
        self._left -= 1
        if not self._left:
            self._left, self._back = self._tiles, ()
        return [each.narrow(TOKENS, start, length) for each in whole]


class _Tile:
    """One tile: of the inputs that are given first, and in backward of those that were held."""

    def __init__(self, function: Callable[..., Tensor], held: _Inputs, start: int, given: Sequence[Tensor]) -> None:
        self._function, self._held, self._start, self._length = function, held, start, given[0].shape[TOKENS]
        self._given: Sequence[Tensor] | None = given

    def __call__(self, marker: list[Tensor]) -> Tensor:
        given, self._given = self._given, None  # a checkpoint keeps what it is to call again
        return _call(self._function, given or self._held.part(self._start, self._length))


def _call(function: Callable[..., Tensor], parts: Sequence[Tensor]) -> Tensor:
    """
    Raises:
        ConfigError: what it gives is not of these tokens.
    """
    out: Any = function(*(part.contiguous() for part in parts))  # of several rows a tile is not, and some call view()
    tokens = parts[0].shape[TOKENS]
    if not isinstance(out, Tensor) or out.dim() < 2 or out.shape[TOKENS] != tokens:
        given = f"a tensor {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ConfigError(
            f"tiled() of {_name(function)} gets {given} for {tokens} tokens: it is for functions of single tokens, "
            "which give one tensor (..., tokens, width)."
        )
    return out


def _joined(found: Sequence[Tensor]) -> Tensor:
    return found[0] if len(found) == 1 else torch.cat(list(found), TOKENS)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check(inputs: Sequence[Tensor], tile: int) -> int:
    """The number of tokens.

    Raises:
        ConfigError: see :func:`tiled`.
    """
    if not is_integer(tile, 1):
        raise ConfigError(f"tiled(tile={described(tile)}): it is a number of tokens, 1 or more.")
    shapes = [tuple(each.shape) for each in inputs]
    if not shapes or any(len(shape) < 2 for shape in shapes) or len({shape[TOKENS] for shape in shapes}) > 1:
        raise ConfigError(
            f"tiled() gets inputs of the shapes {', '.join(map(str, shapes)) or 'none'}: they are (..., tokens, "
            "width), of one number of tokens."
        )
    return shapes[0][TOKENS]


# -- sums over tiles


class _WideSums:
    """The gradients of 16-bit parameters, summed in fp32: autograd would round to 16 bits after each tile."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        self._sums: dict[int, tuple[Tensor, _Sum]] = {}  # by parameter: what tiles read, and its sum
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and parameter.dtype in NARROW:
                    self._places.append((module._parameters, name, parameter))
                    if id(parameter) not in self._sums:
                        total = _Sum(parameter.dtype)
                        whole: Any = _CollectTiles.apply(parameter, total)
                        self._sums[id(parameter)] = whole, total

    @contextmanager
    def of_tile(self) -> Iterator[None]:
        """Inside, the modules read their parameters for one tile."""
        read: dict[int, Any] = {key: _Tap.apply(*pair) for key, pair in self._sums.items()}
        for owner, name, parameter in self._places:
            owner[name] = read[id(parameter)]
        try:
            yield
        finally:
            for owner, name, parameter in self._places:
                owner[name] = parameter


class _Sum:
    """Of the gradients of tiles so far; it is taken in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        if self._total is None:
            self._total = grad.to(torch.float32, copy=True)
        else:
            self._total += grad

    def take(self) -> Tensor | None:
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


class _CollectTiles(torch.autograd.Function):
    """A parameter; backward comes here once, behind all tiles."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.total.take(), None


class _Tap(torch.autograd.Function):
    """What one tile reads of it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if outputs[0] is not None:
            ctx.total.add(outputs[0])
        return None, None
