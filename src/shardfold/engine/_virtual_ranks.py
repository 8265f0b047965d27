"""What a run reads in a step, however many ranks there are.

A global batch is cut for the *virtual ranks*: as many as the sampler has, for as long as the run lives. Of them each
rank takes those whose number is its own modulo the number of ranks, one micro-batch behind the other. So which samples
are in a step, how they are put together to micro-batches, and the random numbers that are drawn for each of these do
not depend on how many ranks there are; the gradient does in the order of its sums alone.

Where some have fewer micro-batches than others, as ranks do not divide the virtual ones or one of them is slow, they
read two samples of one of theirs a second time, with weight 0: all ranks do the same passes, which take next to nothing
where there is nothing to do. Two, as statistics of a batch need more than one.

What is computed of all samples of a global batch at once, as the statistics of a batch norm over all ranks, needs them
in one pass: each rank then reads an even part of the global batch, which counts by its samples, and there is no virtual
rank (:meth:`VirtualRanks.reads_together`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardfold.data import Loader, Sampler, seed_generators, seed_of
from shardfold.engine._rank_shares import RankShares
from shardfold.engine.step_position import HeldPosition, StepPosition
from shardfold.errors import ConfigError
from shardfold.plan.checks import described

__all__ = ["MicroBatch", "VirtualRanks"]

EACH = "micro_batch"


class MicroBatch(NamedTuple):
    """A micro-batch that a rank gets.

    Attributes:
        batch: as the loader gives it, or indices of a sampler.
        weight: 1; 0 if another rank reads it, or this one had it before; None where no rank has less than another.
        is_last: of the step.
        samples: that it has, where these are what it counts by; None: it does not.
    """

    batch: Any
    weight: float | None
    is_last: bool
    samples: int | None = None


class VirtualRanks(StepPosition):
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
        super().__init__(self._sampler, self._sampler.num_ranks)

    @property
    def sampler(self) -> Sampler:
        """Whose position it is."""
        return self._sampler

    def at(self, turns: int) -> HeldPosition:
        """With how many samples a virtual rank reads at a time, which a state that is saved may have otherwise."""
        return HeldPosition(self, {**super().at(turns).state_dict(), EACH: self._sampler.batch_size})

    def go_on_at(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: the others read otherwise.
        """
        if state[EACH] != self._sampler.batch_size:
            raise ConfigError(
                f"the sampler has batch_size {self._sampler.batch_size}, but the others, which this rank has joined, "
                f"{state[EACH]}: samples would come twice or not at all; start it as they were started."
            )
        super().go_on_at(state)

    def shares(self, ranks: int) -> RankShares:
        """How so many ranks begin."""
        return RankShares(self._sampler.num_ranks, ranks)

    @staticmethod
    def of_rank(rank: int, shares: RankShares) -> list[tuple[int, float | None]]:
        """Which virtual ranks a rank reads for, with their weights."""
        owners, most = shares.owners(), max(shares.counts)
        even = min(shares.counts) == most
        each: list[tuple[int, float | None]] = [
            (virtual, None if even else 1.0) for virtual, owner in enumerate(owners) if owner == rank
        ]
        spare = each[-1][0] if each else rank % len(owners)
        return [*each, *[(spare, 0.0)] * (most - len(each))]

    def reads(self, rank: int, shares: RankShares) -> Iterator[MicroBatch]:
        """What a rank gets, from the present position on and without an end. The position moves with the
        last micro-batch of a step, and generators of random numbers are set for each."""
        mine = self.of_rank(rank, shares)
        each = [-1 - virtual if weight == 0 else virtual for virtual, weight in mine]
        return self._in_steps(mine, iter(self._source.batches_of(each)))

    def reads_together(self, rank: int, ranks: int) -> Iterator[MicroBatch]:
        """The same, where a rank reads its even part of each global batch as one micro-batch.

        Raises:
            ConfigError: some global batch has fewer samples than there are ranks.
        """
        if ranks > (least := self._sampler.least):
            raise ConfigError(
                f"run.batches(together=True): a global batch may have {least} samples, and there are {ranks} ranks, of "
                "which each needs one: give a larger batch_size"
                + ", or fill_last=True."
                * (not self._sampler.fill_last)
            )
        sizes = map(len, self._sampler.batches_of([rank], ranks))
        for each in self._in_steps([(rank, None)], zip(self._source.batches_of([rank], ranks), sizes, strict=False)):
            batch, samples = each.batch
            yield each._replace(batch=batch, samples=samples)

    def _in_steps(self, mine: Sequence[tuple[int, float | None]], batches: Iterator[Any]) -> Iterator[MicroBatch]:
        """What a rank reads for each of its virtual ranks in turn, step by step."""
        while True:
            place = (self._sampler.seed, self._sampler.epoch, self._sampler.consumed)
            for number in range(self._accumulate):
                for slot, (virtual, weight) in enumerate(mine):
                    is_last = number == self._accumulate - 1 and slot == len(mine) - 1
                    seed_generators(seed_of(*place, number, virtual))  # of what changes samples too
                    batch = next(batches)
                    if is_last:
                        self._sampler.advance(self._accumulate)
                    yield MicroBatch(batch, weight, is_last)

    def told(self, turns: int) -> str:
        """Where the samples of the next step of such a run are, for people."""
        at = self.at(turns).state_dict()
        most = self._accumulate * self._sampler.global_batch
        return f"{most} samples from position {at['consumed']} of epoch {at['epoch']} on"
