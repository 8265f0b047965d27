"""What users find in ``parameter.grad`` between a backward and the step, and what they do to it.

As in plain PyTorch the gradient is there, may be changed in place, replaced, or set to None, and that is what the step
uses. What is shown is the buffer itself, into which autograd would add by itself: before any gradient arrives, and at
the step, it is taken back with what happened to it. Where a rank does not have whole gradients in the parameter's
dtype, something stands for them that says so when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from shardfold.errors import UsageError
from shardfold.hidden import HiddenGradient

if TYPE_CHECKING:
    from shardfold.unit import Segment, Unit

__all__ = ["Change", "ShownGradients"]

Place = tuple[int, int]
"""The number of the trainable segment, and of the slot."""
Change = tuple[str, str]
"""What users did, ``"dropped"``, ``"zeroed"`` or ``"set"``, to the gradient of which parameter."""


class ShownGradients:
    """What one unit shows."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._shown: list[tuple[nn.Parameter, Tensor, int, int]] = []  # whose gradient it is, and its place
        self._standing: dict[Place, HiddenGradient] = {}
        self._zeroed: set[Place] = set()  # of those

    def show(self, where: str | None) -> None:
        """Every parameter that has a gradient on this rank has it in ``.grad``, or what stands for it.

        ``where`` they are, if not whole on this rank; said to who reads one. None: of those nothing is shown.
        """
        buffer = self._unit.resting
        for i, (segment, used) in enumerate(zip(self._unit.trainable, self._unit.used, strict=True)):
            views: list[Tensor] | None = None
            if where == "" and buffer is not None and _as_parameter(segment, buffer.flats[i]):
                views = buffer.views[i]
            if views is None and where is None:
                continue
            for slot, (parameter, was) in enumerate(zip(segment.parameters, used, strict=True)):
                # What only other ranks used counts for a norm too: zeros, where none did, do not.
                if not was and not (views is not None and self._unit.reduced and bool(views[slot].any())):
                    continue
                if views is not None:
                    grad = segment.adopted.get(slot, views[slot])
                else:
                    grad = self._standing.get((i, slot))
                    if grad is None:
                        grad = self._stand_for(segment, (i, slot), where or "")
                parameter.grad = grad
                self._shown.append((parameter, grad, i, slot))

    def _stand_for(self, segment: Segment, place: Place, where: str) -> HiddenGradient:
        why = where or f"which is kept in {str(segment.dtypes['grads']).removeprefix('torch.')}"
        zero = partial(self._zeroed.add, place)
        made = HiddenGradient.of(segment.parameters[place[1]], self._name(place), why, zero)
        self._standing[place] = made
        return made

    def hide(self) -> list[Change]:
        """Takes back what is shown, and what users did to it meanwhile counts; says what that was.

        Raises:
            UsageError: a gradient that this rank does not have whole was replaced.
        """
        changes: list[Change] = []
        for parameter, grad, i, slot in self._shown:
            found = parameter.grad
            if found is not grad and (change := self._follow((i, slot), grad, found)):
                changes.append(change)
            parameter.grad = None
        self._shown.clear()
        for place in sorted(self._zeroed):
            self._unit.drop_gradient(*place, zero=True)
            changes.append(("zeroed", self._name(place)))
        self._zeroed.clear()
        return changes

    def forget(self) -> None:
        """Nothing is shown any more."""
        for parameter, _, _, _ in self._shown:
            parameter.grad = None
        self._shown.clear()
        self._zeroed.clear()

    def take_given(self, *, whole: bool) -> list[Change]:
        """Before a step: gradients that users put into ``.grad`` of what has none; says of which.

        Raises:
            UsageError: this rank does not have gradients ``whole``.
        """
        changes: list[Change] = []
        for i, segment in enumerate(self._unit.trainable):
            for slot, parameter in enumerate(segment.parameters):
                given = parameter.grad
                if given is None:
                    continue
                buffer = self._unit.resting
                if not whole or buffer is None or not _as_parameter(segment, buffer.flats[i]):
                    self._refuse((i, slot))
                with torch.no_grad():
                    buffer.put(i, slot, given)
                parameter.grad, self._unit.used[i][slot] = None, True
                changes.append(("set", self._name((i, slot))))
        return changes

    def _follow(self, place: Place, shown: Tensor, found: Tensor | None) -> Change | None:
        """A parameter has another gradient than was shown; says what that makes of it."""
        i, slot = place
        if found is None:
            self._zeroed.discard(place)
            self._unit.drop_gradient(i, slot)
            return "dropped", self._name(place)
        buffer = self._unit.resting
        if buffer is None or isinstance(shown, HiddenGradient):
            self._refuse(place)
        if found.data_ptr() == buffer.views[i][slot].data_ptr():  # what autograd made was copied there meanwhile
            return None
        with torch.no_grad():
            buffer.put(i, slot, found)
        return "set", self._name(place)

    def used(self) -> list[str]:
        """Parameters that this rank has used since the last step, by name."""
        flags = enumerate(self._unit.used)
        return [self._name((i, slot)) for i, used in flags for slot, was in enumerate(used) if was]

    def drop_also(self, changes: Sequence[Change]) -> None:
        """What users on other ranks dropped is dropped here too, where there is nothing of it but what they sent."""
        verbs = {name: verb for verb, name in changes}
        for i, segment in enumerate(self._unit.trainable):
            for slot in range(len(segment.parameters)):
                if verb := verbs.get(self._name((i, slot))):
                    self._unit.drop_gradient(i, slot, zero=verb == "zeroed")

    def _refuse(self, place: Place) -> NoReturn:
        name = self._name(place)
        raise UsageError(
            f"the .grad of {name!r} was set by hand, but its gradient is kept in another form here: set it to None "
            f"again, and write the gradient in `with engine.gathered({name!r}, of='grads', write=True) as grad:`."
        )

    def _name(self, place: Place) -> str:
        return self._unit.trainable[place[0]].spec.slots[place[1]].name


def _as_parameter(segment: Segment, flat: Tensor) -> bool:
    """Whether gradients in a buffer's flat are what autograd would have left for the segment's parameters."""
    return segment.dtype == flat.dtype and segment.unscale == 1.0
