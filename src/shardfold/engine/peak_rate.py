"""How many operations a second a device could do, which utilization is a part of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.plan.checks import described, is_number
from shardfold.plan.layout import Precision
from shardfold.planner.hardware import Device, known_device, read_device

__all__ = ["PeakFlops", "peak_of"]


class PeakFlops(NamedTuple):
    """Operations a second, and whose they are; None where nobody knows."""

    flops: float | None
    source: str = ""

    def __str__(self) -> str:
        rate = "" if self.flops is None else f"{self.flops:.6g} "
        return f"{rate}peak FLOP/s{f' ({self.source})' if self.source else ''}"


def peak_of(given: Any, device: torch.device, policy: Precision) -> PeakFlops:
    """The rate of products in a policy's dtype on a device.

    Args:
        given: FLOP/s; or the file of a profile that ``shardfold doctor --measure`` wrote; or None: what the maker
            prints, of a device that ``shardfold plan`` knows by name. Nothing is known of a CPU, nor of products in
            fp32 unless ``tf32=False``: they may run in TF32.
        device: of this rank.
        policy: whose products.

    Raises:
        ConfigError: it is neither, or the file is not there or not a profile.
    """
    if is_number(given, 0) and given:
        return PeakFlops(float(given))
    if given is None:
        known = known_device(accelerator.product(device) or "")
        may_round = _dtype(policy) == "fp32" and policy.tf32 is not False
        return PeakFlops(None) if known is None or may_round else _rate(known, policy)
    if isinstance(given, (str, Path)) and Path(given).is_file():
        return _rate(read_device(Path(given)), policy)
    missing = f"{str(given)!r}, which is no file" if isinstance(given, (str, Path)) else described(given)
    raise ConfigError(
        f"peak_flops={missing}: it is a device's FLOP/s, a number > 0, or the file of a profile that "
        "`shardfold doctor --measure` wrote."
    )


def _dtype(policy: Precision) -> str:
    return "fp8" if policy.linear else policy.autocast or policy.compute


def _rate(device: Device, policy: Precision) -> PeakFlops:
    dtype = _dtype(policy)
    return PeakFlops(device.rate(dtype), f"{device.name}, {dtype}")
