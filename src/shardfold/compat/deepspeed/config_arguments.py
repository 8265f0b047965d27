"""Which key of a config is to blame where an optimizer or a schedule refuses its arguments.

Their own words name the argument at best ("Invalid learning rate: -1"), and the section of the config never.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.errors import did_you_mean

__all__ = ["check_arguments", "naming"]

#: What messages of ``torch.optim`` call arguments, where it is not their name.
ALSO = {"lr": "learning rate", "eps": "epsilon", "betas": "beta parameter", "lr_lambda": "lambda"}


def check_arguments(where: str, kind: Any, given: Mapping[str, Any]) -> None:
    """Whether a class takes these arguments beside its first.

    Args:
        where: the path of the arguments in the config.
        kind: the class.
        given: by name.

    Raises:
        DeepSpeedConfigError: it needs one that is not given, or has none of such a name.
    """
    known = dict(list(inspect.signature(kind).parameters.items())[1:])
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    for name in given:
        if name not in known:
            raise DeepSpeedConfigError(
                f"{where}.{name} is not an argument of {kind.__name__}.{did_you_mean(name, known)}"
            )
    missing = [name for name, each in known.items() if each.default is each.empty and name not in given]
    if missing:
        keys = " and ".join(f"{where}.{name}" for name in missing)
        raise DeepSpeedConfigError(
            f"{keys} {'is' if len(missing) == 1 else 'are'} missing, which {kind.__name__} needs: give a value."
        )


@contextmanager
def naming(where: str, kind: str, given: Mapping[str, Any]) -> Iterator[None]:
    """What is made of the arguments ``given`` inside refuses them with the config's keys.

    Raises:
        DeepSpeedConfigError: what is raised inside, with the path and the value of each key that it is about.
    """
    try:
        yield
    except DeepSpeedConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        words = (str(error) or type(error).__name__).rstrip(".")
        guilty = [name for name in given if _is_named(name, words)]
        guilty = guilty or [name for name, value in given.items() if _has_word(repr(value), words)]
        guilty = guilty or list(given)[: len(given) == 1]
        keys = " and ".join(f"{where}.{name} is {given[name]!r}" for name in guilty) or f"{where} is {dict(given)!r}"
        raise DeepSpeedConfigError(f"{keys}, which {kind} does not take: {words}.") from error


def _is_named(name: str, words: str) -> bool:
    return _has_word(name, words) or (name in ALSO and ALSO[name] in words.lower())


def _has_word(word: str, words: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w.])", words) is not None
