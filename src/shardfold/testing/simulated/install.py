"""Makes the device of this process, once: PyTorch can be told of one such device, and never to forget it."""

from __future__ import annotations

import atexit
import ctypes
import os
from functools import partial
from typing import Any

import torch

from shardfold.errors import UsageError
from shardfold.testing.simulated.device import PROCESS, SimulatedDevice, the_device
from shardfold.testing.simulated.memory import NAME
from shardfold.torch_internals import SIMULATED, backward_without_context, lacking_for

__all__ = ["install", "is_supported"]


def is_supported() -> bool:
    """Whether this version of PyTorch has what the simulated device is made of."""
    return not lacking_for(SIMULATED)


def install() -> SimulatedDevice:
    """The device of this process, which it makes the first time.

    Raises:
        UsageError: this version of PyTorch lacks something that it needs, or has a device of this kind already, or a
            backward has run before.
    """
    if PROCESS.refused:
        raise UsageError(PROCESS.refused)
    if PROCESS.device is not None:
        return the_device()
    lost = lacking_for(SIMULATED)
    if lost:
        raise UsageError(
            f"PyTorch {torch.__version__} has no {', '.join(lost)}, of which the simulated device is made: "
            "install a version that docs/versions.md names."
        )
    from shardfold.testing.simulated._patches import patch  # what follows needs the names that were looked for
    from shardfold.testing.simulated.streams import Stream

    device = PROCESS.device = SimulatedDevice()
    try:
        _register()
    except BaseException:
        PROCESS.device = None
        raise
    device.default = Stream(stream_id=0)
    patch()
    _try_backward()
    atexit.register(_let_go)
    os.register_at_fork(after_in_child=_forked)
    return device


def _forked() -> None:
    """The threads of the device, and PyTorch's for it, are the parent's."""
    PROCESS.forked = True


def _let_go() -> None:
    """Autograd's thread of the device has let go of all that it ran, before the interpreter ends.

    That thread wakes the one that called backward first, and only then frees what it holds of Python's: where the
    interpreter ends meanwhile, Python ends the thread inside of a destructor, and so the process by SIGABRT. It takes
    one backward after another; of this last one it holds nothing of Python's.
    """
    if PROCESS.forked:  # that thread is the parent's
        return
    x = torch.ones(1, device=NAME, requires_grad=True)
    loss = x.mul(2).sum()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((x, loss)))  # so that this thread is never the last that holds them
    backward_without_context(loss)


def _try_backward() -> None:
    """PyTorch makes its threads for the backwards of devices in the first backward of a process, and never again."""
    x = torch.ones(1, device=NAME, requires_grad=True)
    try:
        x.mul(2).sum().backward()
    except RuntimeError as error:
        PROCESS.refused = (
            "simulated() has to be entered before the first backward of a process, in which PyTorch makes a thread for "
            'each device that there is: enter it earlier, or use run_ranks(fn, 1, device="sim", distributed=False).'
        )
        raise UsageError(PROCESS.refused) from error


ONE_KERNEL = ("native_layer_norm", "native_group_norm", "silu_backward", "mish_backward")
"""For which PyTorch has kernels made of other operations, which would come before the CPU's."""

_LIBRARIES: list[torch.library.Library] = []  # what they register goes when they do


def _register() -> None:
    from shardfold.testing.simulated._autocast import AUTOCAST
    from shardfold.testing.simulated._layers import CELLS, CONVOLUTIONS
    from shardfold.testing.simulated._module import device_module
    from shardfold.testing.simulated._operations import fallback
    from shardfold.testing.simulated.special import to_copy
    from shardfold.testing.simulated.unwinding import SimulatedDeviceGuard
    from shardfold.torch_internals import CPU_KEYS, register_device

    try:
        register_device(NAME, backend_module=device_module(), device_guard=SimulatedDeviceGuard())
    except RuntimeError as error:
        raise UsageError(
            f"The simulated device cannot be installed beside another one of its kind (PrivateUse1): {error}"
        ) from error
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    named = torch.library.Library("aten", "IMPL")

    def on_cpu(op: Any) -> Any:
        return lambda *args, **kwargs: op.redispatch(CPU_KEYS, *args, **kwargs)

    for name in ONE_KERNEL:
        op = getattr(torch.ops.aten, name).default
        named.impl(name, partial(fallback, op), "PrivateUse1")
    for name, kernel in CONVOLUTIONS.items():
        named.impl(name, partial(kernel, fallback), "PrivateUse1")
    for name, kernel in CELLS.items():
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            named.impl(name, kernel, key)
    moves = "_to_copy"
    named.impl(moves, partial(to_copy, the_device, getattr(torch.ops.aten, moves).default), "PrivateUse1")
    for overload in ("source_Storage", "source_Storage_storage_offset", "source_Tensor"):
        named.impl(f"set_.{overload}", on_cpu(getattr(torch.ops.aten.set_, overload)), "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # else it would be resolved first, by a copy
        named.impl("_copy_from", torch.library.fallthrough_kernel, key)
    for name, kernel in AUTOCAST.items():
        named.impl(name, kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend([everything, named])
    if torch.distributed.is_available():
        from shardfold.testing.simulated._group import register

        register()
