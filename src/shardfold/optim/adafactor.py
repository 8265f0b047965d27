"""Adafactor: the second moment of a matrix as one value per row and one per column."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.optim.parts import PartOptimizer, ShardPlacement, Use, check_number
from shardfold.plan.checks import known_arguments
from shardfold.plan.placement import Box

__all__ = ["Adafactor"]


@known_arguments
class Adafactor(PartOptimizer):
    """Adafactor (Shazeer & Stern, arXiv 1804.04235, algorithms 4 and 5), with the arguments and the numbers of
    ``torch.optim.Adafactor``.

    Rows and columns are those of the last two dims; parameters with fewer have a second moment per element. On shards
    the sums over rows and columns of all parts go by one all-reduce of 4 bytes per row, column and parameter, and the
    squares of the update by one of 8 bytes per parameter. State: 4 bytes per row and column, on every rank; a vector's
    is split as it is.

    Args:
        params: parameters or groups of them.
        lr: largest relative step size; the step size is ``max(eps[1], rms(x)) * min(lr, 1 / sqrt(step))``.
        beta2_decay: the second moment's beta is ``1 - step ** beta2_decay``.
        eps: least root of the second moment (None: of the dtype), and least ``rms(x)``.
        d: updates whose root mean square is larger than this are scaled down to it.
        weight_decay: decoupled.

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> few_states = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.Adafactor, lr=1e-2), layout="zero2")
        >>> few_states.close()
    """

    per_element = ("variance",)
    per_parameter = ("step", "row_var", "col_var")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "eps": eps[1], "weight_decay": weight_decay, **({"eps": eps[0]} if eps[0] else {})}
        for name, value in numbers.items():
            check_number(Adafactor, name, value)
        check_number(Adafactor, "d", d, low=1.0)
        if not beta2_decay <= 0:
            raise ConfigError(f"Adafactor(beta2_decay={beta2_decay!r}): it is a number <= 0.")
        super().__init__(params, dict(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay))

    def needs_whole(self, group: dict[str, Any]) -> bool:
        return True

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        if len(place.shape) < 2:
            return {"step": 0, "variance": torch.zeros_like(tensor)}
        *batch, rows, columns = place.whole
        row_var = torch.zeros(*batch, rows, 1, dtype=_wide(tensor.dtype), device=tensor.device)
        return {"step": 0, "row_var": row_var, "col_var": row_var.new_zeros(*batch, 1, columns)}

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        if len(place.shape) < 2:
            return itemsize * place.part_numel
        return max(itemsize, 4) * (place.whole_numel // place.whole[-1] + place.whole_numel // place.whole[-2])

    def update(self, uses: list[Use]) -> None:
        if not uses:
            return
        steps: list[Tensor] = []
        squares: list[Tensor] = []
        for use, summed in zip(uses, self.summed(uses, [_sums(use) for use in uses]), strict=True):
            use.state["step"] += 1
            steps.append(_step_size(use, summed[0]))
            _follow(use, summed[1:])
            squares.append(_direction(use).double().square().sum().view(1))
        squares = self.summed(uses, squares)
        for use, size, square in zip(uses, steps, squares, strict=True):
            rms = (square[0] / use.place.whole_numel).sqrt()
            size = size / (rms / use.group["d"]).clamp(min=1.0)
            use.tensor.mul_(1 - use.group["lr"] * use.group["weight_decay"])
            # The direction is made twice, as keeping it would take as much memory as a moment of every element.
            use.tensor.sub_(_direction(use).mul_(size).view(use.tensor.shape))


def _sums(use: Use) -> Tensor:
    """This rank's part of the sum of squares of the values, and of the gradients by row and by column."""
    values = use.tensor.to(_wide(use.tensor.dtype)).square().sum().view(1)
    if len(use.place.shape) < 2:
        return values
    place = use.place
    *batch, rows, columns = place.shape
    by_row, by_column = values.new_zeros(place.whole[:-1]), values.new_zeros(*place.whole[:-2], place.whole[-1])
    if place.numel:
        squares, first = _in_rows(place, use.grad.reshape(-1).to(values.dtype).square())
        mine = squares.new_zeros(place.numel // columns)
        mine[first : first + len(squares)] = squares.sum(1)
        of_row, of_column = _indices(place, values.device)
        by_row[of_row] = mine.view(*batch, rows)
        mine = squares.new_zeros(place.numel // rows // columns, columns)
        mine.index_add_(0, _matrix_of(squares, first, rows), squares)
        by_column[of_column] = mine.view(*batch, columns)
    return torch.cat([values, by_row.view(-1), by_column.view(-1)])


def _indices(place: ShardPlacement, device: torch.device) -> tuple[Any, Any]:
    """Where the rows of the box, and its columns, are among those of the whole, ``(..., rows)`` and ``(...,
    columns)``."""
    return (..., ...) if place.box is None else _indices_of(place.box, len(place.shape), device)


@cache
def _indices_of(box: Box, dims: int, device: torch.device) -> tuple[Any, Any]:
    every = [torch.tensor(box.indices(dim), device=device) for dim in range(dims)]
    rows, columns = (*every[:-2], every[-2]), (*every[:-2], every[-1])
    return torch.meshgrid(*rows, indexing="ij"), torch.meshgrid(*columns, indexing="ij")


def _follow(use: Use, sums: Tensor) -> None:
    """Moves the second moment towards the squares of this step."""
    state, weight = use.state, use.state["step"] ** use.group["beta2_decay"]
    if "variance" in state:
        state["variance"].lerp_(use.grad.square(), weight)
        return
    rows, columns = use.place.whole[-2:]
    by_row, by_column = sums.to(state["row_var"].dtype).split([state["row_var"].numel(), state["col_var"].numel()])
    state["row_var"].lerp_((by_row / columns).view_as(state["row_var"]), weight)
    state["col_var"].lerp_((by_column / rows).view_as(state["col_var"]), weight)


def _direction(use: Use) -> Tensor:
    """The gradient over the root of its second moment, ``(place.part_numel,)``, a new tensor."""
    grad, least = use.grad.reshape(-1), use.group["eps"][0]
    least = torch.finfo(use.tensor.dtype).eps if least is None else least
    if "variance" in use.state:
        return use.state["variance"].reshape(-1).clamp(min=least * least).rsqrt_().mul_(grad)
    rows, columns = use.place.shape[-2:]
    if not use.place.numel:
        return torch.empty_like(grad)
    whole, (of_row, of_column) = use.place.whole, _indices(use.place, grad.device)
    row_var, col_var = use.state["row_var"].view(whole[:-1]), use.state["col_var"].view(*whole[:-2], whole[-1])
    mean = row_var.mean(dim=-1, keepdim=True).expand_as(row_var)[of_row].reshape(-1, rows)[:, :1].clamp(min=least)
    row_var, col_var = row_var[of_row].reshape(-1, 1), col_var[of_column].reshape(-1, columns)
    first, stop = use.place.start // columns, -(-(use.place.start + use.place.part_numel) // columns)
    mine = row_var[first:stop]
    matrix = _matrix_of(mine, first, rows)
    estimate = (mine * col_var[matrix]).div_(mean[matrix])
    offset = use.place.start - first * columns
    part = estimate.view(-1)[offset : offset + use.place.part_numel]
    return part.clamp_(min=least * least).rsqrt_().to(grad.dtype).mul_(grad)


def _step_size(use: Use, square: Tensor) -> Tensor:
    """The step size before clipping, a 0-d tensor."""
    rms = (square / use.place.whole_numel).sqrt()
    return rms.clamp(min=use.group["eps"][1]) * min(float(use.group["lr"]), use.state["step"] ** -0.5)


def _in_rows(place: ShardPlacement, part: Tensor) -> tuple[Tensor, int]:
    """A part ``(place.part_numel,)`` as the rows that it touches, zeros where others have some; the first's number."""
    columns = place.shape[-1]
    first, stop = place.start // columns, -(-(place.start + place.part_numel) // columns)
    offset, size = place.start - first * columns, (stop - first) * columns
    if size != place.part_numel:
        whole = part.new_zeros(size)
        whole[offset : offset + place.part_numel] = part
        part = whole
    return part.view(-1, columns), first


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which statistics are summed and kept."""
    return torch.promote_types(dtype, torch.float32)


def _matrix_of(rows: Tensor, first: int, per_matrix: int) -> Tensor:
    """The matrix that each of these rows, of which ``first`` is the first's number, belongs to."""
    return torch.arange(first, first + len(rows), device=rows.device) // per_matrix
