"""Reading and writing whole, or this rank's part of, the fp32 copy, the gradient and the optimizer's state.

Every rank calls each of these with the same parameter, also those of the local forms: an engine lays parameters out in
another way than DeepSpeed, so that a part has to travel. They work under every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.comm.coalesced import complete
from shardfold.compat.deepspeed.zero.attributes import part_size, place_of
from shardfold.engine.engine import Engine, engine_of
from shardfold.errors import ModelError
from shardfold.plan.layout import DATA_AXES
from shardfold.sharding.registry import name_in
from shardfold.sharding.sums import Sums
from shardfold.sharding.whole_segments import SegmentSlice, gather_slices

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


# -- whole ----------------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole parameter as the optimizer has it, in fp32, on the device; None if it is frozen or no engine's."""
    return _read(param, "master")


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Writes ``value``, with as many elements, into the fp32 copy and the parameter; rank 0's is everyone's."""
    _write(param, "master", value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The whole state of that name, such as ``"exp_avg"``; None if the parameter is frozen or no engine's.

    Raises:
        ConfigError: (a ``ValueError``) the optimizer has no such state.
    """
    return _read(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Writes the whole state of that name; rank 0's is everyone's."""
    _write(param, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient: the mean over ranks and micro-batches, not clipped, without the loss scale; between the
    micro-batches of a step, what has come of that. None behind a step, for what no rank used, and for what is frozen.
    """
    engine = engine_of(param)
    if engine is None:
        return param.grad
    if not engine.micro_batch or engine.gradients_ready:
        return _read(param, "grads") if engine.micro_batch else None
    return _so_far(engine, param) if _trains(engine, param) else None


def _so_far(engine: Engine, param: nn.Parameter) -> Tensor | None:
    """The gradient between the micro-batches of a step: where ranks keep their own until the last, their sum."""
    what = f"the gradient so far of {name_in(engine.sharded, param)!r}"
    engine.sharded.gate.meet(what)
    segment, slot = place_of(engine.sharded, param)
    unit = next(unit for unit in engine.units if segment in unit.trainable)
    used = engine.sharded.gate.used()
    if not used[unit.name][unit.trainable.index(segment)][slot]:
        return None
    values = segment.grads
    if values is None:  # in a file
        shard = segment.shard("grads")
        assert shard is not None
        values = shard.read()
    with torch.no_grad():
        if values.numel() < segment.spec.length:
            shard = values.float() * segment.unscale
            whole = gather_slices(engine.sharded.comm, [SegmentSlice(segment, slot, shard)], what)[0]
        else:
            whole = segment.views_of(values)[slot].float() * segment.unscale
            if unit.gradients.sums is Sums.OWN and engine.world_size > 1:
                agreement = engine.sharded.comm.agreement
                with agreement.uninterrupted():
                    agreement.issue(what)
                    agreement.wait(dist.all_reduce(whole, group=engine.mesh.everyone, async_op=True))
    return whole


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Writes the whole gradient that the step will use; rank 0's is everyone's."""
    if engine_of(param) is not None:
        _write(param, "grads", value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replaces each whole gradient by ``update_func(gradient, parameter)``, gathering all of them at once."""
    held: dict[Engine, list[nn.Parameter]] = {}
    for param in param_list:
        engine = engine_of(param)
        if engine is not None and _trains(engine, param):
            held.setdefault(engine, []).append(param)
        elif engine is None and param.grad is not None:
            param.grad.copy_(update_func(param.grad, param))
    for engine, params in held.items():
        names = [name_in(engine.sharded, param) for param in params]
        with engine.gathered(*names, of="grads", write=True) as found, torch.no_grad():
            whole: dict[str, Any] = {names[0]: found} if len(names) == 1 else found
            for name, param in zip(names, params, strict=True):
                if whole[name] is not None:
                    whole[name].copy_(update_func(whole[name], param))


def _trains(engine: Engine, param: nn.Parameter) -> bool:
    return engine.optimizer is not None and any(
        other is param for unit in engine.units for segment in unit.trainable for other in segment.parameters
    )


def _read(param: nn.Parameter, of: str) -> Tensor | None:
    engine = engine_of(param)
    if engine is None or not _trains(engine, param):
        return None
    with engine.gathered(name_in(engine.sharded, param), of=of) as value:
        return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype != torch.float64 else value


def _write(param: nn.Parameter, of: str, value: Tensor) -> None:
    engine = engine_of(param)
    if engine is None or not _trains(engine, param):
        return
    if value.numel() != param.numel():
        raise ModelError(
            f"{name_in(engine.sharded, param)!r} has {param.numel()} elements, but the value to set has "
            f"{value.numel()}: give a tensor of shape {tuple(param.shape)}."
        )
    with engine.gathered(name_in(engine.sharded, param), of=of, write=True) as whole, torch.no_grad():
        if whole is not None:
            whole.copy_(value.view(param.shape))


# -- this rank's part -------------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of :func:`safe_get_full_fp32_param`: ``(ceil(numel / ranks),)``, padded with zeros."""
    return _own(param, safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Each rank writes its part, ``(ceil(numel / ranks),)``."""
    _write_parts(param, "master", value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of :func:`safe_get_full_optimizer_state`."""
    return _own(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Each rank writes its part of the state of that name."""
    _write_parts(param, optim_state_key, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of :func:`safe_get_full_grad`."""
    return _own(param, safe_get_full_grad(param))


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Each rank writes its part of the gradient."""
    _write_parts(param, "grads", value)


def _own(param: nn.Parameter, whole: Tensor | None) -> Tensor | None:
    engine = engine_of(param)
    if whole is None or engine is None:
        return whole
    size = part_size(param)
    part = whole.new_zeros(size)
    here = whole.reshape(-1)[engine.rank * size : (engine.rank + 1) * size]
    part[: here.numel()].copy_(here)
    return part


def _write_parts(param: nn.Parameter, of: str, value: Tensor) -> None:
    engine = engine_of(param)
    if engine is None or not _trains(engine, param):
        return
    size, name = part_size(param), name_in(engine.sharded, param)
    if value.numel() != size:
        raise ModelError(
            f"the part of {name!r} on each of {engine.world_size} ranks has {size} elements, but the value to set has "
            f"{value.numel()}."
        )
    what = f"the parts of {name!r} to set"
    engine.sharded.gate.meet(what, follow=True)
    flat = torch.empty(size * engine.world_size, dtype=torch.float32, device=engine.device)
    flat[engine.rank * size : (engine.rank + 1) * size].copy_(value.reshape(-1))
    complete(engine.sharded.comm, [flat], DATA_AXES, what)
    _write(param, of, flat[: param.numel()])
