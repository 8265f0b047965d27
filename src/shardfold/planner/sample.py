"""A layout that is chosen for the user's own model and a micro-batch of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardfold.errors import ConfigError
from shardfold.plan.checks import described
from shardfold.plan.known_arguments import known_arguments
from shardfold.plan.layout import Layout
from shardfold.plan.outer import Outer
from shardfold.planner.auto import AUTO

__all__ = ["Auto"]


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Auto:
    """``layout=`` of an engine: the fastest with which a step of this model fits, by a plan of it with a micro-batch
    (see ``planner.sampled``). Rank 0 plans, and all ranks take the same; the log says what, and why.

    Attributes:
        sample: a micro-batch as the model takes it (a dict of arguments by name, a tuple of them, or the only one),
            whose shapes and dtypes the plan goes by; with an axis of sequence, of whole sequences.
        loss: where the model does not give its loss itself, what does, as ``lambda model, batch: ...``.
        layout: one that is given, a preset's name or a :class:`Layout`: only what happens to activations is chosen.
            ``"auto"``: both are.
        outer: rare steps along an axis, which every layout to choose from has; None: those of a given layout.

    Raises:
        ConfigError: there is no micro-batch, or ``outer`` is no :class:`Outer`.

    Examples:
        >>> squares = sf.Auto(sample=x, loss=lambda model, batch: model(batch).square().mean())
        >>> sf.Engine(nn.Linear(8, 8), optimizer=adam, layout=squares).layout == sf.PRESETS["zero3"]
        False
    """

    sample: Any = field(repr=False)
    loss: Callable[[Any, Any], Any] | None = None
    layout: str | Layout = AUTO
    outer: Outer | None = None

    def __post_init__(self) -> None:
        if self.sample is None:
            raise ConfigError(
                "Auto(sample=None) has no micro-batch to plan with: give one as the model takes it, as in "
                "sf.Auto(sample=batch), or take layout='auto', which goes by states alone."
            )
        if self.outer is not None and not isinstance(self.outer, Outer):
            raise ConfigError(f"Auto.outer is {described(self.outer)}: give sf.Outer(every=...), or None.")
