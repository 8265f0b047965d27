"""The logger that DeepSpeed's users adjust, and messages of chosen ranks."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = [
    "get_current_level",
    "get_log_level_from_string",
    "log_dist",
    "log_dist_once",
    "log_levels",
    "logger",
    "print_dist",
    "print_json_dist",
    "print_rank_0",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _Stdout(logging.Handler):
    """Writes to what ``sys.stdout`` is then."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stdout, flush=True)


def _make_logger() -> Any:
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = _Stdout()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.WARNING)
        made.propagate = False
    return made


logger = _make_logger()


@functools.lru_cache(None)
def warning_once(*args: Any, **kwargs: Any) -> None:
    """``logger.warning``, once for each message."""
    logger.warning(*args, **kwargs)


def _rank() -> int | None:
    """Of this process; None where there is no process group."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist is not None and dist.is_available() and dist.is_initialized() else None


def _said(message: Any, ranks: Sequence[int] | None) -> str | None:
    """The message with its rank in front, where it is to be said at all."""
    rank = _rank()
    if rank is not None and rank not in (ranks or ()) and tuple(ranks or ())[:1] != (-1,):
        return None
    return f"[Rank {-1 if rank is None else rank}] {message}"


def log_dist(message: Any, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the ranks listed, on all for ``[-1]``; without a process group always."""
    said = _said(message, ranks)
    if said is not None:
        logger.log(level, said)


def print_dist(message: Any, ranks: Sequence[int] | None = None) -> None:
    """As :func:`log_dist`, but printed whatever the logger's level is."""
    said = _said(message, ranks)
    if said is not None:
        print(said)


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, once for each message."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def print_rank_0(message: Any, debug: bool = False, force: bool = False) -> None:
    """Prints on rank 0, if ``debug`` or ``force``."""
    if (debug or force) and not _rank():
        print(message)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Writes ``message`` and its rank to ``path`` as JSON, on the ranks that :func:`log_dist` would log on."""
    if path is not None and _said("", ranks) is not None:
        rank = _rank()
        message["rank"] = -1 if rank is None else rank
        with open(path, "w", encoding="utf-8") as file:
            json.dump(message, file)
            os.fsync(file.fileno())


def get_log_level_from_string(log_level_str: str) -> int:
    """``"info"`` -> ``logging.INFO``.

    Raises:
        ValueError: there is no such level.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is not a level of logging: it is one of {', '.join(log_levels)}.")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of a logger (None: the one of this module) and of its handlers."""
    chosen = logger if custom_logger is None else custom_logger
    for one in (chosen, *chosen.handlers):
        one.setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """The logger's effective level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is at most that one.

    Raises:
        ValueError: it is no string, or no level.
    """
    if not isinstance(max_log_level_str, str):
        raise ValueError(f"{max_log_level_str!r} is not a level of logging: it is one of {', '.join(log_levels)}.")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


logger.warning_once = warning_once
logger.log_dist_once = log_dist_once
