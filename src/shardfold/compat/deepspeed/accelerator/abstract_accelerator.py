"""What an accelerator is asked; the answers that are the same for CPU and CUDA are here."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ConfigError

__all__ = ["DeepSpeedAccelerator"]


class DeepSpeedAccelerator(ABC):
    """A kind of device and the module of torch that speaks for it. ``device_index``: None is the current one."""

    _name = ""
    _communication_backend_name = ""
    _compile_backend = "inductor"

    # -- the device

    @abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, or ``"cuda:1"`` of a given index."""

    @abstractmethod
    def device(self, device_index: int | None = None) -> Any:
        """A context in which that device is the current one."""

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Makes it the current one."""

    @abstractmethod
    def current_device(self) -> int:
        """The index of the current device."""

    @abstractmethod
    def current_device_name(self) -> str:
        """As tensors name it: ``"cuda:0"``, ``"cpu"``."""

    @abstractmethod
    def device_count(self) -> int:
        """How many this process sees."""

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Waits until the device has done what it was told."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether there is one."""

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when the call returns."""
        return False

    def use_host_timers(self) -> bool:
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        return self.is_synchronized_device()

    def communication_backend_name(self) -> str:
        """Of ``torch.distributed``."""
        return self._communication_backend_name

    # -- random numbers

    def random(self) -> Any:
        return torch.random

    @abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None: ...

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor: ...

    @abstractmethod
    def manual_seed(self, seed: int) -> Any: ...

    @abstractmethod
    def manual_seed_all(self, seed: int) -> Any: ...

    @abstractmethod
    def initial_seed(self) -> int: ...

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator: ...

    # -- streams and events; None where a device has none

    @property
    def Stream(self) -> Any:
        return None

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return None

    def default_stream(self, device_index: int | None = None) -> Any:
        return None

    @property
    def Event(self) -> Any:
        return None

    # -- memory, in bytes

    @abstractmethod
    def empty_cache(self) -> None: ...

    @abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int: ...

    @abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int: ...

    @abstractmethod
    def reset_max_memory_allocated(self, device_index: int | None = None) -> None: ...

    @abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int: ...

    @abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int: ...

    @abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]: ...

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int: ...

    @abstractmethod
    def available_memory(self, device_index: int | None = None) -> int: ...

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.reset_max_memory_allocated(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        self.reset_max_memory_allocated(device_index)

    # -- dtypes

    @abstractmethod
    def is_bf16_supported(self) -> bool: ...

    @abstractmethod
    def is_fp16_supported(self) -> bool: ...

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        sixteen = {torch.float16: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float32, *(dtype for dtype, there in sixteen.items() if there)]

    def _tensor_type(self, name: str) -> Any:
        return getattr(torch, name)

    @property
    def BFloat16Tensor(self) -> Any:
        return self._tensor_type("BFloat16Tensor")

    @property
    def ByteTensor(self) -> Any:
        return self._tensor_type("ByteTensor")

    @property
    def DoubleTensor(self) -> Any:
        return self._tensor_type("DoubleTensor")

    @property
    def FloatTensor(self) -> Any:
        return self._tensor_type("FloatTensor")

    @property
    def HalfTensor(self) -> Any:
        return self._tensor_type("HalfTensor")

    @property
    def IntTensor(self) -> Any:
        return self._tensor_type("IntTensor")

    @property
    def LongTensor(self) -> Any:
        return self._tensor_type("LongTensor")

    # -- ranges in a profile, graphs

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return None

    def range_pop(self, domain: Any = None) -> Any:
        return None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def is_triton_supported(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return False

    def create_graph(self) -> Any:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        return

    # -- host memory and placement

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """The tensor in page-locked memory, where the device can make use of it."""
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether the tensor is on this kind of device."""
        return tensor.device.type == self._name

    # -- compilation, launching

    def get_compile_backend(self) -> str:
        """Of ``torch.compile``."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Chooses it.

        Raises:
            ConfigError: torch has no such backend.
        """
        known = torch._dynamo.list_backends(exclude_tags=())  # pyright: ignore[reportPrivateImportUsage]
        if backend not in known:
            raise ConfigError(f"{backend!r} is not a backend of torch.compile: it is one of {', '.join(known)}.")
        self._compile_backend = backend

    def export_envs(self) -> list[str]:
        """Beginnings of the names of environment variables that a launcher hands on."""
        return []

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Writes the devices that a process may see into its environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def op_builder_dir(self) -> str:
        """The package of the builders of compiled operators."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """A builder, such as ``"CPUAdamBuilder"``, which answers and builds nothing; None for an unknown name."""
        kind = self.get_op_builder(class_name)
        return kind() if kind is not None else None

    def get_op_builder(self, class_name: str) -> Any:
        """Its class; None for an unknown name."""
        from shardfold.compat.deepspeed.ops.op_builder.builder import CLASSES

        return CLASSES.get(class_name)

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension
