"""Tiled computation in the words of Arctic Long Sequence Training (arXiv 2506.13996, section 3).

What single tokens need is computed for some tokens at a time and made again so in backward, as
:func:`shardfold.nn.tiled` does.

``apply`` is what each class has. Gradients are those of the whole, up to the rounding of sums; every tensor that is cut
or used gets its own. ``compute_params`` is not needed: a parameter's gradient comes once, as the sum over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.errors import did_you_mean
from shardfold.nn.tiled import tiles_of

__all__ = ["SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute"]


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[nn.Parameter] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """``fn`` of all tokens, computed for a part of them at a time.

    Args:
        fn: of tokens that do not see each other; called with keywords.
        seqlen: tokens of a row.
        shards: parts, of ``ceil(seqlen / shards)`` tokens; the last may have fewer.
        kwargs_to_shard: tensors ``(batch, seqlen, ...)``.
        kwargs_to_pass: what each call is given as it is.
        grad_requiring_tensor_key: one of ``kwargs_to_shard``. The others get their gradients too.
        compute_params: may be left out.
        output_unshard_dimension: 1: ``fn`` gives ``(batch, tokens, ...)``; 0: it gives one number, as a loss.
        output_reduction: None, or ``"mean"`` or ``"sum"`` of the elements that come out: with
            ``output_unshard_dimension=0`` those of the parts.

    Returns:
        ``(batch, seqlen, ...)``, ``(parts,)``, or one number.

    Raises:
        WrongArgument: a ``ValueError``: tensors are of other lengths, or an argument is none of these.
    """
    _check_shards("sequence_tiled_compute", shards)
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise WrongArgument(
            f"sequence_tiled_compute(grad_requiring_tensor_key={grad_requiring_tensor_key!r}): it is one of "
            f"kwargs_to_shard.{did_you_mean(grad_requiring_tensor_key, list(kwargs_to_shard))}"
        )
    if output_unshard_dimension not in (0, 1) or output_reduction not in (None, "mean", "sum"):
        raise WrongArgument(
            f"sequence_tiled_compute(output_unshard_dimension={output_unshard_dimension!r}, output_reduction="
            f"{output_reduction!r}): the dimension is 1, of tokens, or 0, of losses; the reduction is None, 'mean' or "
            "'sum'."
        )
    for name, value in kwargs_to_shard.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != seqlen:
            raise WrongArgument(
                f"sequence_tiled_compute(seqlen={seqlen}): {name!r} of kwargs_to_shard is "
                f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}: it is a tensor (batch, "
                "seqlen, ...); what is not cut goes into kwargs_to_pass."
            )
    names, dims = list(kwargs_to_shard), [value.dim() for value in kwargs_to_shard.values()]
    of_out: list[int] = []

    def of_tile(*parts: Tensor) -> Tensor:
        cut = {name: _back(part, dim) for name, part, dim in zip(names, parts, dims, strict=True)}
        out = fn(**cut, **kwargs_to_pass)
        if output_unshard_dimension == 0:
            return _number("sequence_tiled_compute", out).expand(*parts[0].shape[:-2], parts[0].shape[-2], 1)
        of_out[:] = [out.dim()]
        return _tokens(out)

    tile = -(-seqlen // shards)
    out = tiles_of(of_tile, [_tokens(value) for value in kwargs_to_shard.values()], tile, _modules(fn))
    out = _firsts(out, tile) if output_unshard_dimension == 0 else _back(out, of_out[0])
    return _reduced(out, output_reduction)


class SequenceTiledCompute:
    """:func:`sequence_tiled_compute` with names and values one behind the other."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[nn.Parameter] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """``args`` are the values of ``keys_to_shard``, then those of ``keys_to_pass``.

        Raises:
            WrongArgument: they are more or fewer; or as of :func:`sequence_tiled_compute`.
        """
        keys, count = [*keys_to_shard, *keys_to_pass], len(keys_to_shard)
        if len(keys) != len(args):
            raise WrongArgument(f"SequenceTiledCompute.apply() gets {len(keys)} names and {len(args)} values.")
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys[:count], args, strict=False)),
            dict(zip(keys[count:], args[count:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """A feed-forward layer for some tokens at a time."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
    ) -> Tensor:
        """
        Args:
            fn: ``fn(self, x)``, the layer's forward.
            self: the layer.
            x: ``(..., tokens, width)``.
            shards: parts of the tokens.
            compute_params: may be left out.

        Raises:
            WrongArgument: a ``ValueError``: there are no such parts, or ``x`` has no tokens.
        """
        _check_shards("TiledMLP.apply", shards)
        if x.dim() < 2:
            raise WrongArgument(f"TiledMLP.apply(x=...) gets {tuple(x.shape)}: it is (..., tokens, width).")
        return tiles_of(lambda part: fn(self, part), [x], -(-x.shape[-2] // shards), _modules(self))


class TiledFusedLogitsLoss:
    """A loss whose logits exist for some tokens at a time. What ``fn`` computes is made again in backward."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None,
        output_reduction: str,
    ) -> Tensor:
        """
        Args:
            fn: ``fn(self, x, y)``, or ``fn(self, x, y, mask)``, of some of the ``batch x tokens`` rows, which gives one
                number.
            self: the head, or the model that has it.
            x: ``(batch, tokens, width)``.
            y: ``(batch, tokens, ...)``.
            mask: ``(batch, tokens)``, or None.
            shards: parts of the rows.
            compute_params: may be left out.
            output_reduction: ``"sum"`` or ``"mean"`` of the parts' numbers. A mean over parts that have different
                numbers of labels that count is not the mean over labels.

        Raises:
            WrongArgument: a ``ValueError``: shapes do not go together, or another reduction.
        """
        _check_shards("TiledFusedLogitsLoss.apply", shards)
        if output_reduction not in ("mean", "sum"):
            raise WrongArgument(
                f"TiledFusedLogitsLoss.apply(output_reduction={output_reduction!r}): it is 'mean' or 'sum'."
            )
        given = [x, y] if mask is None else [x, y, mask]
        if any(each.dim() < 2 or each.shape[:2] != x.shape[:2] for each in given) or (
            mask is not None and mask.dim() > 2
        ):
            raise WrongArgument(
                f"TiledFusedLogitsLoss.apply() gets {', '.join(str(tuple(each.shape)) for each in given)}: x and y are "
                "(batch, tokens, ...), and mask is (batch, tokens)."
            )
        rows = [each.flatten(0, 1) for each in given]

        def of_tile(*parts: Tensor) -> Tensor:
            cut = [part.reshape(len(part), *each.shape[1:]) for part, each in zip(parts, rows, strict=True)]
            return _number("TiledFusedLogitsLoss.apply", fn(self, *cut)).expand(len(parts[0]), 1)

        tile = -(-len(rows[0]) // shards)
        out = tiles_of(of_tile, [each.reshape(len(each), -1) for each in rows], tile, _modules(self))
        return _reduced(_firsts(out, tile), output_reduction)


def _check_shards(name: str, shards: Any) -> None:
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise WrongArgument(f"{name}(shards={shards!r}): it is a number of parts, 1 or more.")


def _modules(of: Any) -> Iterable[nn.Module]:
    """Whose parameters a function reads, as far as it tells: of 16-bit ones sums over tiles are in fp32."""
    owner = getattr(of, "__self__", of)
    return owner.modules() if isinstance(owner, nn.Module) else ()


def _tokens(value: Tensor) -> Tensor:
    """``(batch, tokens, ...)`` as ``(batch, ..., tokens, width)``."""
    return value.unsqueeze(-1) if value.dim() == 2 else value.movedim(1, -2)


def _back(value: Tensor, dims: int) -> Tensor:
    """What :func:`_tokens` was given, of so many dimensions."""
    return value.squeeze(-1) if dims == 2 else value.movedim(-2, 1)


def _number(name: str, out: Any) -> Tensor:
    if not isinstance(out, Tensor) or out.numel() != 1:
        raise WrongArgument(f"{name}(fn=...): it gives one number for each part.")
    return out.reshape(())


def _firsts(out: Tensor, tile: int) -> Tensor:
    """The numbers of the tiles."""
    return out[..., ::tile, 0].flatten(0, -2)[0] if out.dim() > 2 else out[::tile, 0]


def _reduced(out: Tensor, reduction: str | None) -> Tensor:
    if reduction is None:
        return out
    return torch.mean(out) if reduction == "mean" else torch.sum(out)
