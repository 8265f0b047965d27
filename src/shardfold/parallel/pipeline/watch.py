"""What a rank does of its time while a batch goes through the stages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

from shardfold.parallel.pipeline.action import Action

__all__ = ["PipelineStats", "Watch"]

WINDOW = 50
"""Batches that medians are taken over."""
COMPUTES = "FBIW"


@dataclass(frozen=True, kw_only=True)
class PipelineStats:
    """This rank's part of a pipeline, of the last batches that were trained; seconds are medians over 50.

    Attributes:
        order: as ``pipeline=`` names it.
        stages: the first piece of each stage but the first, as ``stages=`` takes them.
        bubble: the part of its time that this rank waited for others, from the beginning of a batch until it had
            nothing more to do; None before the first, and on NCCL, where the host does not see it.
        planned: the same in slots, of a forward and each part of a backward one, before anything runs.
        batch_seconds: from the beginning of a batch until this rank had nothing more to do.
        waited_seconds: of these, for others.
        forward_seconds: of a forward of a stage.
        backward_seconds: of a backward of one, in one part.
        inputs_seconds: of the part for inputs.
        weights_seconds: of the part for weights.
        kept: micro-batches of stages whose forward had run and whose backward had not, at most.
    """

    order: str
    stages: tuple[str, ...]
    bubble: float | None
    planned: float
    batch_seconds: float | None
    waited_seconds: float | None
    forward_seconds: float | None
    backward_seconds: float | None
    inputs_seconds: float | None
    weights_seconds: float | None
    kept: int


class BatchTimes(NamedTuple):
    """One batch: seconds, those of waiting, and of the actions by what they are."""

    seconds: float
    waited: float
    took: dict[str, float]


class Watch:
    """Told what is begun and what is over.

    Attributes:
        clock: gives seconds.
        kept: micro-batches that were kept at most.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = perf_counter
        self.kept = 0
        self._laps: deque[BatchTimes] = deque(maxlen=WINDOW)
        self._begun = self._from = self._last = self._waited = 0.0
        self._now = 0
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """A batch begins."""
        self._begun = self._last = self.clock()
        self._waited, self._now = 0.0, 0
        self._seconds, self._counts = Counter(), Counter()

    def begin(self, action: Action) -> None:
        """An action begins."""
        self._from = self.clock()
        if action.verb == "F":
            self._now += 1
            self.kept = max(self.kept, self._now)

    def end(self, action: Action) -> None:
        """It is over."""
        now = self.clock()
        if action.verb in COMPUTES:
            self._last = now
            self._seconds[action.verb] += now - self._from  # pyright: ignore[reportArgumentType]
            self._counts[action.verb] += 1
            self._now -= action.verb in "BW"
        elif action.verb.startswith("RECV"):
            self._waited += now - self._from

    def stop(self) -> None:
        """The batch is trained."""
        took = {verb: seconds / self._counts[verb] for verb, seconds in self._seconds.items()}
        self._laps.append(BatchTimes(self._last - self._begun, self._waited, took))

    def stats(self, order: str, stages: Sequence[str], planned: float, *, sees: bool) -> PipelineStats:
        """``planned``: the bubble in slots; ``sees``: whether waiting takes the host's time."""
        took = {verb: _median(lap.took[verb] for lap in self._laps if verb in lap.took) for verb in COMPUTES}
        return PipelineStats(
            order=order,
            stages=tuple(stages),
            bubble=_median(lap.waited / lap.seconds for lap in self._laps if lap.seconds) if sees else None,
            planned=planned,
            batch_seconds=_median(lap.seconds for lap in self._laps),
            waited_seconds=_median(lap.waited for lap in self._laps) if sees else None,
            forward_seconds=took["F"],
            backward_seconds=took["B"],
            inputs_seconds=took["I"],
            weights_seconds=took["W"],
            kept=self.kept,
        )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
