"""Ranks along an axis of tensor share each layer, so they have to read the same batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm.comm import Comm

__all__ = ["same_inputs"]


def same_inputs(inputs: Any, axis: str, comm: Comm) -> bool:
    """Whether all ranks along an axis have the same tensors in a tree of arguments; the same on each. All of them call
    it, and the host reads the tensors.

    Args:
        inputs: tensors, in tuples, lists and mappings.
        axis: of the mesh.
        comm: the ranks.
    """
    mine = torch.tensor([_checksum(inputs)], dtype=torch.int64, device=comm.memory.device)
    both = torch.cat([mine, -mine])
    comm.number(both, (axis,), dist.ReduceOp.MAX, f"the comparison of batches on {axis}")
    most, least = both.tolist()
    return most == -least


def _checksum(tree: Any) -> int:
    total = 0
    for tensor in _tensors(tree):
        if not tensor.is_meta:
            flat: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            total = crc32(flat, total)
    return total


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from _tensors(part)
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
