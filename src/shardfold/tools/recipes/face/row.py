"""One line of the study."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One setting under one budget."""

    setting: str
    head: str
    budget: str
    allowed: int
    used: int
    batch: int
    images_per_s: float
    steps: int
    loss: float
    precision: dict[str, float]
    seconds: float
    command: str
