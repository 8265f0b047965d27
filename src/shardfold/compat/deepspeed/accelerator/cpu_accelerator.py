"""The CPU; its memory is that of the process."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

import torch
from torch import Tensor

from shardfold.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

__all__ = ["CPU_Accelerator"]

PAGE = os.sysconf("SC_PAGE_SIZE")


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU, which has one device and does at once what it is told."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        return

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_SIZE", "0")) or 1

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def is_available(self) -> bool:
        return True

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def empty_cache(self) -> None:
        return

    def memory_allocated(self, device_index: int | None = None) -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.memory_allocated())

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """The system's count of a process's peak cannot be reset."""

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * PAGE

    def available_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * PAGE

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True
