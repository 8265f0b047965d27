"""The names of formats that have parameters.

    int8                       blocks of 256 codes of 8 bits
    int8/128                   blocks of 128
    int4/64:zero,stochastic    with a zero point, rounded stochastically
    int8+error                 what is lost is added to what is sent next

The block's length follows ``/``, options follow ``:`` or ``+``, with ``,`` or ``+`` between them. Programs print one
form, in which the length stands always and options in the order of the family: ``int8/256:error``. Tables print
``int8/256+error``, as in a program ``+`` joins the formats of several segments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan.format import Format

__all__ = ["BLOCK", "Family", "canonical", "made", "typed"]

BLOCK = 256
"""Elements of a block, where a name does not say it."""
SMALLEST, LARGEST = 16, 65536
_NAME = re.compile(r"(?P<base>[a-z]+\d*)(/(?P<block>\d+))?(?P<options>([:+,][a-z]+)*)")


class Family(Protocol):
    """Formats of one kind.

    Attributes:
        OPTIONS: words that a name may have behind ``:``, in the order in which it is printed.
    """

    OPTIONS: tuple[str, ...]

    def __call__(self, base: str, block: int, options: Sequence[str]) -> Format: ...


def canonical(text: Any, families: Mapping[str, Family]) -> Any:
    """The one form of a name that has parameters; all else as it is.

    Raises:
        LayoutError: its parameters are none that the family has.
    """
    found = _NAME.fullmatch(text) if isinstance(text, str) else None
    if found is None or found["base"] not in families:
        return text
    base, block, given = found["base"], int(found["block"] or BLOCK), re.findall(r"[a-z]+", found["options"])
    known = families[base].OPTIONS
    for word in given:
        if word not in known:
            raise LayoutError(
                f"the format {text!r} has the option {word!r}, which is unknown.{did_you_mean(word, known)}"
            )
    if not SMALLEST <= block <= LARGEST or block % SMALLEST:
        raise LayoutError(
            f"the format {text!r} has blocks of {block} elements: they have a multiple of {SMALLEST}, up to {LARGEST}."
        )
    options = ",".join(word for word in known if word in given)
    return f"{base}/{block}" + (f":{options}" if options else "")


def typed(name: str) -> str:
    """A name of a program as users type it, and tables print it."""
    return name.replace(":", "+").replace(",", "+")


def made(name: str, families: Mapping[str, Family]) -> Format | None:
    """The format of a name in its one form; None: it is none of these."""
    found = _NAME.fullmatch(name)
    if found is None or found["base"] not in families or not found["block"] or canonical(name, families) != name:
        return None
    options = re.findall(r"[a-z]+", found["options"])
    return families[found["base"]](found["base"], int(found["block"]), options)
