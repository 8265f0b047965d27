"""The gradients of all units as users see them, and what they do to these, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from shardfold.errors import UsageError
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.shown import part
from shardfold.sharding.sums import Sums
from shardfold.torch_internals import no_subclass_functions

__all__ = ["VisibleGradients"]

EVERY = "all gradients"
NOT_SUMMED = "which is summed over ranks in the last backward of a step only"
LATE = "of which more came, from a re-entrant checkpoint, than the backward had summed over ranks"


class VisibleGradients:
    """What is in ``parameter.grad`` between a backward and the step.

    Attributes:
        hints: whether what stands for a gradient that this rank does not have whole is shown in its place.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self.hints = True
        self._by_hand: list[tuple[int, str, str]] = []  # behind which backward users did what to gradients

    def show(self) -> None:
        """Users find what has come since the last step in ``parameter.grad``, as far as this rank has it."""
        model = self._model
        mesh = model.comm.mesh
        missing = LATE if model.run.gradients_ready else NOT_SUMMED
        with no_subclass_functions():
            for unit in model.units:
                summed = unit.gradients.sums is not Sums.OWN and not unit.gradients.unsent
                table = unit.spec.table_or(model.layout)
                over = table.master.over
                pieces = f"which lies in pieces on {mesh.parts(over)} ranks" if over else ""
                if not over and table.buffered:
                    pieces = f"which rests in the {table.grads.tier} tier"
                    if table.reduce.ordered:
                        pieces = "which is summed in the order of ranks (Runtime(exact=True))"
                where = pieces or ("" if mesh.data_ranks == 1 or summed else missing)
                unit.shown.show(where if self.hints or not where else None)

    def hide(self) -> None:
        """Takes back what is shown, and what users did to it, before gradients come or are used."""
        units = self._model.units
        with no_subclass_functions():
            touched = part([unit.shown for unit in units])
            for unit in units:
                if touched:
                    self._by_hand += [(self._model.run.micro_batch, *change) for change in unit.shown.hide()]
                else:
                    unit.shown.forget()

    def try_hide(self) -> UsageError | None:
        """As :meth:`hide`; why that is refused on this rank: the others are to hear of it before it is raised."""
        try:
            self.hide()
        except UsageError as error:
            return error
        return None

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, what users did is in the gradients."""
        self.hide()
        try:
            yield
        finally:
            self.show()

    def drop(self, *, zero: bool = False) -> None:
        """Forgets the gradients that have come since the last step, or makes them ``zero``; it stays the same step."""
        if not self._model.run.micro_batch:
            return
        self.hide()
        for unit in self._model.units:
            unit.gradients.drop_all(zero=zero)
        self._by_hand.append((self._model.run.micro_batch, "zeroed" if zero else "dropped", EVERY))
        self.show()

    def forget(self) -> None:
        """What users did belongs to a step that is over."""
        self._by_hand.clear()

    def before_step(self) -> bool:
        """Takes what users did to gradients since the last step; whether they did anything."""
        units, layout = self._model.units, self._model.layout
        alone = self._model.comm.mesh.data_ranks == 1
        with no_subclass_functions():
            touched = part([unit.shown for unit in units], given=True)
            for unit in units:
                if not touched:
                    unit.shown.forget()
                    continue
                table = unit.spec.table_or(layout)
                whole = not (table.master.over or table.buffered)
                try:
                    for change in unit.shown.take_back(whole=whole, alone=alone):  # one by one: what follows may raise
                        self._by_hand.append((self._model.run.micro_batch, *change))
                except UsageError:
                    self._model.gate.attach(units)  # parameters whose nodes autograd has forgotten are heard again
                    raise
        return self.touched

    @property
    def touched(self) -> bool:
        """Whether this rank's user did anything to gradients since the last step that is known here."""
        return bool(self._by_hand)

    def compare(self, what: str) -> None:
        """Some rank's user changed gradients; a rank that did not use a parameter had nothing to drop, and follows.

        Args:
            what: is about to use them, for the message.

        Raises:
            UsageError: on all ranks: they did not do the same, so that they would go on with different sums.
        """
        units, agreement = self._model.units, self._model.comm.agreement
        used = [name for unit in units for name in unit.shown.used()]
        text = json.dumps([self._by_hand, used, self._model.run.micro_batch])
        said = [json.loads(text) for text in agreement.exchange(f"by hand/{agreement.sequence}", text)]
        every = list(dict.fromkeys(tuple(change) for changes, _, _ in said for change in changes))
        for change in every:
            behind, verb, name = change
            for rank, (changes, has, micro) in enumerate(said):
                nothing_here = verb != "set" and behind == micro and name != EVERY and name not in has
                if list(change) not in changes and not nothing_here:
                    who = next(other for other, (done, _, _) in enumerate(said) if list(change) in done)
                    raise UsageError(
                        f"{what}: rank {who} {verb} {name if name == EVERY else f'the gradient of {name!r}'} "
                        f"behind backward {behind} of this step, and rank {rank} did not: do the same on every rank, "
                        "e.g. by what engine.max_over_ranks() says. Nothing was updated; engine.zero_grad() drops all "
                        "there is."
                    )
        missing = [change for change in every if change not in self._by_hand]
        for unit in units:
            unit.shown.drop_also([(verb, name) for _, verb, name in missing])
        self._by_hand += missing  # it is done: what is written from now on stays
