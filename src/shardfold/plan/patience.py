"""One number of seconds, from which every limit on how long somebody waits for somebody follows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CONTRADICTIONS", "MOST", "PATIENCE", "USUAL", "Patience", "usual_patience"]

PATIENCE = "SHARDFOLD_PATIENCE"
"""The variable by which a launcher tells its ranks the number."""
USUAL = 10.0
MOST = 1e9
CONTRADICTIONS = "ranks that contradict each other"
"""The limit of which an engine may be given another one (``Runtime.patience``)."""


@dataclass(frozen=True)
class Patience:
    """How long nothing may be heard of a rank, a host or a connection until it is given up.

    Attributes:
        seconds: the number.
    """

    seconds: float = USUAL

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> Patience:
        """What the launcher of this process gave, else the usual one."""
        given = (os.environ if environment is None else environment).get(PATIENCE, "")
        try:
            seconds = float(given)
        except ValueError:
            return cls()
        return cls(seconds) if 0 < seconds <= MOST else cls()

    @property
    def beat(self) -> float:
        """Between two signs of life of a launcher."""
        return self.seconds / 10

    @property
    def lost(self) -> float:
        """Without a sign of life, until a host is given up; a process that is stopped is ended after as long."""
        return self.seconds

    @property
    def lease(self) -> float:
        """That a rank may write from when its launcher has last heard that the run is still its own: less than what the
        others wait before they go on without it, even if its last sign of life was an old one."""
        return 0.8 * self.seconds

    @property
    def echo(self) -> float:
        """That a rank which failed because of another one is held back, for that one to end by itself."""
        return self.seconds / 2

    @property
    def keep_alive(self) -> int:
        """Between two questions of ssh to a host; it is given up when the third has no answer."""
        return max(1, int(self.seconds / 3))

    def limits(self) -> dict[str, float]:
        """Each limit that follows, in seconds, by what waits so long."""
        return {
            CONTRADICTIONS: self.seconds,
            "a process that is stopped": self.lost,
            "a rank without a sign of life that others wait for": self.lost,
            "writing without word of the launcher": self.lost,
            "a launcher that gives no sign of life": self.lost,
            "an answer of the launchers' store": self.lost,
            "a rank that failed because of another one": self.echo,
            "a host behind ssh": 3.0 * self.keep_alive,
        }


def usual_patience() -> float:
    """Seconds that a rank's engine has where it is given no other number: what its launcher has."""
    return Patience.of_environment().seconds
