"""A process that writes into a folder, as others find it named there: whether it still lives is known on its host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Holder"]


@dataclass(frozen=True)
class Holder:
    """A process.

    Attributes:
        host: where its id means what it means there: a container is a host of its own.
        pid: its id.
        started: when it began, in a unit of the system's, as ids are given again; empty where that is not known.
    """

    host: str
    pid: int
    started: str

    @staticmethod
    def here() -> Holder:
        """This process."""
        return Holder(_host(), os.getpid(), _started(os.getpid()))

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> Holder:
        """
        Raises:
            KeyError, TypeError, ValueError: it names none.
        """
        return Holder(str(said["host"]), int(said["pid"]), str(said["started"]))

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "pid": self.pid, "started": self.started}

    @property
    def alive(self) -> bool | None:
        """Whether it still runs; None: it is of another host, or of one that has started anew."""
        if self.host != _host():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it is of another user
            pass
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        where = "this host" if self.host == _host() else self.host.partition(" ")[0]
        return f"process {self.pid} on {where}"


def _host() -> str:
    said = [socket.gethostname()]
    with suppress(OSError):
        said.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        said.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(said)


def _started(pid: int) -> str:
    """Empty also for one that has ended and was not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
