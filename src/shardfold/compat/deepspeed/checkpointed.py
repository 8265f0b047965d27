"""What one call of ``deepspeed.checkpointing.checkpoint`` keeps of its arguments, for when it runs again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.activations.partitioned_inputs import Sliced
from shardfold.nn.axis_group import AxisGroup, Lengths

__all__ = ["CheckpointedCall", "GroupRanks", "is_cut"]


class GroupRanks(AxisGroup):
    """The ranks of a process group, of which each keeps a slice; they gather 1-D tensors of one length."""

    def __init__(self, group: Any) -> None:
        self._group = group
        super().__init__("", dist.get_world_size(group), dist.get_rank(group))

    def all_gather(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        full = tensor.new_empty(self.size * len(tensor))
        dist.all_gather(list(full.chunk(self.size)), tensor.contiguous(), group=self._group)
        return full

    def max(self, tensor: Tensor) -> Tensor:
        out = tensor.clone()
        dist.all_reduce(out, dist.ReduceOp.MAX, group=self._group)
        return out


def is_cut(tensor: Tensor, least: int) -> bool:
    """Whether slices of it are kept, as DeepSpeed's are: activations with one element per rank or more."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return plain and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel() >= least


class CheckpointedCall:
    """A function and its arguments, which runs now and once more in each backward.

    Args:
        function: to call.
        args, kwargs: with these.
        sliced: these one behind the other, with slices in their places, and what makes them whole; None: they are kept
            whole.
        on_host: what is kept waits in host memory.

    Attributes:
        kept: what a checkpoint is to keep; the first is for the device whose random numbers it keeps.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sliced: tuple[list[Any], Sliced] | None,
        on_host: bool,
    ) -> None:
        self._function, self._count, self._keys = function, len(args), list(kwargs)
        # The first run has what is given, which nobody keeps behind it.
        self._given: list[Any] | None = [*args, *kwargs.values()]
        kept, self._sliced = (self._given, None) if sliced is None else sliced
        self._places = [value.device if isinstance(value, Tensor) else None for value in kept]
        device = next((value.new_empty(0).detach() for value in kept if isinstance(value, Tensor)), None)
        self.kept = [device, *(map(_on_the_host, kept) if on_host else kept)]

    def __call__(self, device: Tensor | None, *values: Any) -> Any:
        here, self._given = self._given, None
        if here is None:
            here = [value if p is None else value.to(p) for value, p in zip(values, self._places, strict=True)]
            here = here if self._sliced is None else self._sliced.whole(here)
        self.kept = []
        count = self._count
        return self._function(*here[:count], **dict(zip(self._keys, here[count:], strict=True)))


def _on_the_host(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    return value.detach().cpu().requires_grad_(value.requires_grad)
