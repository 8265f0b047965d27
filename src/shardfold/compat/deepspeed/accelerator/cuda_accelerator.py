"""CUDA devices, by ``torch.cuda``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, cuda

from shardfold.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shardfold.torch_internals import cuda_lazy_call

__all__ = ["CUDA_Accelerator"]


class CUDA_Accelerator(DeepSpeedAccelerator):
    """NVIDIA's and AMD's GPUs."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return cuda.device(cuda.current_device() if device_index is None else device_index)

    def set_device(self, device_index: int) -> None:
        cuda.set_device(device_index)

    def current_device(self) -> int:
        return cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{cuda.current_device()}"

    def device_count(self) -> int:
        return cuda.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        cuda.synchronize(device_index)

    def is_available(self) -> bool:
        return cuda.is_available()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return cuda.get_rng_state("cuda" if device_index is None else device_index)

    def manual_seed(self, seed: int) -> Any:
        return cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return cuda.default_generators[device_index]

    @property
    def Stream(self) -> Any:
        return cuda.Stream

    def stream(self, stream: Any) -> Any:
        return cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return cuda.default_stream(device_index)

    @property
    def Event(self) -> Any:
        return cuda.Event

    def empty_cache(self) -> None:
        cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return cuda.max_memory_allocated(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return cuda.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return cuda.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return cuda.get_device_properties(cuda.current_device() if device_index is None else device_index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        return cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def _tensor_type(self, name: str) -> Any:
        return getattr(cuda, name)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return cuda.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        return cuda_lazy_call(callback)

    def is_triton_supported(self) -> bool:
        return cuda.get_device_capability()[0] >= 8

    def is_current_stream_capturing(self) -> bool:
        return cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        return cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor.pin_memory()

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"]
