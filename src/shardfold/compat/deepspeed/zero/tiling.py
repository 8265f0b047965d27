"""Linear layers in tiles, so that no unit is larger than a tile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.compat.deepspeed.zero.gathered import GatheredParameters
from shardfold.errors import ConfigError, ModelError

__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]


def _bounds(length: int, parts: int) -> list[int]:
    """``[0, ..., length]``: where parts begin and the last one ends; the first ones are longer by one."""
    return [part * (length // parts) + min(part, length % parts) for part in range(parts + 1)]


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Parts of so many elements of the last dim, copied if they are to be contiguous."""
    parts = torch.split(tensor, list(partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class TiledLinear(nn.Module):
    """A ``torch.nn.Linear`` of ``out_splits x in_splits`` layers, ``linears[out][in]``, that run one after the other.

    Args:
        in_features, out_features, bias: as of ``torch.nn.Linear``.
        in_splits, out_splits: number of tiles along input and output.
        input_is_already_split: ``forward`` gets a list of ``in_splits`` tensors.
        combine_out_splits: False: ``forward`` gives a list of ``out_splits`` tensors.
        linear_cls: of the tiles; ``kwargs`` are passed on to it.
        init_linear: a layer whose values are copied.

    Raises:
        ConfigError, ModelError: more splits than features, fewer than one, or ``init_linear`` does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise SplitsError(f"{name}_splits={splits}: it is in the range 1 to {name}_features, {features}.")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                # One bias for each part of the output: the tile of the last part of the input has it.
                linear_cls(
                    self.in_parts[i + 1] - self.in_parts[i],
                    self.out_parts[o + 1] - self.out_parts[o],
                    bias=bias and i == in_splits - 1,
                    **kwargs,
                )
                for i in range(in_splits)
            )
            for o in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        if self.in_splits == 1:
            parts: Sequence[Any] = [input_[0] if self.input_is_already_split else input_]
        elif self.input_is_already_split:
            parts = input_
            if len(parts) != self.in_splits:
                raise ModelError(f"TiledLinear was given {len(parts)} parts of its input: in_splits={self.in_splits}.")
        else:
            parts = self._split_global_input(input_, [stop - start for start, stop in pairwise(self.in_parts)])
        outputs: list[Any] = []
        for o, row in enumerate(self.linears):
            sum_: Any = None
            for i, tile in enumerate(row):  # pyright: ignore[reportArgumentType]
                sum_ = self._reduce_local_output(in_id=i, out_id=o, current_out=sum_, new_out=tile(parts[i]))
            outputs.append(sum_)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input: Tensor, split_sizes: Sequence[int]) -> Sequence[Any]:
        """Parts of an input along its last dim; for subclasses with inputs of other kinds."""
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """The sum of the tiles of one part of the output so far; for subclasses with outputs of other kinds."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        """The output of its parts."""
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies weight and bias of ``other``, of rank 0, into the tiles; every rank calls it."""
        mine = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != mine or (other.bias is not None) != self.use_bias:
            raise ModelError(
                f"copy_params_from: a layer of weight {tuple(other.weight.shape)}, bias {other.bias is not None}, does "
                f"not fit one of weight {mine}, bias {self.use_bias}."
            )
        with GatheredParameters(other.parameters()):
            for o, row in enumerate(self.linears):
                rows = slice(self.out_parts[o], self.out_parts[o + 1])
                for i, tile in enumerate(row):  # pyright: ignore[reportArgumentType]
                    with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                        tile.weight.copy_(other.weight[rows, self.in_parts[i] : self.in_parts[i + 1]])
                        if tile.bias is not None:
                            tile.bias.copy_(other.bias[rows])


class SplitsError(ConfigError, RuntimeError):
    """There are not that many tiles in a layer."""


class TiledLinearReturnBias(TiledLinear):
    """Of layers that return ``(output, bias)``, the bias not added, as Megatron-LM's do."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = new_out
        if current_out is None:
            return output, bias
        return current_out[0] + output, current_out[1] if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([output for output, _ in outputs], dim=-1), torch.cat(biases, dim=-1) if biases else None
