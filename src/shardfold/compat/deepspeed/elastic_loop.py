"""What the loops of clients have in common that go on without a rank that is killed (``elastic_trainer``,
``elastic_lightning``).

Such a loop turns once for each micro-batch of this rank's own, whoever has died, and what is to be done besides is done
inside that turn. A step is one unit: it has a micro-batch for each of the ranks that began, of those that are gone too,
whose samples another one reads from the same sampler. If a rank dies in it, those that are left do all of it again,
from its first micro-batch to the one that the loop is at, on the engine that there is then; the loop does not come to
know. What a step's loss is all ranks know before the step is taken.

Generators of random numbers begin anew with each micro-batch, from (seed, step, micro-batch, number of the rank that
began), and are behind it what they were: dropout does not depend on who computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from shardfold.checkpoint.rng import rng_state, set_rng_state
from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.data import seed_generators, seed_of

__all__ = ["Attributes", "Readers", "StepLoop", "unknown_order"]

T = TypeVar("T")


class Attributes:
    """Those that some objects have now.

    Args:
        objects: whose they are.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._had = [(each, _copied(vars(each))) for each in objects if hasattr(each, "__dict__")]

    def put_back(self) -> None:
        """The objects have them again."""
        for each, attributes in self._had:
            vars(each).clear()
            vars(each).update(_copied(attributes))


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Lists, sets and mappings are other ones, as their owners change them."""
    return {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value for name, value in attributes.items()
    }


class Readers:
    """The batches of ranks that are gone, as they would have read them.

    Args:
        loader: whose dataset and collation they have.
        indices: what a rank reads in an epoch, by both numbers.
    """

    def __init__(self, loader: Any, indices: Callable[[int, int], Iterator[list[int]]]) -> None:
        self._loader, self._indices = loader, indices
        self._open: dict[int, tuple[int, int, Iterator[list[int]]]] = {}  # by rank: epoch, position, what comes then

    def read(self, uid: int, epoch: int, position: int, count: int) -> list[Any]:
        """So many batches of a rank from this position of an epoch on, fewer where the epoch ends."""
        at, place, indices = self._open.get(uid, (-1, 0, iter(())))
        if (at, place) != (epoch, position):
            indices = islice(self._indices(uid, epoch), position, None)
        found = list(islice(indices, count))
        self._open[uid] = (epoch, position + len(found), indices)
        dataset = self._loader.dataset
        return [self._loader.collate_fn([dataset[i] for i in each]) for each in found]


class StepLoop:
    """What a client's loop has done of the present step.

    Args:
        engine: that it trains with.
        seed: of the random numbers of its micro-batches.
    """

    def __init__(self, engine: DeepSpeedEngine, seed: int) -> None:
        assert engine.elastic is not None
        self.engine, self.core, self._seed = engine, engine.elastic, seed
        self._share: list[tuple[int, float]] = []
        self._shared_in = -1  # which epoch of the ranks that is of
        self._is_whole = False  # whether this is inside whole()

    def repeat(self, passes: Callable[[bool], None]) -> bool:
        """Does what is to be done of a step, again where a rank dies in it: ``passes(anew)``, from its first
        micro-batch on if ``anew``.

        Returns:
            Whether the step was taken, or skipped, by others, and so by all, before this rank came to the end of it.
        """
        turns, random, anew = self.core.run.turns, rng_state(), False
        try:
            while True:
                known = len(self.core.run.recoveries)
                with self.core.run.attempt(admits=False), self.core.inside():
                    passes(anew)
                    return False
                taken = self.core.run.turns > turns
                self.follow(known, taken=taken)
                if taken:
                    return True
                anew = True
        finally:
            set_rng_state(random)

    def whole(self, do: Callable[[], T]) -> T:
        """What a call comes to in which ranks work together beside their steps, again until no rank dies in it; inside
        another one it is a part of that. What a rank has come to in it does not tell others what they have, so it
        begins again with what the client had before."""
        if self._is_whole:
            return do()
        self._is_whole, known, had = True, len(self.core.run.recoveries), Attributes(self.changed_beside_steps())
        modes = {module: module.training for module in self.engine.module.modules()}

        def again() -> T:
            nonlocal known
            if len(self.core.run.recoveries) > known:
                had.put_back()
                for module, mode in modes.items():  # that Lightning notes when a validation begins
                    module.training = mode
                self.follow(known)
                known = len(self.core.run.recoveries)
            return do()

        try:
            found = self.core.run.whole(again)
            self.follow(known)
            return found
        finally:
            self._is_whole = False

    def follow(self, known: int, *, taken: bool = False) -> None:
        """Ranks may be fewer than they were behind so many recoveries: whoever counts them learns it."""
        if len(self.core.run.recoveries) > known:
            self.engine._follow_elastic(taken=taken)
            self.renumber()

    def renumber(self) -> None:
        """The client counts the ranks that there are."""
        raise NotImplementedError

    def changed_beside_steps(self) -> list[Any]:
        """Objects of the client that evaluations and saves change, as callbacks that count them."""
        raise NotImplementedError

    def shares(self) -> list[tuple[int, float]]:
        """Of which ranks this one reads, with the weights that their samples have; all ranks call it when a step
        begins."""
        self.core.begin()
        if self._shared_in != len(self.core.run.recoveries):
            self._share, self._shared_in = self.core.share(), len(self.core.run.recoveries)
        return self._share

    def begin_pass(self, number: int, uid: int, weight: float, *, summed: bool) -> None:
        """What comes is micro-batch ``number`` of a rank; ``summed``: see :meth:`ElasticCore.scale`."""
        seed_generators(seed_of(self._seed, self.core.run.engine.steps, number, uid))
        self.core.scale(weight, summed=summed)


def unknown_order(whose: str, batches: Any, order: Any) -> WrongArgument:
    """The refusal of a loader that reads in an order that other ranks do not know."""
    return WrongArgument(
        f"--elastic with a training loader of {type(batches).__name__} over {type(order).__name__}: when a rank dies "
        f"others read its samples, so their order has to follow from a seed and the epoch. Give {whose} a map-style "
        "dataset and no sampler of your own, or start without --elastic."
    )
