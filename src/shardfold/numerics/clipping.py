"""Norms and clipping over shards, as ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` would take them of the
whole model: a tied parameter counts once, a frozen one not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.plan.checks import changes_of, check_flags, described, is_number, known_arguments

__all__ = ["Clip", "clip_coefficient", "joined_terms", "norm_of", "norm_terms", "one_clip", "square_sum"]

_ROW = 4096


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Clip:
    """How gradients are clipped at each step, over all ranks, after micro-batches are summed and unscaled.

    Attributes:
        norm: the largest norm of all gradients taken together; larger ones are scaled down to it. ``inf`` only takes
            the norm.
        p: of which norm, a number > 0 or ``inf``.
        value: every element of a gradient is cut to ``[-value, value]``; instead of ``norm``.
        error_if_nonfinite: an inf or NaN norm raises on every rank before anything is updated; between groups of ranks
            that come together rarely (``Outer``), on those of its group.

    Raises:
        ConfigError: both or neither of ``norm`` and ``value``, or a number out of its range.

    Examples:
        >>> clipped = sf.Engine(nn.Linear(8, 8), optimizer=adam, clip_norm=sf.Clip(norm=1.0, p=float("inf")))
        >>> clipped.backward(clipped(x).square().mean())
        >>> clipped.step().updated
        True
    """

    norm: float | None = None
    p: float = 2.0
    value: float | None = None
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        limit = self.norm if self.norm is not None else self.value
        if (self.norm is None) == (self.value is None) or not _positive(limit):
            raise ConfigError(f"Clip(norm={self.norm!r}, value={self.value!r}): give one of the two, a number > 0.")
        check_flags("Clip", error_if_nonfinite=self.error_if_nonfinite)
        if not _positive(self.p) or (self.value is not None and (self.p != 2.0 or self.error_if_nonfinite)):
            raise ConfigError(
                f"Clip.p is {self.p!r}: it is a number > 0 or inf, and goes with norm=, as error_if_nonfinite does."
            )

    def __str__(self) -> str:
        return changes_of(self)


def one_clip(given: Any) -> Clip | None:
    """What an engine's ``clip_norm=`` says.

    Raises:
        ConfigError: it is neither a norm nor a :class:`Clip`.
    """
    if given is None or isinstance(given, Clip):
        return given
    if not _positive(given):
        raise ConfigError(
            f"clip_norm= is {described(given)}: it is the largest gradient norm, a number > 0, a Clip, as in "
            "Clip(value=1.0), or None."
        )
    return Clip(norm=given)


def _positive(number: object) -> bool:
    return is_number(number, 0) and number != 0


def norm_terms(flat: Tensor, p: float) -> list[Tensor]:
    """What one tensor adds to a p-norm, in parts, 0-d fp64 each: sums of ``|x| ** p``, or for ``inf`` the largest
    ``|x|``. Joined (:func:`joined_terms`) over all tensors and ranks they make the norm by :func:`norm_of`."""
    if p == 2:
        return _square_sums(flat)
    part = [torch.linalg.vector_norm(flat, p, dtype=torch.float64)] if flat.numel() else []
    return part if p == inf else [each**p for each in part]


def joined_terms(terms: Iterable[Tensor], p: float, device: torch.device) -> Tensor:
    """The sum of what :func:`norm_terms` gave, or for ``inf`` the largest; 0-d fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for term in terms:
        total = torch.maximum(total, term.to(device)) if p == inf else total + term.to(device)
    return total


def norm_of(part: Tensor, p: float) -> Tensor:
    """The norm, of what :func:`joined_terms` gave on all ranks."""
    return part if p == inf else part.sqrt() if p == 2 else part ** (1 / p)


def square_sum(flats: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all elements, a 0-d fp64 tensor.

    Squares are summed in fp32 (of fp64 in fp64) over rows of 4096 elements, and rows in fp64: the error does not grow
    with the size.
    """
    return joined_terms((term for flat in flats for term in _square_sums(flat)), 2, device)


def _square_sums(flat: Tensor) -> list[Tensor]:
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    whole = flat.numel() // _ROW * _ROW
    parts = (flat[:whole].view(-1, _ROW), flat[whole:].view(1, -1))
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in parts if part.numel()]
    return [each.double().square().sum() for each in norms]


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by so that it is at most ``limit``: a 0-d tensor in (0, 1]."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
