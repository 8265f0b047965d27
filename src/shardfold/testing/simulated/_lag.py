"""Operations of a device that lags: their results have shapes at once and values later.

Shapes and dtypes come from the meta device. It may promise others than the CPU gives, so the first time that an
operation has arguments of some dtypes and modes (flags, and which tensors are given) it is tried with zeros, or
ones; where both do not agree, it is tried so for all shapes that come. Random numbers that depend on no tensor are
drawn when they are queued. What the meta device does not know, and what takes neither zeros nor ones, runs at once and
waits for what was queued before, and so do results whose shapes depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfold.testing.simulated.nested import mapped
from shardfold.testing.simulated.operation import Operation
from shardfold.testing.simulated.regions import span
from shardfold.torch_internals import below_autograd

__all__ = ["LateResult", "put_off"]

_agree: dict[Hashable, bool | None] = {}
"""By operation, dtypes and modes: whether the meta device gives what the CPU does; None: it refuses both."""
_tried: dict[Hashable, Any] = {}
"""By operation and all arguments: what the CPU gives."""


class LateResult(NamedTuple):
    """Attributes:
    value: the operation's result.
    """

    value: Any


def put_off(operation: Operation) -> LateResult | None:
    """Queues the operation; None: it has to run now."""
    known = operation.known
    if known.stops_host or operation.hides_generator or _resizes(operation):
        return None
    if known.random and not operation.reads:
        _fill(operation)
        return LateResult(operation.result if known.aliased else None)
    shapes = _shapes(operation)
    return None if shapes is None else LateResult(_queue(operation, shapes))


# -- shapes


def _resizes(operation: Operation) -> bool:
    """Whether an ``out=`` that is empty would not stay so."""
    if not operation.known.out or all(tensor.numel() for tensor in operation.writes):
        return False
    args, kwargs = operation.on_meta(operation.args), operation.on_meta(operation.kwargs)
    before = mapped(_size, kwargs)
    try:
        operation.op(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return True
    return mapped(_size, kwargs) != before


def _size(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _shapes(operation: Operation) -> Any:
    """The results without their values; None where that cannot be known before."""
    if not operation.known.fresh:
        return ()
    args, kwargs = operation.on_meta(operation.args), operation.on_meta(operation.kwargs)
    try:
        promised = operation.as_results(operation.op(*args, **kwargs))
    except (NotImplementedError, RuntimeError):
        return None
    key = (operation.op, tuple(tensor.dtype for tensor in (*operation.reads, *operation.writes)), _modes(operation))
    if key not in _agree:
        given = _try(operation)
        _agree[key] = None if given is None else _layouts(given) == _layouts(promised)
    agree = _agree[key]
    return promised if agree else None if agree is None else _try_once(operation)


def _modes(operation: Operation) -> Hashable:
    """Arguments that tell what is computed, such as whether BatchNorm trains."""
    given = operation.known.given(operation.args, operation.kwargs)
    return tuple(value if isinstance(value, bool) else value is None for value in given)


def _layouts(results: Any) -> list[Any]:
    return [(value.dtype, value.shape, value.stride()) for value in _tensors(results)]


def _try_once(operation: Operation) -> Any:
    key = (operation.op, _described(operation.args), _described(operation.kwargs))
    if key not in _tried:
        _tried[key] = _try(operation)
    return _tried[key]


def _described(values: Any) -> Hashable:
    """What the layouts of results depend on."""
    if isinstance(values, dict):
        return tuple((name, _described(value)) for name, value in values.items())
    if isinstance(values, (list, tuple)):
        return tuple(_described(value) for value in values)
    if isinstance(values, Tensor):
        return values.dtype, values.shape, values.stride()
    return None if isinstance(values, torch.Generator) else values


def _try(operation: Operation) -> Any:
    """The results for zeros, or ones; None where both are refused."""
    for number in (0, 1):
        made = partial(_filled, number)
        args, kwargs = operation.on_cpu(operation.args, made), operation.on_cpu(operation.kwargs, made)
        args, kwargs = mapped(_unused, args), mapped(_unused, kwargs)
        try:
            with below_autograd(), torch.no_grad():
                given = operation.as_results(operation.op(*args, **kwargs))
        except RuntimeError:
            continue
        return mapped(lambda value: value.to("meta") if isinstance(value, Tensor) else value, given)
    return None


def _filled(number: int, tensor: Tensor) -> Tensor:
    size, stride = tensor.shape, tensor.stride()
    return torch.zeros(span(size, stride), dtype=tensor.dtype, device="cpu").fill_(number).as_strided(size, stride)


def _unused(value: Any) -> Any:
    return torch.Generator() if isinstance(value, torch.Generator) else value


# -- queueing


def _fill(operation: Operation) -> None:
    """Draws numbers that depend on no tensor now, and queues a copy of them."""
    alias, drawn = operation.device.allocator.alias, list[tuple[Tensor, Tensor]]()

    def stand_in(tensor: Tensor) -> Tensor:
        values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        drawn.append((alias(tensor), values))
        return values

    with below_autograd():
        operation.op(*operation.on_cpu(operation.args, stand_in), **operation.on_cpu(operation.kwargs, stand_in))

    def run() -> None:
        for target, values in drawn:
            target.copy_(values)

    operation.device.launch(operation.name, [], operation.writes, run)


def _queue(operation: Operation, shapes: Any) -> Any:
    device, known = operation.device, operation.known
    for k in known.fresh:
        operation.outputs[k] = mapped(lambda value: _like(operation, value), shapes[k])
    targets = _tensors([operation.outputs[k] for k in known.fresh])
    # Aliases are made now: the host may free the memory before this runs.
    alias = device.allocator.alias
    args, kwargs = operation.on_cpu(operation.args, alias), operation.on_cpu(operation.kwargs, alias)
    bare, call = [alias(target) for target in targets], _named(operation, args, kwargs)
    fresh, single, name = known.fresh, operation.single, operation.name  # not the operation, which holds its tensors

    def run() -> None:
        got = call()
        results = (got,) if single else got
        for target, value in zip(bare, _tensors([results[k] for k in fresh]), strict=True):
            if target.shape != value.shape:
                raise RuntimeError(f"{name} gave {tuple(value.shape)} where {tuple(target.shape)} was promised")
            target.copy_(value)

    device.launch(operation.name, operation.reads, [*operation.writes, *targets], run)
    return operation.result if known.aliased else None


def _named(operation: Operation, args: Any, kwargs: Any) -> Callable[[], Any]:
    """A call whose errors name the operation and where it was queued."""
    op, name, site = operation.op, operation.name, operation.device.here()

    def call() -> Any:
        with torch.no_grad():
            try:
                return op(*args, **kwargs)
            except Exception as error:
                raise RuntimeError(f"{name} of {site}: {error}") from error

    return call


def _like(operation: Operation, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return operation.device.allocate(value.shape, value.stride(), value.dtype)


def _tensors(values: Any) -> list[Tensor]:
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]
