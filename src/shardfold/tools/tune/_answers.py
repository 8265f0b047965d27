"""What generated answers are held to: a reference's words, the number that a solution ends with, a reward."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

__all__ = ["final_number", "is_match"]

MARK = "####"
NUMBER = re.compile(MARK + r"\s*\$?\s*(-?[\d.,]*\d)")


def final_number(text: str) -> Decimal | None:
    """The number that a solution in GSM8K's form gives as its result: the first behind ``####``.

    Commas between thousands and a dollar sign do not count, and 18.00 is 18. What stands before the mark is the way to
    the result, and what a model writes after it is another problem (Cobbe et al. 2021, "Training verifiers to solve
    math word problems").
    """
    found = NUMBER.search(text)
    if found is None:
        return None
    try:
        return Decimal(found[1].replace(",", ""))
    except InvalidOperation:  # 1.2.3
        return None


def is_match(answer: str, reference: str) -> bool:
    """Whether an answer is right: for a reference with ``####``, the same number; else the same text, but for blanks at
    its ends."""
    if MARK in reference:
        wanted = final_number(reference)
        return wanted is not None and final_number(answer) == wanted
    return answer.strip() == reference.strip()
