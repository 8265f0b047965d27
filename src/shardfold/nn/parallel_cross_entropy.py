"""Losses over classes that are split over ranks: each has some rows of the head, and logits of these only.

A softmax over all classes needs of the other ranks the largest logit and the sum of exponentials of each row, and the
logit of the row's own class from whichever rank has it: two small collectives for a chunk of rows (Megatron-LM, arXiv
1909.08053). Gradients are exact, those of margins included.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.nn.axis_group import AxisGroup
from shardfold.nn.cross_entropy import (
    LARGE,
    Head,
    Margin,
    check_head,
    check_targets,
    chunked_cross_entropy,
    losses_of,
    rows_at_once,
    wanted_of,
)
from shardfold.plan.checks import is_integer, is_number, known_arguments

__all__ = ["margin_of", "parallel_cross_entropy", "parallel_margin_loss", "sampled_classes"]


@known_arguments
def parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ranks: AxisGroup,
    classes: int | None = None,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    summed: bool = True,
) -> Tensor:
    """:func:`chunked_cross_entropy` where each rank has some rows of ``weight``: no rank has the logits of all classes.

    Every rank calls it with the same ``hidden`` and ``targets``, and has the same losses and gradients of ``hidden``.

    Args:
        hidden: ``(..., d)``, the same on all ranks.
        weight: ``(rows, d)``: of ``classes`` rows in the order of ranks this rank's, as many on each rank or, where
            they do not divide, one more on the first ones. All of them: nothing is sent.
        targets: ``(...)``, integers from 0 to ``classes``, the same on all ranks.
        ranks: that have the other rows, as a link of ``shardfold.parallel``.
        classes: on all ranks; None: as many as here on each.
        bias: ``(rows,)``.
        chunk, ignore_index, label_smoothing, reduction, softcap: see :func:`chunked_cross_entropy`.
        summed: False: the gradient of ``hidden`` is what this rank's classes contribute, for a caller who sums it over
            the ranks, as ``shardfold.parallel.functions.copy`` does.

    Returns:
        A scalar, or ``(...)`` for ``"none"``, in fp32 or fp64.

    Raises:
        ConfigError: an option, a shape or a dtype does not fit.
        UsageError: in backward with ``create_graph=True``.

    Examples:
        >>> from shardfold.nn.axis_group import OneRank  # it has all classes; a layer takes a link
        >>> hidden, head, targets = torch.randn(6, 8), torch.randn(100, 8), torch.arange(6)
        >>> loss = sf.nn.parallel_cross_entropy(hidden, head, targets, ranks=OneRank())
        >>> torch.allclose(loss, nn.functional.cross_entropy(hidden @ head.T, targets))
        True
    """
    if weight.shape[0] == classes or (ranks.size == 1 and classes is None):
        return chunked_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            chunk=chunk,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
        )
    who = "parallel_cross_entropy"
    check_head(who, hidden, weight, targets, bias, chunk, label_smoothing, reduction, softcap)
    classes, start = _place(who, weight, ranks, classes)
    flat = targets.reshape(-1)
    columns = _columns(flat, ignore_index, start, weight.shape[0], classes)
    dtype = _dtype(who, hidden, weight, bias)
    most = -(-classes // ranks.size)  # of any rank: chunks are the same on all
    rows, wanted = chunk or rows_at_once(flat.numel(), most, dtype, hidden.device.type), wanted_of(hidden, weight, bias)
    head = Head(rows, dtype, ignore_index, label_smoothing, reduction, softcap, wanted, ranks, classes, summed=summed)
    losses = losses_of(hidden.reshape(-1, hidden.shape[-1]), weight.view_as(weight), bias, flat, columns, head)
    return losses.view(targets.shape) if reduction == "none" else losses


@known_arguments
def parallel_margin_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ranks: AxisGroup,
    classes: int | None = None,
    scale: float = 64.0,
    angle: float = 0.5,
    cosine: float = 0.0,
    sample: float = 1.0,
    generator: torch.Generator | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy over cosines of embeddings and the centres of classes, with a margin for a row's own class.

    Logits are ``scale * cos(theta)``, and of the own class ``scale * (cos(theta + angle) - cosine)``: ArcFace (arXiv
    1801.07698) with ``angle``, CosFace (1801.09414) with ``angle=0, cosine=0.35``. ``sample=0.1`` computes, and gives
    gradients to, a tenth of a rank's classes in each call: those of the targets, and others at random (Partial FC,
    2203.15565).

    Args:
        hidden: ``(..., d)``, embeddings of any length, the same on all ranks.
        weight: ``(rows, d)``, centres of any length; of ``classes`` this rank's, as in :func:`parallel_cross_entropy`.
        targets: ``(...)``, integers from 0 to ``classes``, the same on all ranks.
        ranks: that have the other rows.
        classes: on all ranks; None: as many as here on each.
        scale: of logits, more than 0.
        angle: radians, from 0 to pi / 2.
        cosine: 0 or more.
        sample: share of this rank's classes, more than 0 and at most 1.
        generator: of the sampling, on the CPU; ranks may differ in it.
        chunk, ignore_index, reduction: see :func:`chunked_cross_entropy`.

    Returns:
        A scalar, or ``(...)`` for ``"none"``, in fp32 or fp64.

    Raises:
        ConfigError: an option, a shape or a dtype does not fit.
        UsageError: in backward with ``create_graph=True``.

    Examples:
        >>> from shardfold.nn.axis_group import OneRank  # it has all classes
        >>> hidden, centres, targets = torch.randn(6, 8), torch.randn(100, 8), torch.arange(6)
        >>> loss = sf.nn.parallel_margin_loss(hidden, centres, targets, ranks=OneRank(), angle=0.5)
        >>> loss.shape
        torch.Size([])
    """
    who = "parallel_margin_loss"
    check_head(who, hidden, weight, targets, None, chunk, 0.0, reduction, None)
    margin = margin_of(who, scale, angle, cosine, sample)
    classes, start = _place(who, weight, ranks, classes)
    flat = targets.reshape(-1)
    check_targets(flat, ignore_index, classes)
    columns = _columns(flat, ignore_index, start, weight.shape[0], classes)
    columns = columns.where(flat != ignore_index, -1)
    centres = weight.view_as(weight)
    if sample < 1:
        chosen = sampled_classes(columns, weight.shape[0], sample, generator)
        centres = centres.index_select(0, chosen)
        columns = torch.searchsorted(chosen, columns.clamp(min=0)).where(columns >= 0, -1)
    dtype = _dtype(who, hidden, weight, None)
    unit, centres = F.normalize(hidden.reshape(-1, hidden.shape[-1]), dim=1), F.normalize(centres, dim=1)
    most = -(-classes // ranks.size)  # of any rank: chunks are the same on all
    if sample < 1:
        most = min(most, round(most * sample) + flat.numel())
    rows, wanted = chunk or rows_at_once(flat.numel(), most, dtype, hidden.device.type), wanted_of(hidden, weight, None)
    head = Head(rows, dtype, ignore_index, 0.0, reduction, None, wanted, ranks, classes, margin)
    losses = losses_of(unit, centres, None, flat, columns, head)
    return losses.view(targets.shape) if reduction == "none" else losses


def margin_of(who: str, scale: float, angle: float, cosine: float, sample: float) -> Margin:
    """
    Raises:
        ConfigError: one of them, or the share of classes, is out of its range.
    """
    if not is_number(scale, 0, LARGE) or not scale:
        raise ConfigError(f"{who}: scale is {scale!r}, but must be more than 0 and finite.")
    if not is_number(angle, 0, math.pi / 2):
        raise ConfigError(f"{who}: angle is {angle!r}, but must be from 0 to pi / 2.")
    if not is_number(cosine, 0, LARGE):
        raise ConfigError(f"{who}: cosine is {cosine!r}, but must be 0 or more, and finite.")
    if not is_number(sample, 0, 1) or not sample:
        raise ConfigError(f"{who}: sample is {sample!r}, but must be more than 0 and at most 1.")
    return Margin(float(scale), float(angle), float(cosine))


def _place(who: str, weight: Tensor, ranks: AxisGroup, classes: int | None) -> tuple[int, int]:
    """The number of classes, and the first that is here.

    Raises:
        ConfigError: ``classes`` is no number of them, or this rank's rows are not its part.
    """
    rows = weight.shape[0]
    if classes is None:
        return rows * ranks.size, rows * ranks.rank
    if not is_integer(classes, 1):
        raise ConfigError(f"{who}: classes is {classes!r}, but must be a whole number, 1 or more.")
    start, stop = ranks.range(classes)
    if rows != stop - start:
        raise ConfigError(
            f"{who}: weight has {rows} rows on rank {ranks.rank} of {ranks.size}, whose part of {classes} classes is "
            f"{stop - start}."
        )
    return classes, start


def _columns(targets: Tensor, ignored: int, start: int, rows: int, classes: int) -> Tensor:
    """This rank's row of each target; -1 where others have it. What is no class indexes a row that is not there,
    which fails as in PyTorch where :func:`check_targets` does not look."""
    local = targets.long() - start
    local = local.where((local >= 0) & (local < rows), -1)
    return local.where(((targets >= 0) & (targets < classes)) | (targets == ignored), classes)


def sampled_classes(columns: Tensor, rows: int, share: float, generator: torch.Generator | None) -> Tensor:
    """Rows, in rising order: those of targets, and others up to the share."""
    order = torch.rand(rows, generator=generator).to(columns.device)
    order[columns[columns >= 0]] = 2.0
    own = int((order == 2.0).sum())
    return order.topk(max(own, round(rows * share), 1)).indices.sort().values


def _dtype(who: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Of logits and matrix products.

    Raises:
        ConfigError: the tensors have several, and no autocast is on.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if any(each is not None and each.dtype != hidden.dtype for each in (weight, bias)):
        raise ConfigError(
            f"{who} takes tensors of one dtype, but hidden is {hidden.dtype}, weight {weight.dtype}: cast them."
        )
    return hidden.dtype
