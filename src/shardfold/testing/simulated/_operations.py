"""Operations: one fallback for all of them runs each on the CPU, on the same memory, as work of the current stream.

    views         by the CPU's kernels, which do not touch memory
    others        the schema says what is read and written; kernels of the CPU compute
    results       tensors of the device, allocated on the current stream
    lagging       a result's shape comes from the meta device, its values later (late.py)

As on CUDA, a tensor of the CPU among those of the device is refused, but for single numbers and indices, and what the
host has to know (``item``, ``nonzero``) stops it.
"""

from __future__ import annotations

from typing import Any

from shardfold.testing.simulated._lag import put_off
from shardfold.testing.simulated.device import the_device
from shardfold.testing.simulated.operation import Operation
from shardfold.testing.simulated.signature import signature
from shardfold.testing.simulated.special import SPECIAL
from shardfold.torch_internals import CPU_KEYS

__all__ = ["fallback"]


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What PyTorch calls for every operation on tensors of the device."""
    known = signature(op)
    special = SPECIAL.get(known.name)
    if special is not None:
        return special(the_device(), *args, **kwargs)
    if known.view:
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    return _run(Operation(the_device(), op, known, args, kwargs))


def _run(operation: Operation) -> Any:
    """Runs it, or queues it; its result."""
    device, known = operation.device, operation.known
    late = put_off(operation) if device.queues.lags else None
    if late is not None:
        return late.value
    if known.stops_host:
        device.host_sync(operation.name)
    elif device.queues.lags:
        device.synchronize()  # nothing of the device's: this operation cannot be put off here
    got: list[Any] = []
    if device.queues.lags:
        got.append(operation.compute())
        device.note(operation.name, operation.reads, operation.writes)
    else:
        device.launch(operation.name, operation.reads, operation.writes, lambda: got.append(operation.compute()))
    return operation.finish(got[0])
