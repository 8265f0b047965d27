"""What Python cannot give PyTorch as a device's own, and replaces: resizing and sizes of storages, pinned memory,
generators, ``parameter.data = ...`` between devices, the stream of a backward, and what PyTorch offers for all kinds of
accelerators (``torch.Stream``, ``torch.Event``, ``torch.accelerator``).

Each replacement does what PyTorch does wherever our device is not concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor

from shardfold.testing.simulated._replaced import ReplacedFunction
from shardfold.testing.simulated.device import PROCESS, the_device
from shardfold.testing.simulated.memory import NAME, Allocation
from shardfold.testing.simulated.streams import SimulatedEvent, Stream
from shardfold.testing.simulated.unwinding import HELD
from shardfold.torch_internals import replace_backward, replace_data_check, swap_impl

__all__ = ["patch"]

PINNABLE = (
    "empty",
    "empty_like",
    "empty_strided",
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "full",
    "full_like",
    "rand",
    "randn",
    "arange",
    "tensor",
)


def patch() -> None:
    """Puts all of them in place, for good."""
    _storages()
    _pinned_memory()
    _generators()
    _data()
    _backward()
    _accelerators()


def _storages() -> None:
    kind: Any = torch.UntypedStorage
    resize, size, nbytes, resizable, cloned = kind.resize_, kind.size, kind.nbytes, kind.resizable, kind.clone

    def of(storage: Any) -> Allocation | None:
        return the_device().allocator.at(storage) if storage.device.type == NAME else None

    def resize_(self: Any, wanted: int) -> Any:
        if self.device.type != NAME:
            return resize(self, wanted)
        the_device().resize(self, int(wanted))
        return self

    def counted(count: Callable[[Any], int]) -> Callable[[Any], int]:
        @wraps(count)
        def bytes_of(self: Any) -> int:
            block = of(self)
            return 0 if block is not None and block.freed else count(self)

        return bytes_of

    def clone(self: Any) -> Any:
        return _bytes(self).clone().untyped_storage() if self.device.type == NAME else cloned(self)

    def can_resize(self: Any) -> bool:
        return self.device.type == NAME or resizable(self)

    make = kind.__new__

    def of_bytes(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != NAME:
            return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)
        values = args[0] if args else kwargs.get("size", 0)
        if isinstance(values, int):
            return torch.empty(values, dtype=torch.uint8, device=NAME).untyped_storage()
        return torch.tensor(values, dtype=torch.uint8, device=NAME).untyped_storage()

    kind.__new__ = staticmethod(of_bytes)
    kind.resize_, kind.size, kind.nbytes = resize_, counted(size), counted(nbytes)
    kind.resizable, kind.clone = can_resize, clone


def _bytes(storage: Any) -> Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=NAME).set_(storage, 0, (storage.nbytes(),), (1,))


def _pinned_memory() -> None:
    def pinning(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool | None = False, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return pinned(out) if pin_memory else out

        return made

    def pinned(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin a tensor on {tensor.device}: only memory of the CPU can be pinned")
        return the_device().allocator.pin(tensor)

    for name in PINNABLE:
        ReplacedFunction.put(torch, name, pinning(getattr(torch, name)), of_tensor=name.endswith("_like"))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
        ReplacedFunction.put(Tensor, name, pinning(getattr(Tensor, name)), of_tensor=True)

    def is_pinned(self: Tensor, device: Any = None) -> bool:
        return self.device.type == "cpu" and not PROCESS.forked and the_device().allocator.is_pinned(self)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        return self if is_pinned(self) else pinned(self.clone() if self.device.type == "cpu" else self)

    replaced: Any = Tensor
    replaced.is_pinned, replaced.pin_memory = is_pinned, pin_memory


def _generators() -> None:
    kind, replaced = torch.Generator, cast(Any, torch)

    def make(device: Any = "cpu") -> Any:
        return kind("cpu" if torch.device(device).type == NAME else device)  # in whose kernels numbers are drawn

    replaced.Generator = _standing_for(kind, make)


def _data() -> None:
    """A parameter moves between devices with ``.data = ...``, which PyTorch refuses for a device like ours: it is
    exchanged with one that is there already. So ``module.to(device)`` keeps its parameters, as on CUDA."""
    plain: Any = torch.Tensor.data
    replaced: Any = torch.nn.Parameter

    def crosses(a: Tensor, b: Tensor) -> bool:
        return {a.device.type, b.device.type} == {"cpu", NAME}

    def put(self: Tensor, value: Tensor) -> None:
        if not crosses(self, value):
            plain.__set__(self, value)
            return
        fresh = torch.nn.Parameter(value.new_empty(0), requires_grad=self.requires_grad)
        plain.__set__(fresh, value)  # not a parameter of `value`, which would share its count of versions
        swap_impl(self, fresh)

    def asked(compatible: Callable[[Tensor, Tensor], bool]) -> Callable[[Tensor, Tensor], bool]:
        @wraps(compatible)
        def is_compatible(a: Tensor, b: Tensor) -> bool:
            return (isinstance(a, torch.nn.Parameter) and crosses(a, b)) or compatible(a, b)

        return is_compatible

    replaced.data = property(plain.__get__, put)
    replace_data_check(asked)


def _backward() -> None:
    """The guard that Python can give PyTorch has no streams, so autograd does not pass them on to its threads."""

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if PROCESS.forked:  # of the CPU: the device is not there
                return run(*args, **kwargs)
            with the_device().backward(), HELD.raised():
                return run(*args, **kwargs)

        return backward

    replace_backward(around)


def _accelerators() -> None:
    replaced = cast(Any, torch)
    for kind, ours in ((torch.Stream, Stream), (torch.Event, SimulatedEvent)):
        setattr(replaced, kind.__name__, _standing_for(kind, partial(_made, kind, ours)))
    module, accelerator = torch.get_device_module(NAME), torch.accelerator
    same = (
        "synchronize",
        "current_stream",
        "set_stream",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "empty_cache",
    )
    for ours, theirs in (
        *zip(same, same, strict=True),
        ("current_device", "current_device_index"),
        ("set_device", "set_device_index"),
    ):
        if hasattr(accelerator, theirs):
            setattr(accelerator, theirs, getattr(module, ours))


def _made(kind: Any, ours: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    """One of ours for our device, which is the accelerator here."""
    if device is None and not args and "stream_id" not in kwargs:
        return ours(**kwargs)
    if device is not None and torch.device(device).type == NAME:
        return ours(device, *args, **kwargs)
    return kind(*(() if device is None else (device,)), *args, **kwargs)


def _standing_for(kind: Any, make: Callable[..., Any]) -> Any:
    """A class that stands for ``kind``, and whose instances ``make`` makes."""

    class Kind(type(kind)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(self, instance: Any) -> bool:
            return isinstance(instance, kind)

        def __subclasscheck__(self, subclass: type) -> bool:
            return issubclass(subclass, kind)

    return Kind(kind.__name__, (kind,), {"__module__": "torch"})
