"""What ranks of a run do together, taken again where one of them dies and the others go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import shardfold as sf
from shardfold.engine.elastic import StepSource
from shardfold.errors import ConfigError

__all__ = ["RunAttempts"]

T = TypeVar("T")


class RunAttempts:
    """The engine of a run, and all that its ranks send each other.

    Args:
        make: builds a model and gives an engine of it, on so many ranks.
        elastic: whether ranks go on without one that is killed (:class:`shardfold.ElasticRun`).
        changed: called on each rank behind that, and when another one has come in.

    Raises:
        ConfigError: they cannot go on so.
    """

    def __init__(self, make: Callable[[int], sf.Engine], *, elastic: bool, changed: Callable[[], None]) -> None:
        self._run = sf.ElasticRun(make) if elastic else None
        self._engine = make(int(os.environ.get("WORLD_SIZE", "1"))) if self._run is None else None
        self._changed = changed

    @property
    def joined(self) -> bool:
        """Whether this rank has come into a run that was under way."""
        return self._run is not None and self._run.joined

    def refuse_joining(self, command: str) -> None:
        """
        Raises:
            ConfigError: this rank has come into a run that was under way, which a command does not know to go on with.
        """
        if self.joined:
            raise ConfigError(f"`shardfold {command}` takes no rank into a run that is under way: leave out --spares.")

    @property
    def engine(self) -> sf.Engine:
        """The present one."""
        if self._engine is not None:
            return self._engine
        assert self._run is not None
        return self._run.engine

    def batches(self, source: sf.Sampler | sf.Loader) -> Iterator[Any]:
        """This rank's micro-batches, epoch after epoch, from the position on: those of a loader, or indices."""
        if self._run is not None:
            yield from self._run.batches(source)
        while True:
            yield from source

    def windows(self, source: StepSource) -> Iterator[Any]:
        """What this rank reads in each step, from the source's position on."""
        while self._run is None:
            yield source.window_of([self.engine.data_rank], 1)
        yield from self._run.windows(source)

    def once(self, do: Callable[[], T], *, admits: bool = True) -> T | None:
        """What a call comes to in which ranks work together; None if a rank died in it, without which the others are
        by then.

        Args:
            do: the call.
            admits: see :meth:`shardfold.ElasticRun.attempt`.
        """
        if self._run is None:
            return do()
        known, found = len(self._run.recoveries), list[T]()
        with self._run.attempt(admits=admits):
            found.append(do())
        if len(self._run.recoveries) > known:
            self._changed()
        return found[0] if found else None

    def whole(self, do: Callable[[], T]) -> T:
        """The same, again until no rank dies in it."""
        found: list[T] = []
        while not found:
            self.once(lambda: found.append(do()), admits=False)
        return found[0]
