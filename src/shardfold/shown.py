"""What users find in ``parameter.grad`` between a backward and the step, and what they do to it.

As in plain PyTorch the gradient is there, may be changed in place, replaced, or set to None, and that is what the step
uses. What is shown is the buffer itself, into which autograd would add by itself: before any gradient arrives, and at
the step, it is taken back with what happened to it. Where a rank does not have whole gradients in the parameter's
dtype, something stands for them that says so when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from shardfold.errors import UsageError
from shardfold.hidden import HiddenGradient

if TYPE_CHECKING:
    from shardfold.unit import Segment, Unit

__all__ = ["Change", "ShownGradients"]

Place = tuple[int, int]
"""The number of the trainable segment, and of the slot."""
Change = tuple[str, str]
"""What users did, ``"dropped"``, ``"zeroed"`` or ``"set"``, to the gradient of which parameter."""

_grad = attrgetter("grad")


class ShownGradients:
    """What one unit shows."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._shown: list[Sequence[Tensor | None]] = []  # by segment and slot; empty while nothing is shown
        self._standing: dict[tuple[int, str], list[HiddenGradient]] = {}  # of a segment, by slot, and where they are
        self._zeroed: set[Place] = set()  # of those
        self._nothing = [[None] * len(segment.parameters) for segment in unit.trainable]

    def show(self, where: str | None) -> None:
        """Every parameter that has a gradient on this rank has it in ``.grad``, or what stands for it.

        ``where`` they are, if not whole on this rank; said to who reads one. None: of those nothing is shown.
        """
        trainable = self._unit.trainable
        self._shown = [self._to_show(i, where) for i in range(len(trainable))]
        for segment, grads in zip(trainable, self._shown, strict=True):
            for parameter, grad in zip(segment.parameters, grads, strict=True):
                if grad is not None:
                    parameter.grad = grad

    def _to_show(self, i: int, where: str | None) -> Sequence[Tensor | None]:
        """What the parameters of a segment are to show, by slot; in most steps a list that was made before."""
        unit, buffer = self._unit, self._unit.resting
        segment, used = unit.trainable[i], unit.used[i]
        if where == "" and buffer is not None and _as_parameter(segment, buffer.flats[i]):
            views, adopted = buffer.views[i], segment.adopted
            if all(used) and not adopted:
                return views
            return [  # what only other ranks used counts for a norm too: zeros, where none did, do not
                adopted.get(slot, view) if was or (unit.reduced and bool(view.any())) else None
                for slot, (view, was) in enumerate(zip(views, used, strict=True))
            ]
        if where is None:
            return self._nothing[i]
        standing = self._standing.get((i, where)) or self._stand(i, where)
        return standing if all(used) else [grad if was else None for grad, was in zip(standing, used, strict=True)]

    def _stand(self, i: int, where: str) -> list[HiddenGradient]:
        """Makes what stands for the gradients of a segment."""
        segment = self._unit.trainable[i]
        why = where or f"which is kept in {str(segment.dtypes['grads']).removeprefix('torch.')}"
        made = [
            HiddenGradient.of(parameter, self._name((i, slot)), why, partial(self._zeroed.add, (i, slot)))
            for slot, parameter in enumerate(segment.parameters)
        ]
        self._standing[i, where] = made
        return made

    def hide(self) -> list[Change]:
        """Takes back what is shown, and what users did to it meanwhile counts; says what that was.

        Raises:
            UsageError: a gradient that this rank does not have whole was replaced.
        """
        changes = [] if self._untouched() else self._follow()
        self.forget()
        return changes

    def take_back(self, *, whole: bool) -> Iterator[Change]:
        """Before a step: as :meth:`hide`, and takes the gradients that users gave to parameters that had none.

        Raises:
            UsageError: of those, this rank does not have gradients ``whole``.
        """
        if self._shown and self._untouched():  # where nothing was shown, nothing is
            self.forget()
            return
        yield from self.hide()
        yield from self._take_given(whole=whole)

    def forget(self) -> None:
        """Nothing is shown any more."""
        for segment, grads in zip(self._unit.trainable, self._shown, strict=False):
            for parameter, grad in zip(segment.parameters, grads, strict=True):
                if grad is not None:
                    parameter.grad = None
        self._shown = []
        self._zeroed.clear()

    def _untouched(self) -> bool:
        """Whether every ``.grad`` is what was shown, or None: a comparison that costs some ten nanoseconds each."""
        shown = zip(self._unit.trainable, self._shown, strict=False)
        return not self._zeroed and all(
            all(map(is_, map(_grad, segment.parameters), grads)) for segment, grads in shown
        )

    def _follow(self) -> list[Change]:
        """What users did to what is shown is done to the gradients; says what that was."""
        changes: list[Change] = []
        for i, (segment, grads) in enumerate(zip(self._unit.trainable, self._shown, strict=False)):
            for slot, (parameter, grad) in enumerate(zip(segment.parameters, grads, strict=True)):
                found = parameter.grad
                if grad is not None and found is not grad and (change := self._follow_one((i, slot), grad, found)):
                    changes.append(change)
        for place in sorted(self._zeroed):
            self._unit.drop_gradient(*place, zero=True)
            changes.append(("zeroed", self._name(place)))
        return changes

    def _take_given(self, *, whole: bool) -> list[Change]:
        """Gradients that users put into ``.grad`` of what shows none; says of which."""
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

    def _follow_one(self, place: Place, shown: Tensor, found: Tensor | None) -> Change | None:
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
