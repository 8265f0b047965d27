"""Helpers that scripts import from ``deepspeed.runtime.utils``."""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shardfold.compat.deepspeed.comm import world
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = [
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "copy_to_device",
    "empty_cache",
    "ensure_directory_exists",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_only_unique_item",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "see_memory_usage",
    "set_random_seed",
]

GIB = 1024**3
noop_context = nullcontext


def noop_decorator(func: Any) -> Any:
    """The function itself."""
    return func


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints on rank 0 what the device and the machine have in use; nothing unless ``force``."""
    if not force or (world.is_initialized() and world.get_rank() != 0):
        return
    gc.collect()
    device = get_accelerator()
    values = {
        "MA": device.memory_allocated(),
        "Max_MA": device.max_memory_allocated(),
        "CA": device.memory_reserved(),
        "Max_CA": device.max_memory_reserved(),
    }
    print(message)
    print("  ".join(f"{name} {value / GIB:.2f} GB" for name, value in values.items()))
    total, free = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    print(f"CPU Virtual Memory:  used = {(total - free) / GIB:.2f} GB, percent = {100 * (total - free) / total:.1f}%")
    device.reset_peak_memory_stats()


def empty_cache() -> None:
    """Gives back what the device's allocator keeps."""
    get_accelerator().empty_cache()


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The norm of the whole, of norms of its parts; inf if one of them is not finite or negative."""
    norms = [float(norm) for norm in norm_list]
    if not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        return float("inf")
    return math.sqrt(sum(norm**2 for norm in norms))


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """The norm of tensors as of one vector, fp32; -1 if it is not finite."""
    _data_parallel_only("get_global_norm_of_tensors", mpu, moe_ep_group)
    norm = get_total_norm([tensor.detach().float() for tensor in input_tensors], float(norm_type))
    return torch.where(norm.isfinite(), norm, -1.0)


def _data_parallel_only(call: str, mpu: Any, moe_ep_group: Any = None) -> None:
    """
    Raises:
        WrongArgument: gradients would have to be summed over other ranks too.
    """
    ranks = world.get_world_size() if world.is_initialized() else 1
    if moe_ep_group is not None or (mpu is not None and mpu.get_data_parallel_world_size() != ranks):
        name = "mpu" if moe_ep_group is None else "moe_ep_group"
        raise WrongArgument(f"{call}({name}=...): model and expert parallelism are not here; leave it out.")


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: float | Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> float | Tensor:
    """Scales tensors in place so that their norm is at most ``max_norm``; gives the norm that they had."""
    _data_parallel_only("clip_tensors_by_global_norm", mpu)
    norm = get_global_norm_of_tensors(input_tensors) if global_norm is None else global_norm
    coefficient = max_norm / (norm + eps)
    if coefficient < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(coefficient)
    return norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scales the gradients of whole parameters so that their norm is at most ``max_norm``, on every rank alike.

    An engine clips by itself, as the configuration's ``gradient_clipping`` says.

    Args:
        parameters: whose ``.grad`` are scaled.
        max_norm: of all of them.
        norm_type: the p of the norm.
        mpu: None, or one whose data-parallel ranks are all ranks.

    Returns:
        The norm before, the mean over the ranks.
    """
    _data_parallel_only("clip_grad_norm_", mpu)
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = get_total_norm([p.grad.float() for p in listed if p.grad is not None], float(norm_type))
    if world.is_initialized():
        norm = norm / world.get_world_size()
        torch.distributed.all_reduce(norm)
    clip_grads_with_norm_(listed, max_norm, norm)
    return norm


def set_random_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's generators."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def ensure_directory_exists(filename: str) -> None:
    """Makes the directory that the file is to be in."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def _mapped(item: Any, change: Callable[[Any], Any], wanted: Callable[[Any], bool]) -> Any:
    if wanted(item):
        return change(item)
    if isinstance(item, (list, tuple)):
        return (tuple if isinstance(item, tuple) else list)(_mapped(value, change, wanted) for value in item)
    if isinstance(item, dict):
        return {key: _mapped(value, change, wanted) for key, value in item.items()}
    return item


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """``item`` with those of its tensors that meet the criterion on ``device``."""
    return _mapped(item, lambda tensor: tensor.to(device), criterion_func)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """As :func:`copy_to_device`, but the tensors that meet the criterion stay the same objects."""

    def move(tensor: Tensor) -> Tensor:
        tensor.data = tensor.data.to(device)
        return tensor

    if criterion_func is None:
        return copy_to_device(item, device, lambda value: isinstance(value, Tensor))
    return _mapped(item, move, criterion_func)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The one value that all items are.

    Raises:
        RuntimeError: they are not one.
    """
    found = list(dict.fromkeys(items))
    if len(found) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {found}.")
    return found[0]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as it is written: ``"name(1, b='x')"``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of parts of about equal count, ``num_parts + 1`` of them; the first parts are the larger ones."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of parts, in order, whose heaviest is as light as it can be."""
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[i]: the heaviest part of the first i items in the parts so far, and where the last of them begins
    best = [(sums[i], 0) for i in range(count + 1)]
    begins = [[0] * (count + 1)]
    for part in range(2, num_parts + 1):
        best = [
            min((max(best[k][0], sums[i] - sums[k]), k) for k in range(part - 1, i)) if i >= part else (math.inf, 0)
            for i in range(count + 1)
        ]
        begins.append([k for _, k in best])
    bounds = [count]
    for row in reversed(begins):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]
