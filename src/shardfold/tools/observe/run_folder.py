"""A run folder and what a loop writes into it: figures of its steps, and what the run is at."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from shardfold.comm.launcher_notes import has_followed, is_given_notice, note_folder, refuse_without_lease
from shardfold.errors import ConfigError, did_you_mean
from shardfold.launch.run_records import ENDS, PHASES, STATUS, OwnRecord
from shardfold.tools.observe.trackers import Tracking, tracker_names

__all__ = ["Run"]

LEAST_PROMISE, SLOWER, REMEMBERED = 3.0, 4.0, 20
"""A step comes within four times the slowest of the last twenty, or three seconds: else the run is called stalled."""


class Run:
    """The folder of a run, for a loop of your own: ``shardfold runs`` and ``shardfold report`` then know it.

        run = sf.observe.Run("runs/mine", config={"lr": 3e-4}, steps=1000)
        for step, batch in enumerate(loader, 1):
            ...
            run.log(step, loss=loss.item())
        run.close()

    On several ranks each makes one: rank 0 writes ``config.json`` and ``metrics.jsonl``, all say that they live and how
    far they are, in ``run.status``. As a context manager, or when an exception ends the process, the run is said to
    have failed, with the exception's words; what ends a process from outside is told by its lock, and its launcher.

    Args:
        folder: of the run; made if it is not there. One that has figures is gone on with.
        config: settings, written as ``config.json``; None: none are written.
        steps: optimizer steps of the whole run; 0: not known.
        rank, ranks: this process's number and how many there are; None: as the launcher says (``RANK``,
            ``WORLD_SIZE``), else one.
        track: where figures go besides, from rank 0: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"trackio"``, some
            of them with commas or as a list.

    Raises:
        ConfigError: the folder cannot be made or written to, or another process is writing it; or a tracker is not
            installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        steps: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        track: str | Sequence[str] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks
        self._steps, self._is_absent = steps, False
        self._began = self._last = time.perf_counter()
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._step, self._phase, self._promise = 0, "starting", 0.0
        self._record = self._metrics = None
        self._trackers: list[Tracking] = []
        self._track = tracker_names(track, installed=self.rank == 0)
        try:
            if self.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
            self._begin()
            if self.rank == 0:
                if config is not None:
                    text = json.dumps(dict(config), indent=2, default=str)
                    (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")
                self._write_figures()
        except OSError as error:
            if self.rank == 0 or isinstance(error, BlockingIOError):
                self._release()
                raise ConfigError(
                    f"the run folder {str(self.folder)!r} cannot be written to: {error.strerror}; give another one."
                ) from None
            # else rank 0 has not made the folder yet, or never does on another host's disk: there this rank is known by
            # its launcher alone
            self._is_absent = True
        if self.rank == 0:
            self._send_figures(config)
        note_folder(os.path.abspath(self.folder))
        self._hook = sys.excepthook
        sys.excepthook = self._excepted
        atexit.register(self.close)

    def _begin(self) -> None:
        """
        Raises:
            OSError: the folder is not there, or cannot be written to.
        """
        self._record = OwnRecord(self.folder, self.rank, self._ranks)
        self._record.write(phase=self._phase, steps=self._steps)

    def _write_figures(self) -> None:
        """
        Raises:
            OSError: the file cannot be written to.
        """
        # Line-buffered: who follows the file, or reads it after a crash, sees every finished step.
        self._metrics = (self.folder / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")

    def _send_figures(self, config: Mapping[str, Any] | None) -> None:
        """To the trackers, if there are any."""
        settings = self._settings() if config is None and self._track else config or {}
        self._trackers = [Tracking(name, self.folder, settings) for name in self._track]

    def go_on_as(self, rank: int, ranks: int) -> None:
        """From now on this process is that rank of so many, as another one is gone; rank 0 writes the figures.

        Raises:
            OSError: the folder cannot be written to.
        """
        leads = rank == 0 != self.rank
        self.rank, self._ranks = rank, ranks
        if self._record is not None:
            self._record.move_to(rank, ranks)
        if leads:
            self._write_figures()
            self._send_figures(None)

    def _settings(self) -> dict[str, Any]:
        """What stands in ``config.json``."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        return {}

    def log(self, step: int, **figures: float | None) -> None:
        """Say that a step is done, on every rank; rank 0 writes its figures, a line of ``metrics.jsonl``.

        Args:
            step: how many are done.
            figures: numbers by name, such as ``loss=``; what is not finite is written as null.
        """
        now = time.perf_counter()
        self.write({"step": step, "seconds": round(now - self._began, 3), **figures})

    def write(self, row: Mapping[str, Any]) -> None:
        """The same of a whole line, which has ``step``.

        Raises:
            CollectiveError: this process was stopped or cut off, and others may have gone on with the run.
            ConfigError: its folder was removed.
        """
        refuse_without_lease("a line of metrics")
        self._refuse_without_folder()
        now = time.perf_counter()
        self._took.append(now - self._last)
        self._last, self._step, self._phase = now, row["step"], "training"
        self._promise = max(LEAST_PROMISE, SLOWER * max(self._took))
        if self._is_absent:
            with suppress(OSError):
                self._begin()
                self._is_absent = False
        if self._record is not None:
            self._record.write(phase=self._phase, step=self._step, promise=self._promise)
        if self._metrics is not None:
            self._metrics.write(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n")
        for each in self._trackers:
            each.log(row["step"], row)

    def _refuse_without_folder(self) -> None:
        """What is saved into another folder of that name would be no run, and nobody could see or stop this one."""
        if self._metrics is None or os.fstat(self._metrics.fileno()).st_nlink or (self.folder / STATUS).exists():
            return
        raise ConfigError(
            f"the run folder {str(self.folder)!r} was removed while the run went on, so it ends behind step "
            f"{self._step}: start it again."
        )

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, the run is at something else than steps, which may take long: ``"saving"``, ``"evaluating"``.

        Raises:
            ConfigError: there is no such phase.
        """
        phases = [each for each in PHASES if each not in ENDS]
        if phase not in phases:
            raise ConfigError(f"a run has no phase {phase!r}.{did_you_mean(phase, phases)}")
        before = self._phase, self._promise
        self._say(phase, 0.0)
        try:
            yield
        finally:
            self._last = time.perf_counter()
            if self._record is not None and self._phase == phase:
                self._say(*before)

    def _say(self, phase: str, promise: float) -> None:
        self._phase, self._promise = phase, promise
        if self._record is not None:
            self._record.write(phase=phase, promise=promise)

    def close(self, state: str = "done") -> None:
        """The run is over; a second call does nothing.

        Args:
            state: ``"done"``, or ``"stopped"`` if somebody asked it to end before; of ranks that had notice it is
                that in any case.

        Raises:
            ConfigError: it is neither.
        """
        if state not in ("done", "stopped"):
            raise ConfigError(f'close({state!r}): a run is closed as "done" or "stopped".')
        if self._record is not None:
            left = self._step < self._steps and is_given_notice()
            self._record.write(phase="stopped" if left else state, promise=0.0)
        self._release()

    def fail(self, error: BaseException) -> None:
        """The run is over because of an exception."""
        if self._record is not None:
            if isinstance(error, KeyboardInterrupt):
                self._record.write(phase="stopped", promise=0.0, words="it was interrupted")
            else:
                kind = "" if type(error).__module__.startswith("shardfold") else f"{type(error).__name__}: "
                self._record.write(phase="failed", promise=0.0, words=f"{kind}{error}", follows=has_followed())
        self._release(failed=not isinstance(error, KeyboardInterrupt))

    def _release(self, *, failed: bool = False) -> None:
        if self._record is not None:
            self._record.close()
        if self._metrics is not None:
            with suppress(OSError):  # a full disk
                self._metrics.close()
        for each in self._trackers:
            each.close(failed=failed)
        self._record, self._metrics, self._is_absent, self._trackers = None, None, False, []
        atexit.unregister(self.close)
        if getattr(sys.excepthook, "__self__", None) is self:
            sys.excepthook = self._hook

    def _excepted(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook = self._hook
        self.fail(error)
        hook(kind, error, trace)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            self.fail(error)


def _finite(value: Any) -> Any:
    """JSON has no nan or inf."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
