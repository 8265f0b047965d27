"""WHICH part of a model has what: ordered rules from modules to values, first match wins.

A rule's pattern is a path pattern or a class, as in ``units=``. It holds for the modules that it matches and for all
inside of them; ``"*"`` matches everything and comes last. ``precision=`` and ``activations=`` are spelled so:

    precision={"head": "fp32", nn.BatchNorm2d: "fp32", "*": "fp16"}
    activations={"encoder": "recompute", "*": "keep"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardfold.errors import LayoutError, ModelError, did_you_mean
from shardfold.plan.axes import Axes
from shardfold.plan.layout import Layout, Precision, Sizes

__all__ = ["EVERYTHING", "Patterns", "Rules", "pairs", "text_of"]

EVERYTHING = "*"

Pattern = str | type


class Patterns:
    """Ordered patterns, of which the first that matches a module holds for it and all inside.

    Args:
        patterns: path patterns or classes; the last is ``"*"``.
        argument: whose rules they are, for messages.

    Raises:
        LayoutError: ``"*"`` is missing or not the last.
    """

    def __init__(self, patterns: Sequence[Pattern], argument: str) -> None:
        self.patterns: tuple[Pattern, ...] = tuple(patterns)
        self._argument = argument
        if EVERYTHING not in self.patterns:
            raise LayoutError(
                f"the rules of {argument}= do not say what the rest of the model has: end them with '*', as in "
                "{'head': ..., '*': ...}."
            )
        if (place := self.patterns.index(EVERYTHING)) < len(self.patterns) - 1:
            raise LayoutError(
                f"the rules of {argument}= have {text_of(self.patterns[place + 1])} after '*', which matches "
                "everything already: the first match wins, so put '*' last."
            )

    def assign(self, model: Any) -> dict[int, int]:
        """The number of the rule of each module of a model, by ``id``; of several paths to it the first counts."""
        number: dict[str, int] = {}
        found: dict[int, int] = {}
        for path, module in model.named_modules():
            outer = number[path.rpartition(".")[0]] if path else len(self.patterns) - 1
            own = next(i for i, pattern in enumerate(self.patterns) if matches(pattern, path, module))
            found[id(module)] = number[path] = min(own, outer)
        return found

    def check(self, model: Any) -> None:
        """Raises:
        ModelError: a rule holds for no module; the message names the nearest, or the rule that comes first.
        """
        modules = dict(model.named_modules())
        used = set(self.assign(model).values())
        for i, pattern in enumerate(self.patterns[:-1]):
            if i in used:
                continue
            if any(matches(pattern, path, module) for path, module in modules.items()):
                raise ModelError(
                    f"{self._argument}= has a rule for {text_of(pattern)}, but rules before it match all that it "
                    "matches: the first match wins, so put it before them or leave it out."
                )
            known = list(modules)[1:] if isinstance(pattern, str) else {type(m).__name__ for m in modules.values()}
            raise ModelError(
                f"{self._argument}= has a rule for {text_of(pattern)}, which matches no module."
                f"{did_you_mean(text_of(pattern), list(known))}"
            )


class Rules(Patterns):
    """The policies of a model's parts, each with the layout that it gives.

    Args:
        given: a policy or its name for the whole model; or ordered rules: a mapping of patterns to policies, or a list
            of such pairs, whose last pattern is ``"*"``.
        table: the layout of the model.
        mesh: axis sizes.

    Attributes:
        given: the layout before it was bound.
        patterns: in order.
        precisions: of each.
        layouts: of each, bound (see :meth:`Layout.bind`); they differ in dtypes only.
        near: of each, that of units whose optimizer's states stay on the device; none where no unit's do.
        small: parameters of at most so many elements rest whole although others are split; 0: none do.

    Raises:
        LayoutError: a policy is unknown or does not fit the layout, ``"*"`` is missing or not the last, or policies
            differ in what a process has only once.
    """

    def __init__(self, given: Any, table: Layout, mesh: Sizes) -> None:
        rules = pairs(given, "precision", (str, Precision), "policy")
        super().__init__([pattern for pattern, _ in rules], "precision")
        self.given = table
        self.precisions = tuple(Precision.named(precision) for _, precision in rules)
        for what, values in (
            ("autocast", {p.autocast for p in self.precisions}),
            ("tf32", {p.tf32 for p in self.precisions}),
            ("rounding", {p.rounding for p in self.precisions if p.master == "bf16"}),
            ("inputs", {p.inputs for p in self.precisions if p.compute in ("bf16", "fp16")}),
            ("outputs", {p.outputs for p in self.precisions if p.narrow}),
        ):
            if len(values) > 1:
                raise LayoutError(
                    f"the rules of precision= differ in {what} ({', '.join(sorted(map(repr, values)))}), which holds "
                    "for a whole engine: give every rule the same."
                )
        self.layouts = tuple(table.bind(precision, mesh) for precision in self.precisions)

        def bound(changed: Layout) -> tuple[Layout, ...]:
            return tuple(changed.bind(precision, mesh) for precision in self.precisions)

        near = table.near() if table.share < 1 else None
        self.near = () if near is None else bound(near)
        self.small = self.layouts[-1].small
        self._whole = bound(table.whole()) if self.small else ()
        self._whole_near = bound(near.whole()) if self.small and near is not None else ()

    def table(self, rule: int, distinct: Axes = (), *, near: bool = False, whole: bool = False) -> Layout:
        """The bound layout of parameters that follow the rule of that number, and of which ranks along the axes
        ``distinct`` have others; ``near``: where their optimizer's states stay on the device; ``whole``: where they are
        small."""
        layouts = (self._whole_near if near else self._whole) if whole else self.near if near else self.layouts
        return layouts[rule].shared(distinct, self.precisions[rule].compute)

    @property
    def default(self) -> Precision:
        """The policy of what no other rule matches."""
        return self.precisions[-1]

    @property
    def stochastic(self) -> bool:
        """Whether a bf16 master is rounded stochastically."""
        return any(precision.rounding == "stochastic" for precision in self.precisions)

    @property
    def widens(self) -> bool:
        """Whether what the model gives in 16 bits is cast to fp32."""
        return any(precision.widens for precision in self.precisions)

    @property
    def mixed(self) -> bool:
        """Whether forward computes in more than one dtype by these rules."""
        return len({precision.compute for precision in self.precisions}) > 1

    def described(self) -> list[tuple[str, Layout]]:
        """``(patterns, bound layout)`` of each policy but the default, in order."""
        found: dict[Precision, tuple[list[str], Layout]] = {}
        for pattern, precision, layout in zip(self.patterns, self.precisions, self.layouts, strict=True):
            if precision != self.default:
                found.setdefault(precision, ([], layout))[0].append(text_of(pattern))
        return [(", ".join(patterns), layout) for patterns, layout in found.values()]


def pairs(given: Any, argument: str, single: tuple[type, ...], value: str) -> list[tuple[Pattern, Any]]:
    """``(pattern, value)`` of each rule, in order; one value alone is the rule ``"*"``.

    Args:
        given: a value, a mapping of patterns to values, or a list of such pairs.
        argument: what was given, for messages.
        single: what a value is an instance of.
        value: what a value is called, for messages.

    Raises:
        LayoutError: it is none of these.
    """
    if isinstance(given, single):
        return [(EVERYTHING, given)]
    found: Any = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(found, Sequence) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], (str, type)) for pair in found
    ):
        raise LayoutError(
            f"{argument}={given!r}: it is a {value}, its name, or ordered rules {{pattern or class: {value}}} whose "
            "last pattern is '*'."
        )
    return [(pattern, item) for pattern, item in found]


def matches(pattern: Pattern, path: str, module: Any) -> bool:
    """Whether a pattern matches a module, which is at that path."""
    return fnmatchcase(path, pattern) if isinstance(pattern, str) else isinstance(module, pattern)


def text_of(pattern: Pattern) -> str:
    """A pattern as messages show it."""
    return pattern if isinstance(pattern, str) else pattern.__name__
