"""``deepspeed.utils.bwc``: what an ``mpu`` object says, by whichever of its generations of names it has."""

from __future__ import annotations

from typing import Any

__all__ = [
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
]


def _first(mpu: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    for name in names if mpu is not None else ():
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return otherwise


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """0 without an ``mpu``."""
    return _first(mpu, ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank"), 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """1 without an ``mpu``."""
    names = ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size", "get_model_parallel_world_size")
    return _first(mpu, names, 1)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """None without an ``mpu``."""
    names = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    return _first(mpu, names, None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """1 without an ``mpu``."""
    return _first(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1)


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """None without an ``mpu``."""
    return _first(mpu, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"), None)
