"""Which ranks are parallel in which way: see :mod:`shardfold.compat.deepspeed.ranks`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from shardfold.compat.deepspeed.comm import world
from shardfold.compat.deepspeed.ranks import NOW
from shardfold.errors import UsageError

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Layers of experts say over how many ranks they are shared out.

    Raises:
        UsageError: ``ep_size`` is not 1.
    """
    if ep_size != 1:
        raise UsageError(
            f"groups.initialize(ep_size={ep_size}): give ep_size to deepspeed.moe.layer.MoE, which asks for the ranks."
        )


def get_data_parallel_group() -> Any:
    """Of the ranks that read other samples."""
    return NOW.ways.data_group


def get_data_parallel_world_size() -> int:
    return NOW.ways.data


def get_data_parallel_rank() -> int:
    return NOW.ways.data_rank


def get_tensor_model_parallel_group() -> Any:
    """Of the ranks that share layers; None: this rank alone."""
    return NOW.ways.tensor_group


def get_tensor_model_parallel_world_size() -> int:
    return NOW.ways.tensor


def get_tensor_model_parallel_rank() -> int:
    return NOW.ways.tensor_rank


def get_tensor_model_parallel_src_rank() -> int:
    """The first of the ranks that share layers with this one."""
    return world.get_rank() - NOW.ways.tensor_rank


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank

_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_tensor_model_parallel_world_size


def _get_sequence_parallel_group() -> Any:
    """Of the ranks that have parts of the same sequences; None: this rank alone."""
    return NOW.ways.sequence_group


def _get_sequence_parallel_world_size() -> int:
    return NOW.ways.sequence


def _get_sequence_parallel_rank() -> int:
    return NOW.ways.sequence_rank


def _get_sequence_data_parallel_group() -> Any:
    """Of the ranks that read other samples, or other parts of the same: those that share parameters."""
    return NOW.ways.reading_group


def _get_sequence_data_parallel_world_size() -> int:
    return NOW.ways.data * NOW.ways.sequence


def _get_sequence_data_parallel_rank() -> int:
    return NOW.ways.reading_rank


class _Groups(ModuleType):
    """What changes as engines are made is asked for each time."""

    @property
    def mpu(self) -> Any:
        return NOW.mpu

    @property
    def mesh_device(self) -> Any:
        return NOW.mesh_device


sys.modules[__name__].__class__ = _Groups
