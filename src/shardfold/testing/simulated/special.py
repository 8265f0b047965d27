"""Operations that are the device's own: making tensors, copies between devices, reading one number, resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardfold.testing.simulated.device import SimulatedDevice
from shardfold.testing.simulated.memory import NAME, contiguous, elements

__all__ = ["SPECIAL", "resize"]


def _empty(
    sim: SimulatedDevice, size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any
) -> Tensor:
    stride = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return sim.allocate(size, stride, dtype or torch.get_default_dtype())


def _empty_strided(
    sim: SimulatedDevice, size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any
) -> Tensor:
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
    "aten::_fused_sdp_choice": _kernel_of_attention,
    "aten::is_set_to": _is_set_to,
}
"""By the name in the schema; each is handed the device first."""
