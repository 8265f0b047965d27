"""Frozen matrices that rest, and travel, as codes: the column ``base`` of a table (QLoRA, arXiv 2305.14314).

A frozen parameter has values only, which nothing updates. So what rests of it can be codes in blocks, in whatever
place the table gives to ``params``; gathers carry them, and a unit is decoded where it is gathered, in the dtype that
forward computes in. What is trained beside them, such as adapters, follows the rest of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan.checks import described, known_arguments
from shardfold.plan.format import canonical, typed
from shardfold.plan.formats import FAMILIES, FORMATS, Format

__all__ = ["Quantized"]


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Which frozen parameters rest as codes, and which codes these are.

    Attributes:
        format: of blocks: ``"nf4/64"``, ``"int8/64"``, ``"int4/64"``, ``"int2/32"``; with ``+double`` behind it scales
            are codes of 8 bits.
        modules: path patterns or classes of the modules whose frozen matrices are coded, and all inside of these;
            empty: linear layers and experts that are stacked in one parameter, but for heads, adapters and what shares
            memory with an embedding.
        keep: the same of modules whose parameters keep their dtype in any case.

    Raises:
        LayoutError: the format is none that parameters can rest in, or a field is of a wrong type.

    Examples:
        >>> sf.PRESETS["zero3"].replace(base="nf4+double").base.format
        'nf4/64:double'
    """

    format: str
    modules: str | type | tuple[str | type, ...] = ()
    keep: str | type | tuple[str | type, ...] = ()

    def __post_init__(self) -> None:
        for name in ("modules", "keep"):
            given: Any = getattr(self, name)
            given = given if isinstance(given, tuple) else (given,)
            if not all(isinstance(each, (str, type)) for each in given):
                raise LayoutError(
                    f"Quantized.{name} is {described(getattr(self, name))}: it is a path pattern or a class of "
                    "modules, or a tuple of these."
                )
        form = canonical(self.format, FAMILIES)
        if form not in FORMATS or not _rests(FORMATS[form]):
            known = [each for each in FAMILIES if _rests(FORMATS[canonical(each, FAMILIES)])]
            raise LayoutError(
                f"base rests as {self.format!r}, which is no format that parameters can rest in."
                f"{did_you_mean(str(self.format), known)}"
            )
        object.__setattr__(self, "format", form)

    @property
    def included(self) -> tuple[str | type, ...]:
        """:attr:`modules` as a tuple."""
        return self.modules if isinstance(self.modules, tuple) else (self.modules,)

    @property
    def left_out(self) -> tuple[str | type, ...]:
        """:attr:`keep` as a tuple."""
        return self.keep if isinstance(self.keep, tuple) else (self.keep,)

    @staticmethod
    def named(given: str | Quantized) -> Quantized:
        """The value itself, or that of a format's name."""
        return Quantized(format=given) if isinstance(given, str) else given

    def __str__(self) -> str:
        which = f" of {', '.join(map(_text, self.included))}" if self.modules else " of linear layers"
        less = f", without {', '.join(map(_text, self.left_out))}" if self.keep else ""
        return f"{typed(self.format)}, frozen matrices{which}{less}"


def _rests(form: Format) -> bool:
    """Whether parameters may rest so."""
    return form.native is None and form.state is None and (form.gathers or form.only_rests)


def _text(pattern: str | type) -> str:
    return pattern if isinstance(pattern, str) else pattern.__name__
