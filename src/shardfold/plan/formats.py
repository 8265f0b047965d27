"""All formats by name: those of a dtype's elements, and families of blocks, whose names have parameters.

A new format is one class and one line: in :data:`FORMATS`, or, if its name has parameters, in :data:`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable

from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan._codebooks import Levels, WithDouble
from shardfold.plan.blocks import Fp8, Integers
from shardfold.plan.format import FLOATS, ITEMSIZE, Elements, Family, Format, canonical, made, torch_dtype
from shardfold.plan.signs import Sign

__all__ = ["FAMILIES", "FLOATS", "FORMATS", "ITEMSIZE", "Elements", "Format", "format_named", "torch_dtype"]

FAMILIES: dict[str, Family] = {
    "int8": WithDouble(Integers),
    "int4": WithDouble(Integers),
    "fp8": Fp8,
    "sign": Sign,
    "nf4": WithDouble(Levels),
    "int2": WithDouble(Levels),
}
"""By the first word of their names (see :mod:`shardfold.plan.format`)."""


class _Formats(dict[str, Format]):
    """Those that have parameters are made when they are first asked for."""

    def __missing__(self, name: str) -> Format:
        form = made(name, FAMILIES)
        if form is None:
            raise KeyError(name)
        return self.setdefault(form.name, form)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and made(name, FAMILIES) is not None)


FORMATS: dict[str, Format] = _Formats({each.name: each for each in map(Elements, ITEMSIZE)})
"""All formats, by name, as programs have them. A name that is not here is refused where a table is made."""


def format_named(
    text: str, what: str, words: tuple[str, ...] = (), fits: Callable[[Format], bool] = lambda form: True
) -> str:
    """The name, as programs have it, of the format that a table calls ``text``; one of ``words`` is itself. Where it is
    none, those are listed that travel and that ``fits`` allows.

    Raises:
        LayoutError: it is none. ``what`` travels as it.
    """
    if text in words:
        return text
    name = canonical(text, FAMILIES)
    if name not in FORMATS:
        forms = {each: FORMATS[canonical(each, FAMILIES)] for each in (*FLOATS, *FAMILIES)}
        known = (*words, *(each for each, form in forms.items() if fits(form) and not form.only_rests))
        raise LayoutError(f"{what} travels as {text!r}, which is not a format.{did_you_mean(str(text), known)}")
    return name
