"""What a run reads in a step, however many ranks there are.

A global batch is cut for the *virtual ranks*: as many as the sampler has, for as long as the run lives. Of them each
rank takes those whose number is its own modulo the number of ranks, one micro-batch behind the other. So which samples
are in a step, how they are put together to micro-batches, and the random numbers that are drawn for each of these do
not depend on how many ranks there are; the gradient does in the order of its sums alone.

Where ranks do not divide the virtual ones, some have one micro-batch less than others. They read one of theirs a second
time, with weight 0: all ranks do the same passes, and those that have nothing to do would only wait.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from shardfold.data import Loader, Sampler, seed_of
from shardfold.errors import ConfigError
from shardfold.plan.checks import described

__all__ = ["MicroBatch", "VirtualRanks"]


VIRTUAL = "virtual_ranks"


class MicroBatch(NamedTuple):
    """A micro-batch that a rank gets.

    Attributes:
        batch: as the loader gives it, or indices of a sampler.
        weight: 1; 0 if another rank reads it, or this one had it before; None where no rank has less than another.
        is_last: of the step.
    """

    batch: Any
    weight: float | None
    is_last: bool


class VirtualRanks:
    """The samples of a run, and how far it is in them.

    Args:
        source: a :class:`Loader`, or a :class:`Sampler` whose indices are what is read. Its ``num_ranks`` is the number
            of virtual ranks, its ``batch_size`` the micro-batch of one.
        accumulate: global batches of a step.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, source: Loader | Sampler, accumulate: int) -> None:
        if not isinstance(source, Loader | Sampler):
            raise ConfigError(
                f"run.batches({described(source)}): give a shardfold.Loader or a shardfold.Sampler, whose position "
                "does not depend on the number of ranks."
            )
        self._source, self._accumulate = source, accumulate
        self._sampler = source if isinstance(source, Sampler) else source.follows
        self._before, self._steps = self._sampler.state_dict(), -1  # the position when a step began, and which one

    @property
    def sampler(self) -> Sampler:
        """Whose position it is."""
        return self._sampler

    def of_rank(self, rank: int, ranks: int) -> list[tuple[int, float | None]]:
        """Which virtual ranks a rank reads for, with their weights."""
        count = self._sampler.num_ranks
        mine = range(rank, count, ranks)
        even = count % ranks == 0
        each = [(virtual, None if even else 1.0) for virtual in mine]
        spare = mine[-1] if mine else rank % count
        return [*each, *[(spare, 0.0)] * (-(-count // ranks) - len(each))]

    def reads(self, rank: int, ranks: int) -> Iterator[MicroBatch]:
        """What one of so many ranks gets, from the present position on and without an end. The position moves with the
        last micro-batch of a step, and generators of random numbers are set for each."""
        mine = self.of_rank(rank, ranks)
        batches = iter(self._source.batches_of([virtual for virtual, _ in mine]))
        while True:
            place = (self._sampler.seed, self._sampler.epoch, self._sampler.consumed)
            for number in range(self._accumulate):
                for slot, (virtual, weight) in enumerate(mine):
                    is_last = number == self._accumulate - 1 and slot == len(mine) - 1
                    _seed_generators(seed_of(*place, number, virtual))  # of what changes samples too
                    batch = next(batches)
                    if is_last:
                        self._sampler.advance(self._accumulate)
                    yield MicroBatch(batch, weight, is_last)

    # -- where a run is, which ranks that go on have from one of them

    def begin(self, steps: int) -> None:
        """A step begins, behind so many updates."""
        self._before, self._steps = self._sampler.state_dict(), steps

    def at(self, steps: int) -> _HeldPosition:
        """The position of a run that has had so many updates: behind the step under way if it was taken, else in front
        of it."""
        return _HeldPosition(self, self._sampler.state_dict() if steps > self._steps else self._before)

    def go_on_at(self, state: Mapping[str, Any]) -> None:
        """This is the position of the step that the run goes on from, which may be an earlier one; a rank that is new
        hears from it how many virtual ranks there are."""
        self._sampler.share_among(state[VIRTUAL])
        self._sampler.load_state_dict(state)
        self._before, self._steps = dict(state), -1

    def told(self, steps: int) -> str:
        """Where the samples of the next step of such a run are, for people."""
        at = self.at(steps).state_dict()
        most = self._accumulate * self._sampler.global_batch
        return f"{most} samples from position {at['consumed']} of epoch {at['epoch']} on"


class _HeldPosition:
    """A position in the form in which checkpoints have it."""

    def __init__(self, of: VirtualRanks, state: Mapping[str, Any]) -> None:
        self._of, self._state = of, {**state, VIRTUAL: of.sampler.num_ranks}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of.go_on_at(state)


def _seed_generators(seed: int) -> None:
    """Those of ``random``, numpy and torch begin at this seed of at most 56 bits."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.manual_seed(seed)
