"""Trackers that the figures of a run go to besides its folder, where they are installed.

Each works in a thread of its own and takes rows from a queue, so that a training never waits for a tracker, and goes on
without one that fails.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shardfold.errors import ConfigError, did_you_mean

__all__ = ["TRACKERS", "Tracking", "tracker_names"]

LOG = getLogger("shardfold")
MOST_ROWS = 100_000  # that wait for a tracker
PATIENCE = 30.0  # seconds that the end of a run waits for one
MOST_METRICS = 1000  # that MLflow takes at a time
PROJECT = "shardfold"


class TrackedRow(NamedTuple):
    step: int
    time: float
    figures: dict[str, float]


class Tracker(Protocol):
    """Made with the run's folder and settings, on rank 0."""

    def write(self, rows: Sequence[TrackedRow]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class TensorBoardTracker:
    """Event files in the run folder: ``tensorboard --logdir runs``."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))
        if config:
            lines = json.dumps(dict(config), indent=2, default=str).splitlines()
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines))  # four spaces: as it is

    def write(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            for name, value in row.figures.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases in the run folder, offline unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which calls home all the same
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=os.environ.get("WANDB_DIR", str(folder)),
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
            ),
        )

    def write(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            self._run.log(row.figures, step=row.step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflowTracker:
    """A run in ``MLFLOW_TRACKING_URI``, or else in ``mlflow.db`` beside the run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient, entities  # pyright: ignore[reportMissingImports]

        self._metric = entities.Metric
        own = f"sqlite:///{folder.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", own))
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(project)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        settings = [entities.Param(name, str(value)[:MOST_METRICS]) for name, value in config.items()]
        self._client.log_batch(self._run, params=settings[:100])  # which is the most at a time

    def write(self, rows: Sequence[TrackedRow]) -> None:
        found = [
            self._metric(name, value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.figures.items()
        ]
        for start in range(0, len(found), MOST_METRICS):
            self._client.log_batch(self._run, metrics=found[start : start + MOST_METRICS])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class TrackioTracker:
    """A run in trackio's own folder (``TRACKIO_DIR``): ``trackio show``."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        kept = json.loads(json.dumps(dict(config), default=str))
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project=project, name=folder.name, config=kept, **quiet)

    def write(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            self._run.log(row.figures, step=row.step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
    "trackio": TrackioTracker,
}
"""By the name of the package that each needs."""


def tracker_names(track: str | Sequence[str] | None, *, installed: bool = False) -> tuple[str, ...]:
    """The names in a text with commas, or in a list.

    Args:
        installed: whether to look for their packages too.

    Raises:
        ConfigError: there is no such tracker, or its package is not installed.
    """
    given = track.split(",") if isinstance(track, str) else track or ()
    names = tuple(dict.fromkeys(each.strip() for each in given if each.strip()))
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"there is no tracker {name!r}.{did_you_mean(name, TRACKERS)} Known are {', '.join(TRACKERS)}."
            )
        if installed and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"track {name!r} needs a package that is not installed: pip install {name}, or leave it out."
            )
    return names


class Tracking:
    """A tracker at work. What goes wrong in it is said once, by the logger ``shardfold``, and ends nothing.

    Args:
        name: of ``TRACKERS``.
        folder, config: of the run.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._name = name
        self._rows: queue.SimpleQueue[TrackedRow | None] = queue.SimpleQueue()
        self._failed = False
        self._problem: str | None = None
        self._said = False
        self._thread = threading.Thread(target=self._work, args=(folder, config), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Hand over the finite numbers among the figures of a step."""
        if self._problem is None and self._rows.qsize() >= MOST_ROWS:
            self._problem = f"it is {MOST_ROWS:,} rows behind"
        if self._problem is not None:
            self._say(self._problem)
            return
        kept = {name: float(value) for name, value in figures.items() if name != "step" and _is_number(value)}
        self._rows.put(TrackedRow(step, time.time(), kept))

    def close(self, *, failed: bool = False) -> None:
        """Let it take what is left, for 30 seconds at most."""
        self._failed = failed
        self._rows.put(None)
        self._thread.join(PATIENCE)
        if self._problem is not None:
            self._say(self._problem)
        elif self._thread.is_alive():
            self._say(f"it has not taken the last of them within {PATIENCE:.0f} s")

    def _say(self, problem: str) -> None:
        if not self._said:
            self._said = True
            LOG.warning("%s gets no more figures of this run, which metrics.jsonl has: %s", self._name, problem)

    def _work(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            rows = [self._rows.get()]  # before the first step a run leaves nothing behind
            if rows == [None]:
                return
            tracker = TRACKERS[self._name](folder, config)
            while rows[-1] is not None and self._problem is None:
                with suppress(queue.Empty):
                    while True:
                        rows.append(self._rows.get_nowait())
                tracker.write([row for row in rows if row is not None])
                if rows[-1] is not None:
                    rows = [self._rows.get()]
            tracker.close(failed=self._failed)
        except BaseException as error:  # also a package's sys.exit
            self._problem = f"{type(error).__name__}: {error}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
