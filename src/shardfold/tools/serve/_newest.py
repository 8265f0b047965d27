"""Which weights of a run are the newest."""

from __future__ import annotations

from pathlib import Path

from shardfold.checkpoint.folders import resolve
from shardfold.errors import CheckpointError

__all__ = ["NewestWeights"]


class NewestWeights:
    """Of a run, or of a folder of checkpoints.

    Args:
        run: whose newest checkpoint the model has now.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known = self._now()

    def __call__(self) -> Path | None:
        """A checkpoint that is newer than what this told before; None: there is none."""
        found = self._now()
        if found is None or found == self._known:
            return None
        self._known = found
        return found[0]

    def _now(self) -> tuple[Path, int] | None:
        try:
            found = resolve(self._run)
            return found, (found / "index.json").stat().st_mtime_ns
        except (CheckpointError, OSError):  # one that is being replaced
            return None
