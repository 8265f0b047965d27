"""How all ranks are shared out just now: the groups that DeepSpeed's accessors tell of.

    rank = (stage, data, sequence, tensor), the last varies fastest

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
        tensor, sequence, data, pipeline: numbers of ranks along each axis.
        tensor_rank, sequence_rank, data_rank, stage: this rank's places.
        reading_rank: its number among those that share its parameters: ``(data, sequence)``.
        tensor_group, sequence_group: of the ranks that differ on the axis only; None for an axis of one rank.
        data_group, reading_group: of those along data, and along data and sequence.
    """

    def __init__(self, tensor: int = 1, sequence: int = 1, pipeline: int = 1) -> None:
        world_size, rank = world.get_world_size(), world.get_rank()
        self.tensor, self.sequence, self.pipeline = tensor, sequence, pipeline
        of_stage = world_size // pipeline
        self.data = of_stage // (tensor * sequence)
        self.stage, place = divmod(rank, of_stage)
        rest, self.tensor_rank = divmod(place, tensor)
        self.reading_rank = rest
        self.data_rank, self.sequence_rank = divmod(rest, sequence)
        stages = [
            [
                [[first + (d * sequence + s) * tensor + t for t in range(tensor)] for s in range(sequence)]
                for d in range(self.data)
            ]
            for first in range(0, world_size, of_stage)
        ]
        self.tensor_group = self.sequence_group = None
        self.data_group = self.reading_group = world.get_world_group() if world.is_initialized() else None
        if tensor > 1:
            self.tensor_group = _mine([row for blocks in stages for block in blocks for row in block])
        if tensor > 1 or pipeline > 1:
            same = [[row[t] for block in blocks for row in block] for blocks in stages for t in range(tensor)]
            self.data_group = self.reading_group = _mine(same)
        if sequence > 1:
            self.sequence_group = _mine(
                [[row[t] for row in block] for blocks in stages for block in blocks for t in range(tensor)]
            )
            self.data_group = _mine(
                [[block[s][t] for block in blocks] for blocks in stages for s in range(sequence) for t in range(tensor)]
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
        self._made: dict[tuple[int, int, int], Ways] = {}
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

    def enter(self, tensor: int, sequence: int, pipeline: int = 1) -> Ways:
        """Shares ranks out like this from now on; every rank calls it."""
        self._renew()
        sizes = tensor, sequence, pipeline
        if sizes not in self._made:
            self._made[sizes] = Ways(*sizes)
        self._ways = self._made[sizes]
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
