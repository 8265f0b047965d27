"""The loss of a language model's head without the logits of all rows at once.

Logits exist for a chunk of rows at a time, and the gradients of a chunk are computed while they do, so backward has
nothing to recompute and nothing of size rows x vocabulary is kept: the way of Liger Kernel (arXiv 2410.10989). Cut Your
Losses (arXiv 2411.09009) cuts the vocabulary as well, for a fourth matrix product of the same size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.errors import ConfigError, UsageError, did_you_mean
from shardfold.nn.axis_group import AxisGroup
from shardfold.plan.checks import described, is_integer, is_number, known_arguments
from shardfold.torch_internals import keeps_graph, untraced

__all__ = [
    "REDUCTIONS",
    "Head",
    "Margin",
    "by_chunks",
    "check_head",
    "check_targets",
    "chunked_cross_entropy",
    "losses_of",
    "no_class",
    "rows_at_once",
    "span_of",
    "wanted_of",
]

CHUNK_BYTES = {"cpu": 64 * 2**20}
"""Of a chunk's logits, by type of device. The more, the seldomer the weight and its gradient are read."""
OTHER_CHUNK_BYTES = 512 * 2**20
BLOCK = 2**22  # elements of the gradient of a 16-bit weight that are added to the sum at once
REDUCTIONS = ("mean", "sum", "none")
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
LARGE = sys.float_info.max
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@known_arguments
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` in a fraction of its memory.

    Losses, and the sums that make up the gradients of weight and bias, are fp32 for 16-bit inputs and under autocast,
    fp64 for fp64 ones. Gradients are computed in forward, where they are wanted at all, and scaled in backward; with
    ``reduction="none"`` what they are scaled by is not known before, and backward computes the logits again.

    Args:
        hidden: ``(..., d)``, what the head gets.
        weight: ``(vocab, d)``, of the head; may be tied, frozen, or split over ranks by an engine.
        targets: ``(...)``, integer classes. One that is none is refused on a CPU; elsewhere nothing waits to look at
            them, and it fails on the device, as in PyTorch.
        bias: ``(vocab,)``.
        chunk: rows whose logits exist at once. None: as many as fit 64 MiB on a CPU, 512 MiB on another device.
        ignore_index: rows with this target count neither in the loss nor in the mean.
        label_smoothing: from 0 to 1 (arXiv 1512.00567).
        reduction: ``"mean"`` over the rows that count (NaN if none does, as in PyTorch), ``"sum"``, or ``"none"``.
        softcap: logits are ``softcap * tanh(logits / softcap)`` (arXiv 2408.00118).

    Returns:
        A scalar, or ``(...)`` for ``"none"``, in fp32 or fp64.

    Raises:
        ConfigError: an option, a shape or a dtype does not fit.
        UsageError: in backward with ``create_graph=True``: there are no gradients of these gradients.

    Examples:
        >>> hidden, head = torch.randn(6, 8), torch.randn(100, 8)
        >>> targets = torch.arange(6)
        >>> loss = sf.nn.chunked_cross_entropy(hidden, head, targets, chunk=2)
        >>> torch.allclose(loss, nn.functional.cross_entropy(hidden @ head.T, targets))
        True
    """
    check_head("chunked_cross_entropy", hidden, weight, targets, bias, chunk, label_smoothing, reduction, softcap)
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        given = f"{dtype}, weight {weight.dtype}" + (f", bias {bias.dtype}" if bias is not None else "")
        raise ConfigError(f"chunked_cross_entropy takes tensors of one dtype, but hidden is {given}: cast them.")
    how = Head(
        rows=chunk or rows_at_once(targets.numel(), weight.shape[0], dtype, device),
        dtype=dtype,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        wanted=wanted_of(hidden, weight, bias),
    )
    # Through a torch operation, at which an engine gathers a weight that it has split.
    whole = weight.view_as(weight)
    flat = targets.reshape(-1)
    columns = flat.where(flat != ignore_index, 0).long()
    losses = losses_of(hidden.reshape(-1, hidden.shape[-1]), whole, bias, flat, columns, how)
    return losses.view(targets.shape) if reduction == "none" else losses


def wanted_of(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Of which of them there are to be gradients."""
    return tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in tensors)


class Margin(NamedTuple):
    """Makes of cosines logits: ``scale * cosine``, but of a row's own class ``scale * (cos(angle + more) - less)``.

    Where ``angle + more`` would pass pi the cosine goes on as a straight line, ``cosine - more * sin(more)``.
    """

    scale: float
    more: float
    less: float

    def bend(self, logits: Tensor, column: Tensor, here: Tensor, factor: Tensor | float) -> Tensor:
        """Cosines ``(rows, classes)``, or products that ``factor`` ``(classes,)`` makes ``scale`` times cosines, become
        logits in place; returns by what gradients of logits are multiplied besides ``factor`` where the own class is,
        ``(rows, 1)``."""
        near = 1 - torch.finfo(logits.dtype).eps
        logits.mul_(factor)
        cosine = logits.gather(1, column).div_(self.scale).clamp_(-near, near)
        sine = (1 - cosine.square()).sqrt_()
        inside = cosine > -math.cos(self.more)
        bent = cosine * math.cos(self.more) - sine * math.sin(self.more)
        bent = bent.where(inside, cosine - self.more * math.sin(self.more)) - self.less
        slope = (math.cos(self.more) + cosine / sine * math.sin(self.more)).where(inside, 1)
        logits.scatter_(1, column, bent.mul_(self.scale).where(here, logits.gather(1, column)))
        return slope.where(here, 1)


class Head(NamedTuple):
    """How losses are made of rows.

    Attributes:
        rows: whose logits exist at once.
        wanted: gradients of hidden, weight, bias.
        dtype: of logits and matrix products.
        ranks: that have the other classes; None: all are here.
        classes: on all of them.
        margin: where products are cosines.
        lengths: ``(rows of weight,)``, by which products are divided to be cosines; None: they are cosines. Gradients
            are those of the products.
        summed: whether the gradient of hidden is summed over the ranks.
    """

    rows: int
    dtype: torch.dtype
    ignore_index: int
    smoothing: float
    reduction: str
    softcap: float | None
    wanted: tuple[bool, ...]
    ranks: AxisGroup | None = None
    classes: int = 0
    margin: Margin | None = None
    summed: bool = True
    lengths: Tensor | None = None


class _CrossEntropy(torch.autograd.Function):
    """Saves the gradients of the sum of losses, or, where each row's loss is scaled on its own, what they are made of.

    What is saved for the sum has not been divided by the number of rows yet: in fp16 much of it would be 0.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, columns: Tensor, how: Head
    ) -> Tensor:
        ctx.how = how
        if how.reduction == "none":
            ctx.save_for_backward(hidden, weight, bias, targets, columns)
            return by_chunks(hidden, weight, bias, targets, columns, how._replace(wanted=(False,) * 3))[0]
        losses, grads = by_chunks(hidden, weight, bias, targets, columns, how)
        count = (targets != how.ignore_index).sum() if how.reduction == "mean" else losses.new_ones(())
        ctx.save_for_backward(*grads, count.clamp(min=1))
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise UsageError(
                "chunked_cross_entropy has no gradients of its gradients (create_graph=True): take "
                "F.cross_entropy(F.linear(hidden, weight), targets)."
            )
        ranks: AxisGroup | None = ctx.how.ranks if ctx.how.summed else None
        if ctx.how.reduction == "none":
            hidden, weight, bias, targets, columns = ctx.saved_tensors
            grads = by_chunks(hidden, weight, bias, targets, columns, ctx.how, outputs[0])[1]
            return *_summed(grads, ranks), None, None, None
        *grads, count = ctx.saved_tensors
        grads = _summed(grads, ranks)
        scale = outputs[0] / count
        again = keeps_graph()
        scaled = (each if each is None else each * scale if again else each.mul_(scale) for each in grads)
        return *scaled, None, None, None


def _summed(grads: Sequence[Tensor | None], ranks: AxisGroup | None) -> list[Tensor | None]:
    """Of the gradient of hidden each rank has what its classes contribute."""
    of_hidden, *rest = grads
    return [of_hidden if ranks is None or of_hidden is None else ranks.all_reduce(of_hidden), *rest]


@untraced
def losses_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, columns: Tensor, head: Head
) -> Tensor:
    """The losses of ``hidden`` ``(rows, d)``; ``columns`` ``(rows,)``: the row of ``weight`` that each target has,
    negative where another rank has it.

    Raises:
        ConfigError: a target on a CPU is no class.
    """
    check_targets(targets, head.ignore_index, head.classes or weight.shape[0])
    return _CrossEntropy.apply(hidden, weight, bias, targets, columns, head)  # pyright: ignore[reportReturnType]


@untraced
def check_targets(targets: Tensor, ignored: int, classes: int) -> None:
    """Of targets whose values are there without waiting: on a CPU, and not a plan's.

    Raises:
        ConfigError: one is no class.
    """
    if targets.device.type == "cpu" and type(targets) is Tensor:
        low, high = span_of(targets, ignored).tolist()
        if low < 0 or high >= classes:
            raise ConfigError(no_class(low, high, ignored, classes))


def span_of(targets: Tensor, ignored: int) -> Tensor:
    """The least and the largest of 0 and of the targets that count, ``(2,)``."""
    labels = targets.reshape(-1).long()
    return torch.stack(F.pad(labels.where(labels != ignored, 0), (0, 1)).aminmax())


def no_class(low: int, high: int, ignored: int, classes: int, where: str = "") -> str:
    """What there is to say of targets from ``low`` to ``high``."""
    return (
        f"a target{where} is {low if low < 0 else high}, but there are {classes} classes, 0 to {classes - 1}, and "
        f"{ignored} for a row that does not count: count the classes from 0, or give the head as many as there are."
    )


def by_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    columns: Tensor,
    how: Head,
    scales: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses ``(rows,)`` and the gradients of their sum, each row's scaled by ``scales`` ``(rows,)``."""
    of_hidden, of_weight, of_bias = how.wanted
    number, vocab = len(hidden), weight.shape[0]
    wide = torch.float32 if how.dtype in SIXTEEN_BITS else how.dtype
    weight = weight.to(how.dtype)
    bias = bias if bias is None else bias.to(how.dtype)
    # One memory for all chunks: the system would have to clear a fresh one each time.
    products = hidden.new_empty(min(how.rows, number), vocab, dtype=how.dtype)
    wides = products if wide == how.dtype else torch.empty_like(products, dtype=wide)
    losses = hidden.new_empty(number, dtype=wide)
    grads = [
        torch.empty_like(hidden, dtype=how.dtype) if of_hidden else None,
        _sums(weight, number, how.rows, wide) if of_weight else None,
        weight.new_zeros(vocab, dtype=wide) if of_bias else None,
    ]
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, number, how.rows):
            rows = slice(start, start + how.rows)
            part = hidden[rows].to(how.dtype)
            product, logits = products[: len(part)], wides[: len(part)]
            if bias is None:
                torch.mm(part, weight.t(), out=product)
            else:
                torch.addmm(bias, part, weight.t(), out=product)
            if logits is not product:
                logits.copy_(product)
            counts = targets[rows] != how.ignore_index
            losses[rows] = _rows_loss(logits, counts, columns[rows], how, None if scales is None else scales[rows])
            if any(how.wanted):
                slope = logits if logits is product else product.copy_(logits)
                _add(grads, rows, part, weight, slope, logits, number)
    return losses, grads


def _sums(weight: Tensor, number: int, rows: int, wide: torch.dtype) -> Tensor:
    """For the gradient of ``weight``; empty where one chunk has all rows and is written, not added."""
    alone = wide == weight.dtype and 0 < number <= rows
    return torch.empty_like(weight) if alone else weight.new_zeros(weight.shape, dtype=wide)


def _rows_loss(logits: Tensor, counts: Tensor, columns: Tensor, how: Head, scales: Tensor | None) -> Tensor:
    """Losses ``(rows,)`` of ``logits`` ``(rows, vocab)``, in whose place are then the gradients of the products."""
    certain, classes = 1 - how.smoothing, how.classes or logits.shape[1]
    here = (counts & (columns >= 0)).unsqueeze(1)
    column = (columns if how.ranks is None else columns.clamp(min=0)).unsqueeze(1)
    bend = slope = None
    if how.softcap is not None:
        logits.div_(how.softcap).tanh_()
        bend = 1 - logits.square() if any(how.wanted) else None
        logits.mul_(how.softcap)
    factor: Tensor | float = 1.0
    if how.margin is not None:
        factor = how.margin.scale if how.lengths is None else how.margin.scale / how.lengths
        slope = how.margin.bend(logits, column, here, factor)
    expected = logits.gather(1, column).mul_(certain)
    if how.ranks is not None:
        expected = expected.where(here, 0)
    if how.smoothing:
        expected += logits.sum(1, keepdim=True) * (how.smoothing / classes)
    top = logits.amax(1, keepdim=True)
    if how.ranks is not None:
        top = how.ranks.max(top)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    if how.ranks is not None:
        expected, total = how.ranks.all_reduce(torch.stack((expected, total))).unbind()
    losses = (total.log() + top - expected).squeeze(1).where(counts, 0)
    if any(how.wanted):
        scale = (counts.to(losses.dtype) if scales is None else scales.where(counts, 0)).unsqueeze(1)
        logits.mul_(scale / total)
        own = logits.gather(1, column) - (certain * scale).where(here, 0)
        logits.scatter_(1, column, own)  # scatter_add_ is not deterministic on CUDA
        if how.smoothing:
            logits.sub_(scale * (how.smoothing / classes))
        if bend is not None:
            logits.mul_(bend)
        if how.margin is not None and slope is not None:
            logits.scatter_(1, column, logits.gather(1, column) * slope).mul_(factor)
    return losses


def _add(
    grads: list[Tensor | None],
    rows: slice,
    part: Tensor,
    weight: Tensor,
    slope: Tensor,
    wide_slope: Tensor,
    number: int,
) -> None:
    """Into ``grads`` what a chunk contributes, whose products have the gradients ``slope``, of so many rows in all."""
    of_hidden, of_weight, of_bias = grads
    if of_hidden is not None:
        torch.mm(slope, weight, out=of_hidden[rows])
    if of_weight is not None and of_weight.dtype == part.dtype:
        torch.addmm(of_weight, slope.t(), part, beta=int(number > len(part)), out=of_weight)  # beta=0 reads nothing
    elif of_weight is not None:
        step = max(BLOCK // max(weight.shape[1], 1), 1)
        for begin in range(0, len(of_weight), step):
            of_weight[begin : begin + step] += slope[:, begin : begin + step].t() @ part
    if of_bias is not None:
        of_bias += wide_slope.sum(0)


def rows_at_once(number: int, vocab: int, dtype: torch.dtype, device: str) -> int:
    """The largest number of rows whose logits fit, evened out over the chunks."""
    each = vocab * (6 if dtype in SIXTEEN_BITS else dtype.itemsize)
    most = max(CHUNK_BYTES.get(device, OTHER_CHUNK_BYTES) // max(each, 1), 1)
    return max(math.ceil(number / math.ceil(number / most)), 1) if number else 1


def check_head(
    who: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    chunk: int | None,
    smoothing: float,
    reduction: str,
    softcap: float | None,
) -> None:
    """
    Raises:
        ConfigError: an option, a shape or a dtype does not fit.
    """
    for name, each in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not isinstance(each, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{who} takes tensors, but {name} is {described(each)}.")
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: {who} takes "
            "hidden (..., d) and weight (vocab, d)."
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype not in INTEGERS:
        raise ConfigError(
            f"targets are {targets.dtype} of shape {tuple(targets.shape)}, but must be integer classes of shape "
            f"{tuple(hidden.shape[:-1])}, one for each row of hidden."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias has shape {tuple(bias.shape)}, but must have {tuple(weight.shape[:1])}.")
    if chunk is not None and not is_integer(chunk, 1):
        raise ConfigError(f"chunk is {chunk!r}, but must be 1 row or more.")
    if not is_number(smoothing, 0, 1):
        raise ConfigError(f"label_smoothing is {smoothing!r}, but must be from 0 to 1.")
    if softcap is not None and not (is_number(softcap, 0, LARGE) and softcap):
        raise ConfigError(f"softcap is {softcap!r}, but must be more than 0 and finite.")
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction {reduction!r} is unknown.{did_you_mean(reduction, REDUCTIONS)}")
