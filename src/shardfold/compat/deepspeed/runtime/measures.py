"""What ``deepspeed.runtime.utils`` has besides: norms, overflow, sizes and kinds of parameters and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shardfold.compat.deepspeed.comm import world

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "align_dense_tensors",
    "compare_tensors_in_structures",
    "filter_empty_parameters",
    "get_grad_zeros",
    "get_inactive_params",
    "get_ma_status",
    "get_tensor_bytes",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
    "is_optimized_parameter",
    "mask_nan_or_inf_with_val_inplace",
    "maybe_loss_for_backward",
    "prefix_sum_inc",
    "torch_max_memory_reserved",
    "torch_memory_reserved",
]


class DummyOptim:
    """Groups of parameters without an update."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


class CheckOverflow:
    """Whether gradients are inf or NaN anywhere.

    Args:
        param_groups: lists of parameters.
        mpu: whose ``get_model_parallel_group()`` has further ranks to ask.
        zero_reduce_scatter: asks all ranks.
        deepspeed: unused; gradients are reduced when this is asked.
    """

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.mpu, self.zero_reduce_scatter, self.deepspeed = mpu, zero_reduce_scatter, deepspeed
        self.params = [p for group in param_groups for p in group] if param_groups else None

    def check(self, param_groups: Any = None) -> bool:
        """Of the groups given, or of those it was made with."""
        found = self.params if param_groups is None else [p for group in param_groups for p in group]
        return self.has_overflow(found or [])

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Whether a norm is none; with ``reduce_overflow`` or an ``mpu`` on any rank."""
        return self._anywhere(any(is_invalid_grad_norm(norm) for norm in norm_group), reduce_overflow)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Of this rank's gradients."""
        return any(p.grad is not None and bool(has_inf_or_nan(p.grad)) for p in params)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Of the gradients of the ranks that this was made for."""
        return self._anywhere(self.has_overflow_serial(params), self.zero_reduce_scatter)

    def _anywhere(self, here: bool, of_all: bool) -> bool:
        group = world.get_world_group() if of_all and self.mpu is None else None
        group = self.mpu.get_model_parallel_group() if self.mpu is not None else group
        if group is None:
            return here
        told = torch.tensor([float(here)], device=get_accelerator().current_device_name())
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=group)
        return bool(told.item())


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Whether a value is inf or NaN, as a tensor on the values' device."""
    values = x._values() if x.is_sparse else x
    if not values.numel():
        return torch.tensor(False, device=x.device)
    low, high = values.aminmax()
    return ~(low.isfinite() & high.isfinite())


def is_invalid_grad_norm(norm: Any) -> bool:
    """Whether a norm, or one of a tensor of them, is inf, NaN or negative."""
    values = norm.flatten().tolist() if isinstance(norm, Tensor) else [float(norm)]
    return not all(math.isfinite(value) and value >= 0 for value in values)


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of all values of tensors as one vector; with an ``mpu`` of its ranks' together; -1 for inf and NaN."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if mpu is not None and mpu.get_model_parallel_rank():
        tensors = [p for p in tensors if is_model_parallel_parameter(p)]
    each = torch.tensor([float(torch.linalg.vector_norm(p.detach().float(), norm_type)) for p in tensors] or [0.0])
    most = math.isinf(norm_type)
    total = (each.max() if most else (each**norm_type).sum()).to(get_accelerator().current_device_name())
    if mpu is not None:
        op = torch.distributed.ReduceOp.MAX if most else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(total, op, group=mpu.get_model_parallel_group())
    norm = total.item() if most else total.item() ** (1.0 / norm_type)
    return norm if math.isfinite(norm) else -1


def get_grad_zeros(parameters: Tensor | Iterable[Tensor], mpu: Any = None) -> float:
    """How many elements of gradients are 0; with an ``mpu`` of its ranks' together."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    zeros = sum(int((p.grad == 0).sum()) for p in tensors if p.grad is not None)
    if mpu is None:
        return float(zeros)
    told = torch.tensor([float(zeros)], device=get_accelerator().current_device_name())
    torch.distributed.all_reduce(told, group=mpu.get_model_parallel_group())
    return told.item()


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """The tensors, and zeros behind them so that there is a multiple of ``alignment`` elements."""
    missing = -sum(t.numel() for t in tensor_list) % alignment
    return [*tensor_list, *([tensor_list[0].new_zeros(missing)] if missing else [])]


def prefix_sum_inc(weights: Iterable[Any]) -> list[Any]:
    """``[3, 4, 5]`` -> ``[3, 7, 12]``."""
    found: list[Any] = []
    for weight in weights:
        found.append(found[-1] + weight if found else weight)
    return found


def get_tensor_bytes(item: Any) -> int:
    """Of a tensor, and of those in lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, (list, tuple, dict)):
        return sum(get_tensor_bytes(each) for each in (item.values() if isinstance(item, dict) else item))
    return 0


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether two lists or two dicts are equal, the tensors directly in them element by element."""
    if type(inputs1) is not type(inputs2) or not isinstance(inputs1, (list, dict)) or len(inputs1) != len(inputs2):
        return False
    if isinstance(inputs1, dict):
        return inputs1.keys() == inputs2.keys() and all(_equal(inputs1[key], inputs2[key]) for key in inputs1)
    return all(_equal(one, other) for one, other in zip(inputs1, inputs2, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other.to(one.device))
    return one == other


def filter_empty_parameters(params: Any) -> Any:
    """A list of parameters, or of groups, without those of no elements; a group without any goes too."""
    if not isinstance(params, (list, tuple)) or not params:
        return params
    if not isinstance(params[0], Mapping):
        return [p for p in params if p.numel()]
    groups = [{**group, "params": [p for p in group.get("params", ()) if p.numel()]} for group in params]
    return [group for group in groups if group["params"]]


def is_optimized_parameter(param: Any) -> bool:
    """Whether it needs a gradient and has elements."""
    return param.requires_grad and getattr(param, "ds_numel", param.numel()) > 0


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether tensor parallelism has marked it as split."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """The split parameters that are not gathered now."""
    from shardfold.compat.deepspeed.zero.status import ZeroParamStatus

    return [p for p in param_list if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Puts ``val`` in the place of inf and NaN."""
    input.masked_fill_(~input.isfinite(), val)


def maybe_loss_for_backward(value: Any) -> bool:
    """Whether it is a tensor of one element with a graph behind it."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def get_ma_status() -> int:
    """Bytes allocated on rank 0; 0 on others."""
    return 0 if world.is_initialized() and world.get_rank() else get_accelerator().memory_allocated()


def torch_memory_reserved(device_index: int | None = None) -> int:
    """Bytes that the device's allocator holds."""
    return get_accelerator().memory_reserved(device_index)


def torch_max_memory_reserved(device_index: int | None = None) -> int:
    """The most that the device's allocator has held."""
    return get_accelerator().max_memory_reserved(device_index)
