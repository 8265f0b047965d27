"""What rates an answer: functions of this library by name, or of a file of the user's own."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.checks import is_number
from shardfold.tools.tune._answers import final_number, is_match

__all__ = ["Completion", "Reward", "contains", "ends", "gsm8k", "rewards_of"]


@dataclass(frozen=True)
class Completion:
    """An answer that is rated.

    Attributes:
        prompt: as text, with what a chat template adds.
        text: the answer, without special tokens.
        ended: whether it ended by itself, at a stop token, and not at ``max_tokens``.
        tokens: of the answer, a stop token included.
        row: the other columns of the prompt's row.
    """

    prompt: str
    text: str
    ended: bool
    tokens: Sequence[int]
    row: Mapping[str, Any]


Reward = Callable[[Completion], float]


def contains(answer: Completion) -> float:
    """1 where the text contains the row's column ``contains``, or every string in it; whatever its case."""
    asked = answer.row.get("contains")
    words = [asked] if isinstance(asked, str) else asked
    if not isinstance(words, Sequence) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"reward contains: a row's column 'contains' is {asked!r}: it is a string, or a list of some."
        )
    return float(all(word.lower() in answer.text.lower() for word in words))


def ends(answer: Completion) -> float:
    """1 where the answer ended by itself."""
    return float(answer.ended)


def gsm8k(answer: Completion) -> float:
    """1 where the number behind ``####`` is that of the row's column ``answer``, as in GSM8K (arXiv 2110.14168)."""
    asked = answer.row.get("answer")
    if not isinstance(asked, str) or final_number(asked) is None:
        raise ConfigError(
            f"reward gsm8k: a row's column 'answer' is {asked!r}: it is a solution that ends in #### and a number."
        )
    return float(is_match(answer.text, asked))


OWN: dict[str, Reward] = {"contains": contains, "ends": ends, "gsm8k": gsm8k}


def rewards_of(given: str) -> dict[str, Reward]:
    """Functions by name, of names with commas between them: ours, or ``file.py:name``, whose file is run.

    Raises:
        ConfigError: there is no such function.
    """
    found: dict[str, Reward] = {}
    for each in (part.strip() for part in given.split(",")):
        path, _, name = each.rpartition(":")
        if path:
            found[name] = _of_file(Path(path).expanduser(), name)
        elif each in OWN:
            found[each] = OWN[each]
        else:
            raise ConfigError(
                f"there is no reward {each!r}.{did_you_mean(each, OWN)} Known are {', '.join(OWN)}, and "
                "rewards.py:name, a function in a file of yours."
            )
    return found


def _of_file(path: Path, name: str) -> Reward:
    if not path.is_file():
        raise ConfigError(f"reward: there is no file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(f"shardfold_rewards_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Any = getattr(module, name, None)
    if not callable(function):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"reward: {str(path)!r} has no function {name!r}.{did_you_mean(name, names)}")

    def rated(answer: Completion) -> float:
        value: Any = function(answer)
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"reward {path}:{name} gave {value!r}: a reward is a finite number.")
        return float(value)

    return rated
