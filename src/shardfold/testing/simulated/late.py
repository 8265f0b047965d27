"""Operations of a device that lags: their results have shapes at once and values later.

Shapes and dtypes come from the meta device. It may promise others than the CPU gives, so the first time that an
operation has arguments of some dtypes and modes (flags, and which tensors are given) it is computed at once and both
are compared; what does not agree is never put off. Neither are random numbers, nor results whose shapes depend on
values.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfold.testing.simulated.nested import mapped
from shardfold.testing.simulated.operation import Operation

__all__ = ["Late", "put_off"]

_agree: dict[Hashable, bool] = {}  # by operation, dtypes and modes: whether the meta device gives what the CPU does


class Late(NamedTuple):
    """Attributes:
    value: the operation's result.
    """

    value: Any


def put_off(operation: Operation) -> Late | None:
    """Queues the operation; None: it has to run now."""
    known = operation.known
    if known.stops_host or known.random or not all(tensor.numel() for tensor in operation.writes):
        return None
    shapes = _shapes(operation)
    if shapes is None:
        return None
    key = (operation.op, tuple(tensor.dtype for tensor in (*operation.reads, *operation.writes)), _modes(operation))
    if not known.fresh:
        _agree[key] = True
    if key not in _agree:
        return Late(_compared(operation, shapes, key))
    return Late(_queue(operation, shapes)) if _agree[key] else None


def _modes(operation: Operation) -> Hashable:
    """Arguments that tell what is computed, such as whether BatchNorm trains."""
    given = operation.known.given(operation.args, operation.kwargs)
    return tuple(value if isinstance(value, bool) else value is None for value in given)


def _shapes(operation: Operation) -> Any:
    """The results on the meta device; None where that does not know the operation."""
    if not operation.known.fresh:
        return ()
    args, kwargs = operation.on_meta(operation.args), operation.on_meta(operation.kwargs)
    try:
        return operation.as_results(operation.op(*args, **kwargs))
    except (NotImplementedError, RuntimeError):
        return None


def _compared(operation: Operation, shapes: Any, key: Hashable) -> Any:
    operation.device.synchronize()
    got = operation.compute()
    real = _tensors(operation.as_results(got))
    _agree[key] = all(
        (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        for x, y in zip(_tensors(shapes), real, strict=True)
    )
    operation.device.note(operation.name, operation.reads, operation.writes)
    return operation.finish(got)


def _queue(operation: Operation, shapes: Any) -> Any:
    device, known = operation.device, operation.known
    for k in known.fresh:
        operation.outputs[k] = mapped(lambda value: _like(operation, value), shapes[k])
    targets = _tensors([operation.outputs[k] for k in known.fresh])
    # Aliases are made now: the host may free the memory before this runs.
    alias = device.allocator.alias
    args, kwargs = operation.on_cpu(operation.args, alias), operation.on_cpu(operation.kwargs, alias)
    bare, op, site = [alias(target) for target in targets], operation.op, device.here()
    single, fresh, name = operation.single, known.fresh, operation.name

    def run() -> None:
        with torch.no_grad():
            try:
                got = op(*args, **kwargs)
            except Exception as error:
                raise RuntimeError(f"{name} of {site}: {error}") from error
            results = (got,) if single else got
            for target, value in zip(bare, _tensors([results[k] for k in fresh]), strict=True):
                target.copy_(value)

    device.launch(name, operation.reads, [*operation.writes, *targets], run)
    return operation.result if known.aliased else None


def _like(operation: Operation, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return operation.device.allocate(value.shape, value.stride(), value.dtype)


def _tensors(values: Any) -> list[Tensor]:
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]
