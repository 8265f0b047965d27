"""The ``mpu`` of Ulysses: which ranks have parts of the same sequences."""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.ranks import NOW

__all__ = [
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """So many ranks, which follow each other, share sequences from now on; every rank calls it.

    Raises:
        WrongArgument: a ``ValueError``: the size does not divide the ranks, or an earlier call gave another one.
    """
    NOW.share_sequences(sequence_parallel_size)


def get_sequence_parallel_group() -> Any:
    """Of the ranks that have parts of the same sequences."""
    return NOW.ways.sequence_group


def get_sequence_parallel_world_size() -> int:
    return NOW.ways.sequence


def get_sequence_parallel_rank() -> int:
    return NOW.ways.sequence_rank


def get_sequence_data_parallel_group() -> Any:
    """Of all ranks that share parameters."""
    return NOW.ways.reading_group


def get_sequence_data_parallel_world_size() -> int:
    return NOW.ways.data * NOW.ways.sequence


def get_sequence_data_parallel_rank() -> int:
    return NOW.ways.reading_rank


get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
