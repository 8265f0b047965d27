"""Which device, how many ranks, over which backend. Imports no torch: who starts the others has no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["SIM", "GivenDevice", "Setting", "rank_settings"]

SIM = "sim"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where something runs.

    Attributes:
        device: its type: ``cuda`` or another accelerator's, ``sim`` (the simulated one) or ``cpu``.
        ranks: processes.
        backend: that ``torch.distributed`` is started with before the engine; None: the engine starts it.
        shared: whether several ranks share a device, over Gloo.
    """

    device: str
    ranks: int
    backend: str | None = None
    shared: bool = False

    @property
    def is_real(self) -> bool:
        """Whether it is a device and no simulation."""
        return self.device not in (SIM, "cpu")

    @property
    def streams(self) -> bool:
        return self.device != "cpu"

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank" + ("s" if self.ranks > 1 else "")
        return f"{ranks} sharing a device over Gloo" if self.shared else ranks

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class GivenDevice(NamedTuple):
    """What a test that is marked `gpu` runs on: the type of the device, and the simulation where it is the simulated
    one."""

    type: str
    sim: Any


def rank_settings(device: str, ranks: int, count: int) -> Sequence[Setting]:
    """Where cases that need ranks run.

    On one GPU that is one rank in a group of NCCL, and two ranks over Gloo that share it: NCCL refuses that.

    Args:
        device: its type.
        ranks: asked for.
        count: devices that there are.
    """
    if device == SIM:
        return (Setting(device=device, ranks=ranks, backend="simccl"),)
    if device == "cpu":
        return (Setting(device=device, ranks=ranks),)
    if ranks > count:
        return (Setting(device=device, ranks=ranks, shared=True),)
    own = Setting(device=device, ranks=ranks, backend="nccl" if device == "cuda" and ranks == 1 else None)
    return (own,) if ranks > 1 else (own, Setting(device=device, ranks=2, shared=True))
