"""A control group of the kernel's, of version 1 or 2, that limits the memory of the processes in it, and the rate of
their reads; needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Group:
    """A group of its own.

    Args:
        name: for its folder.
        limit: bytes of memory.
        rate: bytes a second that its processes read from the drive that ``folder`` is on; 0: any.
        folder: on that drive.

    Raises:
        OSError: none can be made here.
    """

    def __init__(self, name: str, limit: int, rate: int = 0, folder: str = "") -> None:
        parent = Path("/sys/fs/cgroup/memory")
        self._first = parent.is_dir()
        own = f"shardfold-{name}-{os.getpid()}"
        self.path = (parent if self._first else parent.parent) / own
        self._paths = [self.path]
        if rate and self._first:
            self._paths.append(parent.parent / "blkio" / own)
        for path in self._paths:
            path.mkdir()
        try:
            (self.path / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(str(limit))
            if rate:
                self._throttle(rate, os.stat(folder).st_dev)
        except OSError:
            self.close()
            raise

    def _throttle(self, rate: int, device: int) -> None:
        drive = f"{os.major(device)}:{os.minor(device)}"
        if self._first:
            (self._paths[-1] / "blkio.throttle.read_bps_device").write_text(f"{drive} {rate}")
        else:
            (self.path / "io.max").write_text(f"{drive} rbps={rate}")

    def start(self, words: Sequence[str], more: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Starts a process in it; ``more`` joins its environment, ``options`` are those of ``subprocess.Popen``."""
        enter = "".join(f"echo $$ > {path}/cgroup.procs; " for path in self._paths)
        shell = f'{enter}exec "$@"'
        return subprocess.Popen(["sh", "-c", shell, "sh", *words], env={**os.environ, **(more or {})}, **options)

    def peak(self) -> int:
        """The most bytes that were in use, page cache included."""
        return int((self.path / ("memory.max_usage_in_bytes" if self._first else "memory.peak")).read_text())

    def close(self) -> None:
        for path in self._paths:
            with suppress(OSError):
                path.rmdir()
