"""What a row of data becomes: numbers of tokens, and which of them are targets of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["KINDS", "Kind", "Labelled", "Pair", "Prompt", "Row", "Tokens"]

Kind = Literal["text", "chat", "pair", "label", "prompt"]
"""What a recipe needs of a row: documents, conversations, two answers to one prompt, an answer that is good or bad, or
a prompt alone."""

KINDS: tuple[Kind, ...] = ("text", "chat", "pair", "label", "prompt")


@dataclass(frozen=True, eq=False)
class Tokens:
    """One sequence.

    Attributes:
        ids: (n,) int32, tokens.
        trained: (n,) bool, whether a token is predicted: a target of the loss. It is a matter of places, never of which
            token stands there, so a token for padding that is also the stop token is no special case.
    """

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        """How many tokens count in the loss; the first of a sequence has nothing in front to be predicted from."""
        return int(np.count_nonzero(self.trained[1:]))


@dataclass(frozen=True, eq=False)
class Pair:
    """Two answers to one prompt; both sequences begin with it.

    Attributes:
        chosen, rejected: the better one and the worse one.
    """

    chosen: Tokens
    rejected: Tokens


@dataclass(frozen=True, eq=False)
class Labelled:
    """An answer that someone found good or bad.

    Attributes:
        tokens: prompt and answer.
        good: which of the two.
    """

    tokens: Tokens
    good: bool


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a model is asked to go on from.

    Attributes:
        ids: (n,) int32, tokens, up to where the answer begins.
        fields: the other columns of the row, for functions that rate answers.
    """

    ids: npt.NDArray[np.int32]
    fields: Mapping[str, Any] = field(default_factory=dict)


Row = Tokens | Pair | Labelled | Prompt
