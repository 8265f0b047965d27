"""What ranks of a run do together, taken again where one of them dies and the others go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import shardfold as sf
from shardfold.comm.launcher_notes import SPARE
from shardfold.engine.elastic import StepSource
from shardfold.errors import ConfigError
from shardfold.tools.observe.progress import Progress
from shardfold.tools.observe.run_folder import Run

__all__ = ["RunAttempts", "RunOnRanks", "check_spare"]

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
        self._began_as = int(os.environ.get("RANK", "0"))
        self._run = sf.ElasticRun(make) if elastic else None
        self._engine = make(int(os.environ.get("WORLD_SIZE", "1"))) if self._run is None else None
        self._changed, self._known = changed, len(self._run.recoveries) if self._run is not None else 0

    @property
    def joined(self) -> bool:
        """Whether this rank has come into a run that was under way."""
        return self._run is not None and self._run.joined

    @property
    def position(self) -> Mapping[str, Any]:
        """Of such a rank, before it reads: where the others are in what they read, and for how many ranks it is cut."""
        assert self._run is not None and self._run.position is not None
        return self._run.position

    def begin_run(self, folder: Path, *, steps: int, track: Any) -> Run:
        """The run folder, on this rank."""
        engine, rank = self.engine, self._began_as if self.joined else self.engine.rank
        written = Run(folder, steps=steps, rank=rank, ranks=engine.world_size, track=track)
        if self.joined:  # its place was another rank's, who leaves it by and by
            written.go_on_as(engine.rank, engine.world_size)
        return written

    @property
    def engine(self) -> sf.Engine:
        """The present one."""
        if self._engine is not None:
            return self._engine
        assert self._run is not None
        return self._run.engine

    def batches(self, source: sf.Sampler | sf.Loader, *, together: bool = False) -> Iterator[Any]:
        """This rank's micro-batches, epoch after epoch, from the position on: those of a loader, or indices.
        ``together``: see :meth:`shardfold.ElasticRun.batches`."""
        if self._run is not None:
            yield from self._run.batches(source, together=together)
        while True:
            yield from source

    def windows(self, source: StepSource) -> Iterator[Any]:
        """What this rank reads in each step, from the source's position on."""
        while self._run is None:
            yield source.window_of([self.engine.data_rank], 1)
        yield from self._run.windows(source)

    def once(self, do: Callable[[], T]) -> T | None:
        """What a call comes to in which ranks take a step; None if a rank died in it, without which the others are by
        then."""
        if self._run is None:
            return do()
        found = list[T]()
        with self._run.attempt():
            found.append(do())
        self._follow(self._run)
        return found[0] if found else None

    def whole(self, do: Callable[[], T]) -> T:
        """What a call comes to in which ranks work together beside their steps."""
        if (run := self._run) is None:
            return do()

        def again() -> T:
            self._follow(run)
            return do()

        found = run.whole(again)
        self._follow(run)
        return found

    def _follow(self, run: sf.ElasticRun) -> None:
        if len(run.recoveries) > self._known:
            self._known = len(run.recoveries)
            self._changed()


class RunOnRanks:
    """A run whose engine may be another one behind the death of a rank.

    Attributes:
        attempts: has the engine.
        written: the run folder, once there is one.
        progress: the line of a run, while it trains.
    """

    attempts: RunAttempts
    written: Run | None = None
    progress: Progress | None = None

    @property
    def engine(self) -> sf.Engine:
        """The present one."""
        return self.attempts.engine

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes."""
        return self.engine.rank == 0

    def changed(self) -> None:
        """Ranks are fewer, or more: this one may be another, and the one that prints and writes."""
        if self.written is not None:
            self.written.go_on_as(self.engine.rank, self.engine.world_size)
        if self.progress is not None and self.leads:
            self.progress.enable()


def check_spare(out: Path | None, micro_batch: int = 1) -> None:
    """Refuse what a process cannot know that comes into the run later (``--spares``, ``--replace``).

    Args:
        out: the folder of the run; None: rank 0 chooses it.
        micro_batch: 0: ranks ask each other what it is.

    Raises:
        ConfigError: see above; the ranks go on without it.
    """
    if SPARE not in os.environ:
        return
    if out is None:
        raise ConfigError("a rank that joins later does not know the folder of the run: give --out.")
    if not micro_batch:
        raise ConfigError(
            "a rank that joins later cannot ask the others what --micro-batch max came to: give a number."
        )
