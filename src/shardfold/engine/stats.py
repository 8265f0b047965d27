"""What a step costs, as data: its time, what of it was waiting, what it sent and held, and how that compares.

One ``Clock`` per engine takes a lap at each update; everything else is computed when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

from shardfold.comm.agreement import MessageCount
from shardfold.engine.pace import Pace, Spent
from shardfold.engine.peak_rate import PeakFlops
from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.watch import PipelineStats
from shardfold.plan.checks import described, human, is_number
from shardfold.plan.report import MemoryReport, Straggler, TierSeconds, TrafficReport

__all__ = ["Clock", "Stats"]

NO_TIERS, NONE = TierSeconds(), MessageCount()
WINDOW = 50
"""Steps that medians are taken over."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Stats:
    """What an engine knows of its last steps. Everything is this rank's; asking sends nothing. ``print`` shows what is
    known, in a few lines.

    Medians are over the last 50 steps, each from the end of one update to the end of the next, whatever the program did
    between them. None: not known yet, or not told.

    Attributes:
        steps: optimizer steps so far.
        skipped: steps whose update was left out (always 0 without a loss scale).
        step_seconds: median time of a step; None before the second.
        tokens_per_second: of this rank, the median over steps that were told by ``engine.step(tokens=...)``.
        samples_per_second: the same for ``engine.step(samples=...)``.
        mfu: model FLOPs utilization, between 0 and 1; None unless both ``tokens_per_second`` and the device's peak are
            known: as printed by its maker, of a GPU that ``shardfold plan`` knows by name, or as ``peak_flops`` says.
        mfu_formula: how ``mfu`` is computed, with its numbers; without them where they are not known.
        exposed_seconds: median time per step that this rank's main thread waited for other ranks and for bytes; None
            on NCCL, where waiting orders streams and the host does not see it.
        tiers: median seconds per step that slower tiers took of this rank's host: waits for host memory and for disk,
            and updates on the host (see ``TierSeconds``).
        traffic: bytes sent in the last step, by purpose, operation and axes.
        memory: bytes held at this moment, by state.
        transient_peak: the most bytes besides the states at rest since the engine was made, activations included; None
            on the CPU, where nothing counts them.
        pipeline: of this rank's stages; None: there is no axis of pipeline.
        put_off: outer steps that were put off, as a group was late (``Outer.deadline``).
        messages: small messages between the hosts of ranks in the last step.
        blocking_messages: of these, the round trips: this rank waited for them where it sent them, and did nothing
            else. What others say in the rest is looked at later.
        straggler: what makes steps longer, a rank or a link; None: nothing, or it is not known. The same on all ranks
            that run one program.

    Examples:
        >>> engine.stats().skipped
        0
    """

    steps: int
    skipped: int
    step_seconds: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    mfu: float | None
    mfu_formula: str
    exposed_seconds: float | None
    tiers: TierSeconds
    traffic: TrafficReport
    memory: MemoryReport
    transient_peak: int | None
    pipeline: PipelineStats | None = None
    put_off: int = 0
    messages: int = 0
    blocking_messages: int = 0
    straggler: Straggler | None = None

    def __repr__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        lines = [f"Stats of {self.steps} step{'s' * (self.steps != 1)}{skipped}", *map(_line, self._rows())]
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str]]:
        """What is known, by what it is."""
        if self.step_seconds is not None:
            yield "a step", f"{self.step_seconds:.4g} s"
        if self.exposed_seconds is not None:
            yield "of it waiting", f"{self.exposed_seconds:.4g} s"
        if self.straggler is not None:
            yield "slowed down", str(self.straggler)
        for name, rate in (("tokens", self.tokens_per_second), ("samples", self.samples_per_second)):
            if rate is not None:
                yield f"{name}/s", f"{rate:,.4g}" if rate < 1000 else f"{rate:,.0f}"
        if self.mfu is not None:
            yield "MFU", f"{self.mfu:.1%} = {self.mfu_formula}"
        for name, seconds in self.tiers._asdict().items():
            if seconds:
                yield "host's updates" if name == "update" else f"waits for {name}", f"{seconds:.4g} s a step"
        if self.pipeline is not None:
            waits = "" if self.pipeline.bubble is None else f", waits {self.pipeline.bubble:.1%} of a batch"
            yield "pipeline", f"{self.pipeline.order}{waits}"
        if self.put_off:
            yield "put off", f"{self.put_off} outer step{'s' * (self.put_off > 1)}"
        if self.messages:
            yield "messages", f"{self.messages} in the last step, {self.blocking_messages} of them waited for"
        if self.traffic.sent:
            yield "sent", f"{human(self.traffic.sent)} in the last step"
        yield "at rest", human(self.memory.held)
        if self.transient_peak is not None:
            yield "besides, at most", human(self.transient_peak)


