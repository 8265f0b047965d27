"""Which ranks are parallel in which way: here all are data-parallel."""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.comm import world
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

mpu = None


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Experts are not split over ranks.

    Raises:
        UsageError: ``ep_size`` is not 1.
    """
    if ep_size != 1:
        raise UsageError(
            f"groups.initialize(ep_size={ep_size}): expert parallelism is not here, so ep_size is 1; experts train "
            "right as ordinary modules."
        )


def get_data_parallel_group() -> Any:
    return world.get_world_group()


def get_data_parallel_world_size() -> int:
    return world.get_world_size()


def get_data_parallel_rank() -> int:
    return world.get_rank()


def get_tensor_model_parallel_group() -> Any:
    """None: this rank alone."""


def get_tensor_model_parallel_world_size() -> int:
    return 1


def get_tensor_model_parallel_rank() -> int:
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    return world.get_rank()


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank

_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_tensor_model_parallel_world_size
_get_sequence_parallel_group = get_tensor_model_parallel_group
_get_sequence_parallel_world_size = get_tensor_model_parallel_world_size
_get_sequence_parallel_rank = get_tensor_model_parallel_rank
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_rank = get_data_parallel_rank
