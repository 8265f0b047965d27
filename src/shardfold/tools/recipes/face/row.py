"""One line of the study."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StudyRow"]


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One setting under one budget.

    Attributes:
        setting, head, budget: which it is.
        allowed: bytes of the device on a rank.
        used: bytes of them at the peak of a step, by the plan.
        at_base: bytes of them with the images that the base has under this budget, by the plan.
        host: bytes at rest in host memory, by the plan.
        measured: bytes of a step that ran, on rank 0: on a CPU of device and host together; 0: none was watched.
        batch: images per rank and step, the most that fit.
        images_per_s: of all ranks.
        steps, seconds: of the training.
        loss: the mean of its last tenth.
        losses: images of all ranks so far, and the loss there.
        precision: by held-out set and false-accept rate.
        curve: false-accept rates and Precision, on the first of these sets.
        command: that trains so.
    """

    setting: str
    head: str
    budget: str
    allowed: int
    used: int
    at_base: int
    host: int
    measured: int
    batch: int
    images_per_s: float
    steps: int
    seconds: float
    loss: float
    losses: list[tuple[float, float]]
    precision: dict[str, dict[str, float]]
    curve: list[tuple[float, float]]
    command: str
