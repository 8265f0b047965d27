"""What users find in ``parameter.grad`` between a backward and the step, and what they do to it.

As in plain PyTorch the gradient is there, may be changed in place, replaced, or set to None, and that is what the step
uses. What is shown is the buffer's memory, into which autograd would add by itself: before any gradient arrives, and at
the step, it is taken back with what happened to it. What is in ``.grad`` then and is not that tensor over that memory
was put there by the user, and its values count. Where a rank does not have whole gradients in the parameter's
dtype, something stands for them that says so when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import starmap
from operator import attrgetter, is_
from typing import NoReturn

import torch
from torch import Tensor

from shardfold.errors import UsageError
from shardfold.sharding._hidden import HiddenGradient
from shardfold.sharding.autograd import is_heard
from shardfold.sharding.gradient_buffer import GradientBuffer
from shardfold.sharding.gradients import Gradients, SlotNumbers
from shardfold.sharding.segment import Segment
from shardfold.sharding.sums import Sums
from shardfold.torch_internals import storage_key

__all__ = ["Change", "ShownGradients", "part"]

Change = tuple[str, str]
"""What users did, ``"dropped"``, ``"zeroed"`` or ``"set"``, to the gradient of which parameter."""

_grad = attrgetter("grad")


def part(every: Sequence[ShownGradients], *, given: bool = False) -> bool:
    """Whether users did anything to what is shown of these units, in place aside; ``given``: or where nothing is shown.

    If so, what they put into ``.grad`` that lies in the units' own memory (two gradients swapped, one transposed)
    becomes a copy: taking the first would overwrite the second.
    """
    if all(shown.untouched(given=given) for shown in every):
        return False
    own = {storage_key(flat.untyped_storage()) for shown in every for flat in shown.resting_flats()}
    for shown in every:
        shown.part_from(own)
    return True


class ShownGradients:
    """What one unit shows."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._shown: list[Sequence[Tensor | None]] = []  # by segment and slot; empty while nothing is shown
        self._lying: list[tuple[Sequence[Tensor], list[int]]] = []  # gradients among these, and the memory of each
        # by segment: the buffer's views, where they begin, what shows them, and where each of these lies
        self._aliases: dict[int, tuple[list[Tensor], int, list[Tensor], list[int]]] = {}
        self._standing: dict[tuple[int, str], list[HiddenGradient]] = {}  # of a segment, by slot, and where they are
        self._zeroed: set[SlotNumbers] = set()  # of those
        self._unheard: set[SlotNumbers] = set()  # whose gradient autograd brought to no engine
        self._nothing = [[None] * len(segment.parameters) for segment in gradients.segments]

    def show(self, where: str | None) -> None:
        """Every parameter that has a gradient on this rank has it in ``.grad``, or what stands for it.

        ``where`` they are, if not whole on this rank; said to who reads one. None: of those nothing is shown.
        """
        trainable = self._gradients.segments
        self._lying.clear()
        self._shown = [self._to_show(i, where) for i in range(len(trainable))]
        for segment, grads in zip(trainable, self._shown, strict=True):
            for parameter, grad in zip(segment.parameters, grads, strict=True):
                if grad is not None:
                    parameter.grad = grad

    def _to_show(self, i: int, where: str | None) -> Sequence[Tensor | None]:
        """What the parameters of a segment are to show, by slot; in most steps a list that was made before."""
        own, buffer = self._gradients, self._gradients.resting
        segment, used = own.segments[i], own.used[i]
        if where == "" and buffer is not None and _as_parameter(segment, buffer.flats[i]):
            (aliases, pointers), adopted = self._intact_aliases(i, buffer), segment.adopted
            if all(used) and not adopted:
                self._lying.append((aliases, pointers))
                return aliases
            # What only other ranks used counts for a norm too: zeros, where none did, do not. All are asked for at
            # once, because each answer of a device stops the host.
            unused = [view for view, was in zip(aliases, used, strict=True) if not was and own.sums is not Sums.OWN]
            theirs = iter(torch.stack([view.any() for view in unused]).tolist() if unused else ())
            shown = [
                adopted.get(slot, view) if was or next(theirs, False) else None
                for slot, (view, was) in enumerate(zip(aliases, used, strict=True))
            ]
            lying = [grad for grad in shown if grad is not None]
            self._lying.append((lying, list(map(Tensor.data_ptr, lying))))
            return shown
        if where is None:
            return self._nothing[i]
        standing = self._standing.get((i, where)) or self._stand(i, where)
        return standing if all(used) else [grad if was else None for grad, was in zip(standing, used, strict=True)]

    def _intact_aliases(self, i: int, buffer: GradientBuffer) -> tuple[list[Tensor], list[int]]:
        """What shows a segment's gradients, and where it lies. Not the buffer's own views: a user who keeps one can
        point it elsewhere, also after the step (``grad.data = ...``, ``grad.t_()``); such a one is made anew."""
        views, start = buffer.views[i], buffer.flats[i].data_ptr()
        made, at, aliases, pointers = self._aliases.get(i, (None, 0, [], []))
        if made is not views or at != start:
            aliases, pointers = [view.detach() for view in views], list(map(Tensor.data_ptr, views))
            self._aliases[i] = views, start, aliases, pointers
        elif not _lie(aliases, pointers):
            aliases[:] = [
                alias if _same(alias, view) else view.detach() for alias, view in zip(aliases, views, strict=True)
            ]
        return aliases, pointers

    def _stand(self, i: int, where: str) -> list[HiddenGradient]:
        """Makes what stands for the gradients of a segment."""
        segment = self._gradients.segments[i]
        why = where or f"which is kept in {str(segment.dtypes['grads']).removeprefix('torch.')}"
        made = [
            HiddenGradient.of(parameter, self._name((i, slot)), why, partial(self._zeroed.add, (i, slot)))
            for slot, parameter in enumerate(segment.parameters)
        ]
        self._standing[i, where] = made
        return made

    def hide(self) -> list[Change]:
        """Takes back what is shown, behind :func:`part`, and what users did to it meanwhile counts; says what that was.

        Raises:
            UsageError: a gradient that this rank does not have whole was replaced.
        """
        changes = [] if self.untouched() else self._follow()
        self.forget()
        return changes

    def take_back(self, *, whole: bool, alone: bool) -> Iterator[Change]:
        """Before a step: as :meth:`hide`, and takes the gradients that users gave to parameters that had none.

        Raises:
            UsageError: of those, this rank does not have gradients ``whole``; or autograd gave one, unheard, of which
                ranks have to make a sum, as this one is not ``alone``.
        """
        yield from self.hide()
        yield from self._take_given(whole=whole, alone=alone)

    def forget(self) -> None:
        """Nothing is shown any more."""
        for segment, grads in zip(self._gradients.segments, self._shown, strict=False):
            for parameter, grad in zip(segment.parameters, grads, strict=True):
                if grad is not None:
                    parameter.grad = None
        self._shown = []
        self._lying.clear()
        self._zeroed.clear()

    def note_unheard(self) -> None:
        """Before parameters are heard again: whose ``.grad`` came from autograd, and not from the user."""
        for i, segment in enumerate(self._gradients.segments):
            for slot, parameter in enumerate(segment.parameters):
                shown = self._shown[i][slot] if self._shown else None
                if parameter.grad is not None and shown is None and not is_heard(parameter):
                    self._unheard.add((i, slot))

    def end_step(self) -> None:
        """As before the first backward of a step."""
        self.forget()
        self._unheard.clear()

    def resting_flats(self) -> list[Tensor]:
        """The memory of what is shown, where gradients are whole."""
        return [] if self._gradients.resting is None else self._gradients.resting.flats

    def untouched(self, *, given: bool = False) -> bool:
        """Whether every ``.grad`` is what was shown, where it was, or None. Costs a tenth of a microsecond or two each.

        ``given``: where nothing is shown there has to be nothing.
        """
        trainable = self._gradients.segments
        if not self._shown:
            return not given or all(p.grad is None for segment in trainable for p in segment.parameters)
        if self._zeroed or not all(starmap(_lie, self._lying)):
            return False
        for segment, grads in zip(trainable, self._shown, strict=True):
            if not all(map(is_, map(_grad, segment.parameters), grads)):
                return False
        return True

    def part_from(self, own: set[int]) -> None:
        """What users put into ``.grad`` that lies in the storages ``own`` becomes a copy; see :func:`part`."""
        for i, segment in enumerate(self._gradients.segments):
            for slot, parameter in enumerate(segment.parameters):
                found = parameter.grad
                if found is None or isinstance(found, HiddenGradient) or found.layout is not torch.strided:
                    continue
                shown = self._shown[i][slot] if self._shown else None
                if storage_key(found.untyped_storage()) in own and not self._is_still((i, slot), shown, found):
                    parameter.grad = found.detach().clone()

    def _follow(self) -> list[Change]:
        """What users did to what is shown is done to the gradients; says what that was."""
        changes: list[Change] = []
        for i, (segment, grads) in enumerate(zip(self._gradients.segments, self._shown, strict=False)):
            for slot, (parameter, grad) in enumerate(zip(segment.parameters, grads, strict=True)):
                found, place = parameter.grad, (i, slot)
                if grad is not None and not self._is_still(place, grad, found):
                    changes.append(self._follow_one(place, grad, found))
        for place in sorted(self._zeroed):
            self._gradients.drop(place, zero=True)
            changes.append(("zeroed", self._name(place)))
        return changes

    def _is_still(self, place: SlotNumbers, shown: Tensor | None, found: Tensor | None) -> bool:
        """Whether a parameter has the gradient that was shown, in the memory where it was."""
        i, slot = place
        if shown is None or found is None or isinstance(shown, HiddenGradient):
            return found is shown
        buffer = self._gradients.resting
        assert buffer is not None
        if self._gradients.segments[i].adopted.get(slot) is shown:
            lying = ((grad, at) for row in self._lying for grad, at in zip(*row, strict=True))
            where = next(at for grad, at in lying if grad is shown)
            return found is shown and _lie([found], [where]) and found.shape == buffer.views[i][slot].shape
        return _same(found, buffer.views[i][slot])  # what autograd made may have been copied there meanwhile

    def _take_given(self, *, whole: bool, alone: bool) -> list[Change]:
        """Gradients that users put into ``.grad`` of what shows none; says of which."""
        changes: list[Change] = []
        for i, segment in enumerate(self._gradients.segments):
            for slot, parameter in enumerate(segment.parameters):
                given = parameter.grad
                if given is None:
                    continue
                buffer = self._gradients.resting
                takes = whole and buffer is not None and _as_parameter(segment, buffer.flats[i])
                if not (takes and alone) and ((i, slot) in self._unheard or not is_heard(parameter)):
                    self._refuse_unheard((i, slot))
                if not takes or buffer is None:
                    self._refuse((i, slot))
                with torch.no_grad():
                    buffer.put(i, slot, given)
                parameter.grad = None
                self._gradients.used[i][slot] = True
                changes.append(("set", self._name((i, slot))))
        return changes

    def _follow_one(self, place: SlotNumbers, shown: Tensor, found: Tensor | None) -> Change:
        """A parameter has another gradient than was shown; says what that makes of it."""
        i, slot = place
        if found is None:
            self._zeroed.discard(place)
            self._gradients.drop(place)
            return "dropped", self._name(place)
        buffer = self._gradients.resting
        if buffer is None or isinstance(shown, HiddenGradient):
            self._refuse(place)
        with torch.no_grad():
            buffer.put(i, slot, found)
        return "set", self._name(place)

    def used(self) -> list[str]:
        """Parameters that this rank has used since the last step, by name."""
        flags = enumerate(self._gradients.used)
        return [self._name((i, slot)) for i, used in flags for slot, was in enumerate(used) if was]

    def drop_also(self, changes: Sequence[Change]) -> None:
        """What users on other ranks dropped is dropped here too, where there is nothing of it but what they sent."""
        verbs = {name: verb for verb, name in changes}
        for i, segment in enumerate(self._gradients.segments):
            for slot in range(len(segment.parameters)):
                if verb := verbs.get(self._name((i, slot))):
                    self._gradients.drop((i, slot), zero=verb == "zeroed")

    def _refuse(self, place: SlotNumbers) -> NoReturn:
        name = self._name(place)
        raise UsageError(
            f"the .grad of {name!r} was set by hand, but its gradient is kept in another form here: set it to None "
            f"again, and write the gradient in `with engine.gathered({name!r}, of='grads', write=True) as grad:`."
        )

    def _refuse_unheard(self, place: SlotNumbers) -> NoReturn:
        name = self._name(place)
        raise UsageError(
            f"the memory of {name!r} was replaced by Tensor.set_, as in the model's forward: autograd gives the "
            "gradient of such a weight only to .grad, where ranks do not sum it. Write the values by copy_() "
            "under torch.no_grad(), or `parameter.data = x`; engine.zero_grad() drops what came of this step."
        )

    def _name(self, place: SlotNumbers) -> str:
        return self._gradients.segments[place[0]].spec.slots[place[1]].name


def _as_parameter(segment: Segment, flat: Tensor) -> bool:
    """Whether gradients in a buffer's flat are what autograd would have left for the segment's parameters."""
    return segment.dtype == flat.dtype and segment.unscale == 1.0


def _lie(grads: Sequence[Tensor], pointers: list[int]) -> bool:
    """Whether contiguous tensors lie where they did, and are contiguous still."""
    return list(map(Tensor.data_ptr, grads)) == pointers and all(map(Tensor.is_contiguous, grads))


def _same(found: Tensor, view: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return found.layout is view.layout and found.dtype == view.dtype and found.is_set_to(view)
