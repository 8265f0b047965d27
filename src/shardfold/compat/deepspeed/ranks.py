"""How all ranks are shared out just now: the groups that DeepSpeed's accessors tell of.

    rank = (data, sequence, tensor), the last varies fastest

The engine underneath has groups of its own. These are for the user's collectives, and for clients'.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardfold.compat.deepspeed.comm import world
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = ["NOW", "Now", "Ways"]


class Ways:
    """Groups of all ranks; every rank makes one of the same sizes.

    Attributes:
        tensor, sequence, data: numbers of ranks along each axis.
        tensor_rank, sequence_rank, data_rank: this rank's places.
        reading_rank: its number among those that share its parameters: ``(data, sequence)``.
        tensor_group, sequence_group: of the ranks that differ on the axis only; None for an axis of one rank.
        data_group, reading_group: of those along data, and along data and sequence.
    """

    def __init__(self, tensor: int = 1, sequence: int = 1) -> None:
        world_size, rank = world.get_world_size(), world.get_rank()
        self.tensor, self.sequence = tensor, sequence
        self.data = world_size // (tensor * sequence)
        rest, self.tensor_rank = divmod(rank, tensor)
        self.reading_rank = rest
        self.data_rank, self.sequence_rank = divmod(rest, sequence)
        all_ranks = [[[(d * sequence + s) * tensor + t for t in range(tensor)] for s in range(sequence)]
                     for d in range(self.data)]  # fmt: skip
        self.tensor_group = self.sequence_group = None
        self.data_group = self.reading_group = world.get_world_group() if world.is_initialized() else None
        if tensor > 1:
            self.tensor_group = _mine([row for block in all_ranks for row in block])
            self.reading_group = _mine([[row[t] for block in all_ranks for row in block] for t in range(tensor)])
            self.data_group = self.reading_group
        if sequence > 1:
            self.sequence_group = _mine([[row[t] for row in block] for block in all_ranks for t in range(tensor)])
            self.data_group = _mine(
                [[block[s][t] for block in all_ranks] for s in range(sequence) for t in range(tensor)]
            )


def _mine(rows: list[list[int]]) -> Any:
    """The group of the row that this rank is in; all ranks make all groups."""
    rank, found = world.get_rank(), None
    for row in rows:
        group = world.new_group(row)
        if rank in row:
            found = group
    return found


class Now:
    """Of the engine that was made last, or of ``initialize_sequence_parallel``.

    Attributes:
        mpu: that the last ``initialize()`` was given, or None.
        shared: how many ranks share sequences since ``initialize_sequence_parallel``; 1 before.
        mesh_device: of ``initialize(mesh_param=...)``, or None.
    """

    def __init__(self) -> None:
        self._all: Any = None  # the group of all ranks that the others were made of
        self._made: dict[tuple[int, int], Ways] = {}
        self._ways: Ways | None = None
        self.mpu: Any = None
        self.mesh_device: Any = None
        self.shared = 1

    def _renew(self) -> None:
        """After another start of ``torch.distributed`` nothing of before holds."""
        present = dist.group.WORLD if world.is_initialized() else None
        if present is not self._all:
            self._all, self._ways, self.mpu, self.mesh_device, self.shared = present, None, None, None, 1
            self._made.clear()

    def enter(self, tensor: int, sequence: int) -> Ways:
        """Shares ranks out like this from now on; every rank calls it."""
        self._renew()
        if (tensor, sequence) not in self._made:
            self._made[tensor, sequence] = Ways(tensor, sequence)
        self._ways = self._made[tensor, sequence]
        return self._ways

    @property
    def ways(self) -> Ways:
        """As it is now; without an engine all ranks are of data."""
        self._renew()
        return self._ways or Ways()

    @property
    def sharing(self) -> int:
        """How many ranks share sequences since ``initialize_sequence_parallel``; 1 before."""
        self._renew()
        return self.shared

    def share_sequences(self, size: int) -> None:
        """
        Raises:
            WrongArgument: the size does not divide the ranks, or is not that of before.
        """
        self._renew()
        ranks = world.get_world_size()
        if size < 2 or ranks % size:
            raise WrongArgument(
                f"initialize_sequence_parallel({size}): it is a number of ranks, from 2 on, that divides the {ranks} "
                "there are."
            )
        if self.shared not in (1, size):
            raise WrongArgument(
                f"initialize_sequence_parallel({size}): sequences are shared by {self.shared} ranks already; give the "
                "same number."
            )
        self.shared = size
        self.enter(1, size)


NOW = Now()