def _line(row: tuple[str, str]) -> str:
    return f"  {row[0]:<18}{row[1]}"


class Lap(NamedTuple):
    """One step: ``seconds`` is None for the first, which has no beginning."""

    seconds: float | None
    tokens: float | None
    samples: float | None
    waited: float
    tiers: TierSeconds
    outside: float = 0.0

    @property
    def spent(self) -> Spent | None:
        """What the step took of this rank; None: that is not known."""
        if self.seconds is None:
            return None
        return Spent(self.seconds - self.waited - self.outside, self.outside, self.waited)


class Clock:
    """Takes a lap at each update and remembers the last 50; ``waited``: seconds of waiting before the first.

    Attributes:
        messages: between hosts in the last step.
        pace: of all ranks; None: there is one, or the host does not see what they wait for.
    """

    def __init__(self, waited: float = 0.0, pace: Pace | None = None) -> None:
        self.skipped, self.pace = 0, pace
        self._outside = 0.0  # and beside passes
        self._laps: deque[Lap] = deque(maxlen=WINDOW)
        self._last: float | None = None  # when the last update ended
        self._waited = waited  # seconds of waiting until then
        self._tiers = TierSeconds()  # and for slower tiers
        self._messages = MessageCount()  # and between hosts
        self.messages = MessageCount()
        self._tokens: float | None = None
        self._samples: float | None = None

    def told(self, tokens: float | None, samples: float | None) -> None:
        """Counts of one micro-batch; they add up until the update.

        Raises:
            ConfigError: a count is no number >= 0.
        """
        for name, count in (("tokens", tokens), ("samples", samples)):
            if count is not None and not is_number(count, 0):
                raise ConfigError(
                    f"engine.step({name}={described(count)}): it is how many this rank has processed, a number."
                )
        if tokens is not None:
            self._tokens = (self._tokens or 0.0) + tokens
        if samples is not None:
            self._samples = (self._samples or 0.0) + samples

    def end_step(
        self,
        waited: float,
        tiers: TierSeconds = NO_TIERS,
        messages: MessageCount = NONE,
        outside: float = 0.0,
        *,
        skipped: bool = False,
    ) -> TierSeconds:
        """An update is done; ``waited`` is how many seconds the engine has waited in its life, ``tiers`` what slower
        tiers have taken, ``messages`` how many there were between hosts, ``outside`` what passed beside passes. What
        tiers took of this step is given back."""
        now = perf_counter()
        seconds = now - self._last if self._last is not None else None
        took = TierSeconds(*(new - old for new, old in zip(tiers, self._tiers, strict=True)))
        self._laps.append(
            Lap(seconds, self._tokens, self._samples, waited - self._waited, took, outside - self._outside)
        )
        self._outside = outside
        self._last, self._waited, self._tiers = now, waited, tiers
        self.messages, self._messages = messages.since(self._messages), messages
        self._tokens = self._samples = None
        self.skipped += skipped
        return took

    @property
    def spent(self) -> Spent | None:
        """What the last step took of this rank."""
        return self._laps[-1].spent

    @property
    def straggler(self) -> Straggler | None:
        return self.pace.slowest if self.pace is not None else None

    @property
    def tiers(self) -> TierSeconds:
        return TierSeconds(*(_median(each) or 0.0 for each in zip(*(lap.tiers for lap in self._laps), strict=True)))

    @property
    def step_seconds(self) -> float | None:
        return _median(lap.seconds for lap in self._laps if lap.seconds is not None)

    @property
    def exposed_seconds(self) -> float | None:
        return _median(lap.waited for lap in self._laps)

    @property
    def tokens_per_second(self) -> float | None:
        return _median(lap.tokens / lap.seconds for lap in self._laps if lap.seconds and lap.tokens is not None)

    @property
    def samples_per_second(self) -> float | None:
        return _median(lap.samples / lap.seconds for lap in self._laps if lap.seconds and lap.samples is not None)

    def mfu(self, trainable: int, frozen: int, peak: PeakFlops) -> tuple[float | None, str]:
        """Model FLOPs utilization and its formula with its numbers.

        A token costs 2 FLOPs per parameter in forward, 2 for the gradients of inputs and 2 for those of weights, which
        frozen ones do not have; attention over positions and recomputation are left out.
        """
        tokens = self.tokens_per_second
        rate = "tokens/s" if tokens is None else f"{tokens:.6g} tokens/s"
        frozen_part = f" + 4 x {frozen} frozen" if frozen else ""
        formula = f"(6 x {trainable} trainable{frozen_part} parameters) x {rate} / {peak}"
        if tokens is None or peak.flops is None:
            return None, formula
        return (6 * trainable + 4 * frozen) * tokens / peak.flops, formula


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
