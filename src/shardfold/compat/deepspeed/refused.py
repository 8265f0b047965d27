"""What the compatibility layer raises for a call that DeepSpeed's documentation rules out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardfold.checkpoint.folders import check_place
from shardfold.errors import ConfigError, ModelError, UsageError

__all__ = [
    "WrongArgument",
    "WrongCall",
    "WrongClientState",
    "WrongPath",
    "WrongStateDict",
    "check_client_state",
    "check_folder",
    "loading_state",
]


class WrongCall(UsageError, AssertionError):
    """A call that is not legal now. Also an ``AssertionError``, which is what DeepSpeed raises for most of them."""


class WrongArgument(ConfigError, AssertionError):
    """Arguments of ``initialize`` that are missing or contradict each other; a ``ValueError`` too."""


class WrongClientState(WrongArgument, TypeError):
    """A ``client_state`` that is no dict; a ``TypeError`` too, which is what DeepSpeed raises for it."""


class WrongPath(WrongArgument, TypeError):
    """A place of a checkpoint that is no path; a ``TypeError`` too, which is what Python raises for it."""


class WrongStateDict(ModelError, RuntimeError):
    """A state dict that does not fit the model; a ``RuntimeError`` too, as from ``nn.Module.load_state_dict``."""


def check_client_state(state: Any) -> None:
    """Raises :class:`WrongClientState` unless it is a dict."""
    if not isinstance(state, Mapping):
        raise WrongClientState(
            f"engine.save_checkpoint(client_state=...) was given a {type(state).__name__}: it takes a dict."
        )


def check_folder(call: str, place: Any, what: str) -> None:
    """Raises :class:`WrongPath` unless ``place`` is a path."""
    try:
        check_place(call, place, what)
    except ConfigError as error:
        raise WrongPath(str(error)) from None


@contextmanager
def loading_state() -> Iterator[None]:
    """What is loaded inside and does not fit raises :class:`WrongStateDict`."""
    try:
        yield
    except ModelError as error:
        raise WrongStateDict(str(error)) from None
