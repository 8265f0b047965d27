"""Operations that are the device's own: making tensors, copies between devices, reading one number, resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import UsageError
from shardfold.testing.simulated.device import SimulatedDevice
from shardfold.testing.simulated.memory import NAME, contiguous, elements
from shardfold.torch_internals import made_of_others

__all__ = ["SPECIAL", "resize", "to_copy"]


def _one(device: torch.device | None) -> None:
    if device is not None and device.index not in (None, 0):
        raise UsageError(f"device='{device}': a process has one simulated device, {NAME}:0.")


def _empty(
    sim: SimulatedDevice,
    size: Sequence[int],
    *,
    dtype: Any = None,
    memory_format: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    _one(device)
    stride = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return sim.allocate(size, stride, dtype or torch.get_default_dtype())


def _empty_strided(
    sim: SimulatedDevice, size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    _one(device)
    return sim.allocate(size, stride, dtype or torch.get_default_dtype())


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _copy_from(sim: SimulatedDevice, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    alias = sim.allocator.alias
    if source.device.type != NAME:
        _to_device(sim, source, target, non_blocking)
    elif target.device.type != NAME:
        _to_host(sim, source, target, non_blocking)
    else:
        sim.launch("copy", [source], [target], partial(_copy, alias(target), alias(source)))
    return target


def _to_device(sim: SimulatedDevice, source: Tensor, target: Tensor, non_blocking: bool) -> None:
    pinned = non_blocking and sim.allocator.is_pinned(source)
    there = sim.allocator.alias(target)
    if pinned:
        sim.launch("copy from pinned memory", [source], [target], partial(_copy, there, source))
        return
    values = source.clone() if sim.queues.lags else source
    sim.launch("copy from the host", [], [target], partial(_copy, there, values))
    sim.host_sync("copy from the host's pageable memory" if non_blocking else "copy from the host")


def _to_host(sim: SimulatedDevice, source: Tensor, target: Tensor, non_blocking: bool) -> None:
    here = sim.allocator.alias(source)
    if non_blocking and sim.allocator.is_pinned(target):
        sim.launch("copy to pinned memory", [source], [target], partial(_copy, target, here))
        return
    sim.launch("copy to the host", [source], [], partial(_copy, target, here))
    sim.host_sync("copy to the host")


def to_copy(found: Callable[[], SimulatedDevice], op: Any, source: Tensor, /, **how: Any) -> Tensor:
    """``Tensor.to``. What goes to the host and is not waited for has pinned memory there, as on CUDA."""
    target = how.get("device")
    if not how.get("non_blocking") or target is None or torch.device(target).type != "cpu":
        return made_of_others(op, source, **how)
    meta = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    like = op(meta, **{**how, "device": "meta", "pin_memory": None})
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    if made.dtype != source.dtype:
        source = source.to(made.dtype)
    return found().allocator.pin(made).copy_(source, non_blocking=True)


def _item(sim: SimulatedDevice, tensor: Tensor) -> Any:
    sim.launch("item", [tensor], [], lambda: None)
    sim.host_sync("item")
    return sim.allocator.alias(tensor).item()


def _record_stream(sim: SimulatedDevice, tensor: Tensor, stream: Any) -> None:
    sim.record_stream(tensor, stream.stream_id)


def resize(sim: SimulatedDevice, tensor: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    """``Tensor.resize_``: in place where its storage has room, else with a new storage."""
    size = [int(n) for n in size]
    storage = tensor.untyped_storage()
    if (int(tensor.storage_offset()) + elements(size)) * tensor.itemsize > storage.nbytes():
        fresh, old = sim.allocate(size, None, tensor.dtype), tensor.detach()
        if tensor.numel() and tensor.is_contiguous():  # what it had stays
            fresh.view(-1)[: tensor.numel()].copy_(old.view(-1))
        return tensor.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())
    return tensor.set_(storage, int(tensor.storage_offset()), size, contiguous(size))


def _dropout(_: SimulatedDevice, x: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    """As the CPU's, which draws from a generator that nobody can choose."""
    mask = torch.empty(x.shape, dtype=torch.bool, device=NAME)
    if train is False:
        return x.clone(), mask.fill_(True)
    mask.bernoulli_(1 - p)
    return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def _kernel_of_attention(sim: SimulatedDevice, *_: Any, **__: Any) -> int:
    return 0  # the one made of other operations


def _is_set_to(sim: SimulatedDevice, a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::empty": _empty,
    "aten::empty_strided": _empty_strided,
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from,
    "aten::_local_scalar_dense": _item,
    "aten::record_stream": _record_stream,
    "aten::resize_": resize,
    "aten::native_dropout": _dropout,
    "aten::_fused_sdp_choice": _kernel_of_attention,
    "aten::is_set_to": _is_set_to,
}
"""By the name in the schema; each is handed the device first."""
