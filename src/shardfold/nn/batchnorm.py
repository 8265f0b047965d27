"""Batch normalization over the batches of all ranks together.

PyTorch's ``torch.nn.SyncBatchNorm`` does the same on GPUs only. Mean and variance of the whole batch are put together
from each rank's own (Chan, Golub and LeVeque 1979, equation 2.1), in one collective of 2C + 1 numbers in forward and
one of 2C in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardfold.errors import ModelError
from shardfold.plan.checks import known_arguments
from shardfold.torch_internals import BatchNormBase

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@known_arguments
class SyncBatchNorm(BatchNormBase):
    """Batch normalization (arXiv 1502.03167) of ``(batch, channels, ...)`` by the statistics of all ranks' batches.

    In training outputs, gradients and running statistics are those of ``torch.nn.BatchNorm`` on the whole batch; ranks
    may have batches of different sizes, also none. Statistics of 16-bit inputs are taken, and normalization is
    computed, in fp32; the output has the input's dtype. Every rank runs it equally often in forward and in backward. In
    evaluation it normalizes by the running statistics, or, without any, by those of this rank's batch, and sends
    nothing.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as those of ``torch.nn.BatchNorm``.
        process_group: the ranks whose batches count as one; None: all.

    Examples:
        >>> norm = sf.nn.SyncBatchNorm(8)
        >>> tuple(norm(x).shape)
        (4, 8)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels takes (batch, {self.num_features}, ...), but the input "
                f"has the shape {tuple(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            wide, *parts = (_widen(t) for t in (input, self.running_mean, self.running_var, self.weight, self.bias))
            return F.batch_norm(wide, *parts, training=self.running_mean is None, eps=self.eps).to(input.dtype)
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        group = (self.process_group or dist.group.WORLD) if together else None
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, group)
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                new = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
                unbiased = var * (count / (count - 1).clamp(min=1))
                for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
                    running.mul_(1 - new).add_(value.to(running.dtype) * new)
        return output


@known_arguments
def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """``module`` with a :class:`SyncBatchNorm` in the place of every batch normalization inside, with the parameters,
    buffers, hooks and training mode of that.

    Returns:
        The module itself, or, if it is a batch normalization, the one in its place.

    Raises:
        ModelError: one is of a class of the user's, or lazy, so that its forward is not known; nothing is changed.

    Examples:
        >>> model = sf.nn.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        >>> type(model[1]).__name__
        'SyncBatchNorm'
    """
    for name, child in module.named_modules():
        if isinstance(child, BatchNormBase) and type(child) not in (*PLAIN, SyncBatchNorm):
            raise ModelError(
                f"{name or 'the module'!r} is of class {type(child).__name__}, which may normalize in a way of its "
                "own: make it a SyncBatchNorm by hand."
            )
    return _convert(module, process_group, {})


def _convert(module: nn.Module, process_group: Any, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    made = done[module] = module
    if isinstance(module, PLAIN):
        made = done[module] = SyncBatchNorm(0, affine=False, track_running_stats=False)
        made.__dict__.update(module.__dict__, process_group=process_group)
    for name, child in module.named_children():
        if (new := _convert(child, process_group, done)) is not child:
            setattr(module, name, new)
    return made


class _Normalize(torch.autograd.Function):
    """Returns the output, and the mean, biased variance ``(channels,)`` and number of values of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, channels = [0, *range(2, x.dim())], x.shape[1]
        wide = _widen(x)
        count = x.numel() // max(channels, 1)
        mean = wide.sum(dims) / max(count, 1)
        squares = (wide - _spread(mean, x)).square_().sum(dims)
        own = torch.cat([mean.new_full((1,), count), mean, squares]).double()  # fp32 counts to 2**24 only
        rows = own[None] if group is None else _gather(own, group)
        counts, means, squares = rows.split([1, channels, channels], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        var = (squares + counts * (means - mean).square()).sum(0) / total
        scale = (var + eps).rsqrt().to(wide.dtype)
        mean, var = mean.to(wide.dtype), var.to(wide.dtype)
        normalized = (wide - _spread(mean, x)).mul_(_spread(scale, x))
        if weight is not None and bias is not None:
            normalized.mul_(_spread(_widen(weight), x)).add_(_spread(_widen(bias), x))
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.group = group
        ctx.mark_non_differentiable(mean, var, total)
        return normalized.to(x.dtype), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, scale, total = ctx.saved_tensors
        dims, channels = [0, *range(2, x.dim())], x.shape[1]
        wide = _widen(grads[0])
        normalized = (_widen(x) - _spread(mean, x)).mul_(_spread(scale, x))
        sums = torch.cat([wide.sum(dims), (wide * normalized).sum(dims)])
        of_bias, of_weight = sums.split(channels)
        of_x = None
        if ctx.needs_input_grad[0]:
            whole = sums
            if ctx.group is not None:
                whole = sums.clone()
                dist.all_reduce(whole, group=ctx.group)
            by_mean, by_var = (whole / total.to(whole.dtype)).split(channels)
            if weight is not None:
                scale = scale * _widen(weight)
            of_x = (wide - _spread(by_mean, x)).sub_(normalized.mul_(_spread(by_var, x))).mul_(_spread(scale, x))
            of_x = of_x.to(x.dtype)
        if weight is None:
            return of_x, None, None, None, None
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


def _gather(own: Tensor, group: Any) -> Tensor:
    """Everybody's ``own``, ``(ranks, len(own))``."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """One value per channel, ``(channels,)``, in a shape that broadcasts with ``like``."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _widen(tensor: Any) -> Any:
    return tensor.float() if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16) else tensor
