"""Every exception that Shardfold raises on purpose, and the words that help people mend what caused it.

ShardfoldError                     the base: its message is one sentence (what, where, how to mend it)
|-- ConfigError (ValueError)       an option or key that is unknown, of the wrong type, or contradicts another
|   `-- LayoutError                a table that contradicts itself or the mesh it is bound to
|-- ModelError                     a model that cannot be cut into units or materialized
|-- UsageError (RuntimeError)      a call that is not legal now: wrong order, wrong rank, wrong state
|   `-- FreedParameterError        a parameter was touched while only its shard is on this rank
|-- NonFiniteError (ArithmeticError) a loss, gradients or weights are inf or NaN, or overflow at any loss scale
|-- CheckpointError (RuntimeError) a checkpoint is missing, incomplete or damaged, does not fit, or was not written
|-- StepError (RuntimeError)       a step could not update all, or not keep what it updated where it belongs
|-- OrderError (RuntimeError)      ranks asked for operations in orders that cannot be reconciled
`-- CollectiveError (RuntimeError) a collective failed or did not finish: rank, unit and operation are named
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import TracebackType

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "FreedParameterError",
    "LayoutError",
    "ModelError",
    "NonFiniteError",
    "OrderError",
    "ShardfoldError",
    "StepError",
    "UsageError",
    "by_rank",
    "did_you_mean",
    "nearest",
]

LIKE = 0.6
"""Of 1, from which on a word counts as a slip of another: twice the letters they share, of all letters of both."""


class ShardfoldError(Exception):
    """Base of all exceptions that Shardfold raises on purpose.

    Examples:
        >>> try:
        ...     sf.Engine(nn.Linear(2, 2), optimizer=adam, layout="zero4")
        ... except sf.ShardfoldError as error:
        ...     print(type(error).__name__)
        LayoutError
    """

    @contextmanager
    def alone(self, frames: TracebackType | None) -> Generator[None]:
        """Inside, it has no cause and these ``frames`` only, as who reads a script's last lines needs it."""
        cause, hides, whole = self.__cause__, self.__suppress_context__, self.__traceback__
        self.__cause__ = None  # which hides the context too
        self.__traceback__ = frames
        try:
            yield
        finally:
            self.__cause__, self.__suppress_context__, self.__traceback__ = cause, hides, whole


class ConfigError(ShardfoldError, ValueError):
    """An option or key that is unknown, of the wrong type, or contradicts another.

    Examples:
        >>> try:
        ...     sf.Engine(nn.Linear(2, 2), optimizer=adam, accumulate=0)
        ... except sf.errors.ConfigError as error:
        ...     print("accumulate" in str(error))
        True
    """


class LayoutError(ConfigError):
    """A layout table that contradicts itself or the mesh it is bound to.

    Examples:
        >>> try:
        ...     sf.Engine(nn.Linear(2, 2), optimizer=adam, layout="zero4")
        ... except sf.errors.LayoutError as error:
        ...     print("zero3" in str(error) or "zero1" in str(error))
        True
    """


class ModelError(ShardfoldError, ValueError):
    """A model that cannot be cut into units or materialized as asked.

    Examples:
        >>> try:
        ...     engine.load_state_dict([1])
        ... except sf.errors.ModelError as error:
        ...     print("state dict" in str(error))
        True
    """


class UsageError(ShardfoldError, RuntimeError):
    """A call that is not legal in the present state.

    Examples:
        >>> closed = sf.Engine(nn.Linear(2, 2), optimizer=adam)
        >>> closed.close()
        >>> try:
        ...     closed(torch.ones(1, 2))
        ... except sf.errors.UsageError as error:
        ...     print("close" in str(error))
        True
    """


class FreedParameterError(UsageError):
    """A parameter was read or written while only this rank's shard of it is in memory.

    Examples:
        >>> issubclass(sf.errors.FreedParameterError, sf.errors.UsageError)  # read inside of `with engine.gathered():`
        True
    """


class NonFiniteError(ShardfoldError, ArithmeticError):
    """Numbers of the training are inf or NaN, and going on would not mend them.

    Examples:
        >>> issubclass(sf.errors.NonFiniteError, ArithmeticError)
        True
    """


class CheckpointError(ShardfoldError, RuntimeError):
    """A checkpoint cannot be read, or could not be written.

    Attributes:
        follows: whether only other ranks had what went wrong; the launcher then names one of those.

    Examples:
        >>> try:
        ...     engine.load(f"{folder}/nowhere")
        ... except sf.errors.CheckpointError as error:
        ...     print("nowhere" in str(error))
        True
    """

    follows: bool = False


class StepError(ShardfoldError, RuntimeError):
    """A step could not update all that it was to update, or not keep it where it belongs, on some rank.

    Examples:
        >>> issubclass(sf.errors.StepError, RuntimeError)
        True
    """


class OrderError(ShardfoldError, RuntimeError):
    """Ranks asked for operations in orders that cannot be reconciled.

    Examples:
        >>> issubclass(sf.errors.OrderError, RuntimeError)
        True
    """


class CollectiveError(ShardfoldError, RuntimeError):
    """A collective failed or did not finish in time.

    Examples:
        >>> issubclass(sf.errors.CollectiveError, RuntimeError)
        True
    """


def nearest(word: object, choices: Iterable[str]) -> str | None:
    """The one of ``choices`` that ``word`` is likely a slip of, in any letter case; None: it is like none of them.

    A name with an underscore in front, as comments have in JSON, is no slip of one without; what is no word at all is
    none of any.

    Examples:
        >>> sf.errors.nearest("layot", ["layout", "precision"])
        'layout'
    """
    if not isinstance(word, str):
        return None
    known = {choice.lower(): choice for choice in sorted(choices) if word.startswith("_") <= choice.startswith("_")}
    near = get_close_matches(word.lower(), known, n=1, cutoff=LIKE)
    return known[near[0]] if near else None


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest of ``choices``, else the list of them.

    Examples:
        >>> sf.errors.did_you_mean("zero4", ["zero1", "ddp"])
        " Did you mean 'zero1'?"
    """
    known = sorted(choices)
    near = nearest(word, known)
    return f" Did you mean {near!r}?" if near else f" Known: {', '.join(known)}."


def by_rank(said: Mapping[int, str] | Sequence[str], shown: Callable[[str], str] = str) -> str:
    """``"rank 0, 1: one text; rank 2: another"`` for what ranks say, without those that say nothing; the text alone
    where there is one rank.

    ``shown``: what is shown of a text; two that differ are told apart even if they are shown alike.

    Examples:
        >>> sf.errors.by_rank(["yes", "yes", "no"])
        'rank 0, 1: yes; rank 2: no'
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in said.items() if isinstance(said, Mapping) else enumerate(said):
        if text:
            ranks.setdefault(text, []).append(str(rank))
    if len(said) == 1:
        return shown(next(iter(ranks), ""))
    return "; ".join(f"rank {', '.join(numbers)}: {shown(text).rstrip('.')}" for text, numbers in ranks.items())
