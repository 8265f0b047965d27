"""The tiers of one rank, each made when it is first asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardfold.plan.checks import Folders, on_this_rank
from shardfold.tiers.device import DeviceTier
from shardfold.tiers.disk import DiskTier
from shardfold.tiers.host import HostTier
from shardfold.tiers.tier import MemoryTier, Region

__all__ = ["Tiers"]

SLOWER: Mapping[str, Callable[[torch.device, str | Sequence[str] | None], HostTier | DiskTier]] = {
    "host": lambda device, folders: HostTier(device),
    "disk": DiskTier,
}
"""What makes each tier but the device's own, of that device and folders."""


class Tiers:
    """What a cell's tier means on this rank.

    Args:
        device: its own memory.
    """

    def __init__(self, device: DeviceTier) -> None:
        self.device = device
        self._made: dict[tuple[str, Folders], HostTier | DiskTier] = {}

    def named(self, tier: str, folder: Folders = None) -> MemoryTier:
        """The tier of that name; ``folder``: of a disk, or one of each drive, as a cell has it, None for the
        system's folder for temporary files.

        Raises:
            OSError: a folder cannot be written to.
        """
        if tier == "device":
            return self.device
        key = (str(tier), folder)
        if key not in self._made:
            local_rank = os.environ.get("LOCAL_RANK", "0")
            names = (folder,) if isinstance(folder, str) else folder
            here = names and [on_this_rank(name, local_rank) for name in names]
            self._made[key] = SLOWER[str(tier)](self.device.device, here)
        return self._made[key]

    @property
    def host(self) -> HostTier:
        """The host's."""
        host = self.named("host")
        assert isinstance(host, HostTier)
        return host

    def forget_spares(self) -> None:
        """Memory of the host that waits for a taker is given back."""
        for tier in self._made.values():
            if isinstance(tier, HostTier):
                tier.forget_spares()

    def over(self, tier: str, memory: Tensor) -> Region:
        """A region of that tier, one of memory, over what is there already, with its values."""
        if tier != "host":
            return self.device.adopt(memory)
        return self.host.adopt(memory)

    def moved(self, region: Region, tier: str) -> Region:
        """A region of that tier, the device's or the host's, with the values of another one, which is given up."""
        values = region.get()
        if tier == "device":
            new: Region = self.device.adopt(values)
        else:
            new = self.named(tier).allocate(values.shape, values.dtype)
            new.store(values)
            new.values(slice(0, 0))  # nothing is on its way: what was there may go
        region.drop()
        return new

    def waited(self, tier: str) -> float:
        """Seconds that the host has waited for values on their way to or from that tier, whatever the folder."""
        return sum(made.waits.seconds for (name, _), made in self._made.items() if name == tier)

    def close(self) -> None:
        """Gives back what all of them hold but the device's own, which ends with the way to the other ranks."""
        for tier in self._made.values():
            tier.close()
        self._made.clear()
