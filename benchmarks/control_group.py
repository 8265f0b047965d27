"""A control group of the kernel's, of version 1 or 2, that limits the memory of the processes in it; needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Group:
    """A group of its own.

    Raises:
        OSError: none can be made here.
    """

    def __init__(self, name: str, limit: int) -> None:
        parent = Path("/sys/fs/cgroup/memory")
        self._first = parent.is_dir()
        self.path = (parent if self._first else parent.parent) / f"shardfold-{name}-{os.getpid()}"
        self.path.mkdir()
        try:
            (self.path / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(str(limit))
        except OSError:
            self.path.rmdir()
            raise

    def start(self, words: Sequence[str], more: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Starts a process in it; ``more`` joins its environment, ``options`` are those of ``subprocess.Popen``."""
        shell = f'echo $$ > {self.path}/cgroup.procs; exec "$@"'
        return subprocess.Popen(["sh", "-c", shell, "sh", *words], env={**os.environ, **(more or {})}, **options)

    def peak(self) -> int:
        """The most bytes that were in use, page cache included."""
        return int((self.path / ("memory.max_usage_in_bytes" if self._first else "memory.peak")).read_text())

    def close(self) -> None:
        with suppress(OSError):
            self.path.rmdir()
