"""Steps of DeepSpeed's optimizers for the host over 16-bit parameters, which are computed in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardfold.optim.guard import is_guarded

__all__ = ["step_in_fp32"]


def step_in_fp32(
    optimizer: Optimizer, step: Callable[[], Any], closure: Callable[[], Any] | None, *, fp32_states: bool
) -> Any:
    """The ``step`` of an optimizer, inside of :func:`_computed_in_fp32`, behind ``closure``, whose value it gives."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with _computed_in_fp32(optimizer, fp32_states=fp32_states):
        step()
    return loss


@contextmanager
def _computed_in_fp32(optimizer: Optimizer, *, fp32_states: bool) -> Iterator[None]:
    """Inside, fp32 copies stand for bf16 and fp16 parameters that have gradients, with gradients and states in fp32.
    Behind it parameters have their values, rounded to the nearest; and so have states, unless they are to stay
    ``fp32_states``. An engine's optimizer is left alone: its precision says of what dtype states are."""
    own = [group["params"] for group in optimizer.param_groups]
    copies = {} if is_guarded(optimizer) else {p: _copy(p) for params in own for p in params if _is_narrow(p)}
    for parameter, copy in copies.items():
        _move(optimizer, parameter, copy, torch.float32)
    try:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = [copies.get(p, p) for p in params]
        yield
        with torch.no_grad():
            for parameter, copy in copies.items():
                parameter.copy_(copy)
    finally:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = params
        for parameter, copy in copies.items():
            _move(optimizer, copy, parameter, torch.float32 if fp32_states else parameter.dtype)


def _is_narrow(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.dtype in (torch.bfloat16, torch.float16)


def _copy(parameter: Tensor) -> Tensor:
    copy = parameter.detach().float()
    copy.grad = parameter.grad.float() if parameter.grad is not None else None
    return copy


def _move(optimizer: Optimizer, source: Tensor, target: Tensor, dtype: torch.dtype) -> None:
    """The state of ``source`` becomes that of ``target``, what has a value for each element in ``dtype``."""
    if (state := optimizer.state.pop(source, None)) is None:
        return
    for name, value in state.items():
        if name != "step" and isinstance(value, Tensor) and value.shape == source.shape:
            state[name] = value.to(dtype)
    optimizer.state[target] = state
