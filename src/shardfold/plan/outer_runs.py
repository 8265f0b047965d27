"""Groups between outer steps that are runs of their own, each with its launcher, which may end and come back."""

from __future__ import annotations

from dataclasses import dataclass

from shardfold.errors import ConfigError
from shardfold.plan.checks import described, is_integer, known_arguments

__all__ = ["OuterRuns"]


@known_arguments
@dataclass(frozen=True, kw_only=True)
class OuterRuns:
    """Which of some runs this one is, and where they find each other.

    Attributes:
        number: of this one, from 0; another process of the same number takes its place.
        count: how many there are.
        at: ``"HOST:PORT"`` of a ``torch.distributed.TCPStore`` that lives as long as any of them.

    Raises:
        ConfigError: a field is of a wrong type or value.

    Examples:
        >>> sf.OuterRuns(number=2, count=4, at="10.0.0.1:29600").port
        29600
    """

    number: int
    count: int
    at: str

    def __post_init__(self) -> None:
        if not is_integer(self.count, 2):
            raise ConfigError(f"OuterRuns.count is {described(self.count)}: it is a number of runs, 2 or more.")
        if not is_integer(self.number, 0) or self.number >= self.count:
            raise ConfigError(
                f"OuterRuns.number is {described(self.number)}: it says which of {self.count} runs this is, from 0."
            )
        host, _, port = str(self.at).rpartition(":")
        if not isinstance(self.at, str) or not host or not port.isdecimal():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"OuterRuns.at is {described(self.at)}: it is HOST:PORT of a store, as '10.0.0.1:29600'.")

    @property
    def host(self) -> str:
        """Where the store is."""
        return self.at.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Where the store is, there."""
        return int(self.at.rpartition(":")[2])
