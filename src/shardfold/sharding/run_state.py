"""Where a run is: what a checkpoint keeps beside the model, and the counters that everybody reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from shardfold.comm.launcher_notes import note_step
from shardfold.errors import StepError
from shardfold.sharding.segment import Segment
from shardfold.sharding.unit import Unit

__all__ = ["LRSchedule", "Lossy", "Mirror", "RunState", "Shared", "Stateful", "Together"]


class Stateful(Protocol):
    """What a checkpoint keeps and gives back: a schedule of the learning rate, a loss scale."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> Any: ...


class LRSchedule(Stateful, Protocol):
    """A schedule of the learning rate, such as those of ``torch.optim.lr_scheduler``."""

    def step(self) -> Any: ...


class Mirror(Protocol):
    """A copy of what is trained, split as master is and updated behind it, such as an average.

    Attributes:
        updates: how many it has seen.
    """

    updates: int

    def add(self, unit: Unit) -> None:
        """The unit is new."""
        ...

    def drop(self, unit: Unit) -> None:
        """The unit is no more."""
        ...

    def go_on_at(self, updates: int) -> None:
        """It has seen so many updates."""
        ...

    def shard(self, segment: Segment) -> Tensor:
        """Of a segment's master range, ``(length / parts,)``."""
        ...


class Shared(Protocol):
    """What groups of ranks that train apart share (see ``optim/global_weights``)."""

    def own(self, segment: Segment) -> slice: ...
    def in_flight(self, segment: Segment) -> Tensor | None: ...
    def put_in_flight(self, segment: Segment) -> Tensor: ...
    def begin_anew(self, segment: Segment) -> None: ...


class Lossy(Protocol):
    """What ranks that send signs have lost (see ``optim/sign_exchange``)."""

    def own(self, segment: Segment) -> slice: ...
    def mean(self, segment: Segment) -> Tensor: ...


class Together(Protocol):
    """The rounds in which such groups come together (see ``engine/rounds``)."""

    @property
    def weights(self) -> Shared: ...
    def describe(self) -> dict[str, Any]: ...
    def goes_on(self, said: Mapping[str, Any]) -> bool: ...
    def begin_anew(self, steps: int = 0, version: int = 0) -> None: ...


@dataclass(eq=False)
class RunState:
    """The state of a run.

    Attributes:
        lr_schedule: of the learning rate, or None.
        loss_scale: the same where gradients are scaled.
        steps: updates so far.
        attempt: ends of gradients so far: steps, done or skipped, and gradients that were dropped.
        micro_batch: backwards since the last step.
        gradients_ready: whether the last of them was that before a step, so that gradients are summed.
        averages: copies that follow the updates.
        after_step: called after each update.
        outer: rounds in which groups of ranks come together, or None.
        put_off: outer steps that were put off, as a group was late.
        signs: what ranks have lost that send signs of momentum, or None.
        broken: why the values are of no run, if they are not.
        unwritten: what the next step has to tell of updates behind the last one.
        mended: how often the values became others, as by a load.
        in_doubt: called where it is not known whether other ranks take the step that this one is in.
    """

    lr_schedule: LRSchedule | None = None
    loss_scale: Stateful | None = None
    steps: int = 0
    attempt: int = 0
    micro_batch: int = 0
    gradients_ready: bool = False
    averages: list[Mirror] = field(default_factory=list[Mirror])
    after_step: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    outer: Together | None = None
    put_off: int = 0
    signs: Lossy | None = None
    broken: str = ""
    unwritten: StepError | None = None
    mended: int = 0
    in_doubt: Callable[[], None] | None = None

    def send_signs(self, signs: Lossy) -> None:
        """Ranks send signs of momentum from now on, and these know what is lost in it."""
        self.signs = signs

    def go_on_at(self, steps: int) -> None:
        """So many updates were done before."""
        self.steps = steps
        note_step(steps)

    def spoil(self, why: str) -> None:
        """The values are of no run any more."""
        self.broken = why

    def mend(self, broken: str = "") -> None:
        """The values are others, and of a run, but for what is ``broken`` still."""
        self.broken, self.unwritten = broken, None
        self.mended += 1

    def ask_in_doubt(self, call: Callable[[], None]) -> None:
        """See :attr:`in_doubt`."""
        self.in_doubt = call

    def count_micro_batch(self) -> None:
        """A backward is over that gave gradients."""
        self.micro_batch += 1

    def sum_for_step(self, ready: bool) -> None:
        """Whether the last backward was that before a step."""
        self.gradients_ready = ready

    def count_step(self, *, goes_on: bool = True) -> None:
        """An update is done; whether this rank does not fail behind it."""
        self.steps += 1
        note_step(self.steps, goes_on=goes_on)

    def count_put_off(self) -> None:
        """An outer step was put off."""
        self.put_off += 1

    def come_together(self, outer: Together) -> None:
        """Groups of ranks do so in these rounds."""
        self.outer = outer

    def tell_later(self, error: StepError | None) -> None:
        """The next step has this to tell, unless there is something already."""
        self.unwritten = self.unwritten or error

    def take_unwritten(self) -> StepError | None:
        """What a step has to tell of updates behind the one before; told once."""
        error, self.unwritten = self.unwritten, None
        return error

    def end_attempt(self) -> None:
        """The gradients since the last step are used, or dropped: from here on those of the next are collected."""
        self.micro_batch, self.gradients_ready = 0, False
        self.attempt += 1
