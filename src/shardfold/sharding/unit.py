"""A unit: parameters that move together; its segments hold them (see ``segment``).

A unit's life is one enum; the transitions are three lines each and an illegal one raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from enum import Enum

import torch
from torch import Tensor, nn

from shardfold.comm.transport import Pending, Waiter
from shardfold.errors import UsageError
from shardfold.plan.placement import UnitSpec
from shardfold.sharding.freed import seal, unseal
from shardfold.sharding.gradients import Gradients
from shardfold.sharding.segment import Segment
from shardfold.sharding.shown import ShownGradients
from shardfold.tiers.device import DeviceTier
from shardfold.torch_internals import set_versions, storage_key

__all__ = ["CLOSED_WAY", "Life", "Unit"]


class Life(Enum):
    """Where the values of a unit's parameters are."""

    RESTING = "only this rank's shard is in memory"
    GATHERING = "the flat has its memory and is being filled"
    GATHERED = "all values are in the flat"


CLOSED_WAY = (
    "its engine is closed, so the rest of it is gone: engine.release() in place of engine.close() would have left a "
    "plain model; build the model anew and load a state dict or a checkpoint"
)
"""Ends the message of a parameter that was split when its engine was closed."""


class _Touch:
    """What a freed parameter asks when it is touched. A parameter that autograd holds must not hold the engine."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self) -> bool:
        unit = self._unit()
        return unit is not None and unit.touch()

    @property
    def way(self) -> str | None:
        """What helps where the engine does not: it was closed, and is nothing's any more."""
        unit = self._unit()
        return CLOSED_WAY if unit is None or unit.closed else None

    @property
    def hollow(self) -> bool:
        unit = self._unit()
        return unit is not None and unit.hollow


class Unit:
    """Parameters that move together: their segments, their life, and what is on its way for them."""

    def __init__(self, spec: UnitSpec, segments: list[Segment], store: DeviceTier, modules: list[nn.Module]) -> None:
        self.spec = spec
        self.name = spec.name
        self.segments = segments
        self.trainable = [segment for segment in segments if segment.spec.trainable]
        self.modules = modules
        self.split = any(segment.split for segment in segments)
        self.life = Life.GATHERED
        self.pinned_here = False  # it was engine.gathered() that gathered it
        self.pins = 0  # engine.gathered() holds the unit this many times over
        self.kept = False  # what is gathered stays until the step
        self.running = 0  # forwards of its modules that are under way
        self.aside = False  # a backward reached it by another way than its outputs
        self.filling: list[Pending] = []
        self.gradients = Gradients(self.trainable, store)
        self.shown = ShownGradients(self.gradients)
        self.replaced = False  # the model changed, and its parameters are other units' now
        self.closed = False  # its engine is: what is split stays so
        self._store = store
        self._on_touch: Callable[[], bool] | None = None  # gathers the unit if a pass is under way
        self._fence: Callable[[Tensor], None] = lambda _: None  # see Transport: before a shard is written inside a pass
        self.hollow = False  # reading the data of a parameter that is freed gives no elements instead of raising
        self.on_gathered: Callable[[Unit], None] | None = None  # told when its values are there,
        self.on_release: Callable[[Unit], None] | None = None  # and in front of when they are given back
        self._touch = _Touch(self)
        self._found: list[list[int]] = []  # versions of the parameters that are split, when the unit was gathered

    @property
    def keeps(self) -> bool:
        """Whether its table keeps what was gathered over the micro-batches of a step."""
        return self.segments[0].table.gathers_once

    def storages(self) -> set[int]:
        """What identifies the memory of the flats."""
        return {storage_key(segment.flat.untyped_storage()) for segment in self.segments}

    @property
    def version(self) -> int:
        """Changes when a parameter's values are changed, but not when the flat is freed and filled again."""
        return sum(parameter._version for segment in self.segments for parameter in segment.parameters)

    def connect(self, on_touch: Callable[[], bool], fence: Callable[[Tensor], None]) -> None:
        """What gathers the unit if a pass is under way, and what waits before a shard is written inside a pass."""
        self._on_touch, self._fence = on_touch, fence

    def tell(self, gathered: Callable[[Unit], None] | None, release: Callable[[Unit], None] | None) -> None:
        """Who is told when its values are there, and in front of when they are given back; None: nobody."""
        self.on_gathered, self.on_release = gathered, release

    def enter(self) -> None:
        """A forward of one of its modules begins, or something else that reads its values."""
        self.running += 1

    def leave(self) -> None:
        """The same is over."""
        self.running -= 1

    def forget_running(self) -> None:
        """Nothing is under way any more."""
        self.running = 0

    def mark_aside(self) -> None:
        """A backward has reached it by another way than its outputs."""
        self.aside = True

    def keep(self) -> None:
        """What is gathered now stays until the step."""
        self.kept = self.split and self.life is Life.GATHERED

    # -- life

    def touch(self) -> bool:
        """A parameter is read while it is freed; whether its values are there now."""
        return self.life is Life.GATHERED or (self._on_touch is not None and self._on_touch())

    def begin_gather(self) -> None:
        """RESTING -> GATHERING: the flat gets its memory and this rank's shard."""
        self._expect(Life.RESTING)
        for segment in self.segments:
            if segment.split:
                self._store.give(segment.flat)
        self.life = Life.GATHERING

    def end_gather(self, waiter: Waiter) -> None:
        """GATHERING -> GATHERED: the values are there and the parameters may be touched."""
        self._expect(Life.GATHERING)
        for pending in self.filling:
            pending.wait(waiter)
        self.filling = []
        self._store.settle()
        self._found = self.open()
        self.life = Life.GATHERED
        if self.on_gathered is not None:
            self.on_gathered(self)

    def release(self, *, keep: bool = True) -> None:
        """GATHERED -> RESTING: the parameters are sealed and the flat's memory is given back.

        ``keep``: what the model wrote into its parameters since the gather stays, as this rank's part of it.
        """
        self._expect(Life.GATHERED)
        if self.on_release is not None:
            self.on_release(self)
        self.kept = False
        if keep and self._found:
            self._keep_written()
        self._found = []
        for segment in self.segments:
            if segment.split:
                if not segment.flat.untyped_storage().resizable():  # NumPy, or who else shares it, keeps that memory
                    segment.move(self._store)
                for slot, parameter in zip(segment.spec.slots, segment.parameters, strict=True):
                    seal(parameter, slot.name, self._touch)
                # A backward that reads the values without asking for them first must not find freed memory: it sees a
                # version that is not the one it saved, and autograd raises. ``open`` takes this back.
                torch.autograd.graph.increment_version(segment.parameters)
                self._store.take_back(segment.flat)
        self.life = Life.RESTING

    def keep_written(self) -> None:
        """Between passes: what forward wrote is in the shards, also where the unit stays full for backward."""
        if self.life is Life.GATHERED and self._found and not self.pins:
            self._keep_written()
            self._found = [segment.versions() for segment in self.segments if segment.split]

    def let_go(self) -> None:
        """The shards are about to get other values: a unit that stayed full for a backward would keep the old ones."""
        if self.life is Life.GATHERED and self.split and not self.pins and not self.closed:
            self.release()

    def _keep_written(self) -> None:
        """[Note: weights written in forward] Under DDP each rank writes into its own copy. Here each keeps its part of
        what it wrote, before the flat goes: the same wherever ranks write the same. The others have read what they need
        of this rank by then, and read a unit that runs twice in a pass from its flat (``Handlers.repeated``).

        Raises:
            UsageError: ``parameter.data = x`` with another shape, dtype or device.
        """
        split = (segment for segment in self.segments if segment.split)
        for segment, found in zip(split, self._found, strict=True):
            written = segment.written(found)
            for resident in segment.residents() if written else ():
                self._fence(resident)
            for slot in written:
                parameter, view = segment.parameters[slot], segment.view_of(slot)
                if parameter.data_ptr() != view.data_ptr():
                    if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
                        raise UsageError(
                            f"{segment.spec.slots[slot].name!r} got memory (by .data or set_) of another shape, dtype "
                            "or device inside of the model's forward or backward: change it between steps."
                        )
                    with torch.no_grad():
                        view.copy_(parameter.detach())
                    parameter.data = view
                segment.take(slot, view, exact=False)
            if self._store.debug and (unseen := segment.unseen_writes(written)):
                raise UsageError(
                    f"{unseen!r} was written by way of .data inside of the model's forward or backward, which leaves "
                    "no trace and would be lost: write into the parameter itself, under torch.no_grad()."
                )

    def pin(self, *, gathered: bool) -> None:
        """The unit, which is full, stays so until :meth:`unpin`; ``gathered``: to be pinned."""
        self.pinned_here |= gathered
        self.pins += 1

    def unpin(self) -> None:
        """What was gathered to be pinned goes with the last pin."""
        self.pins -= 1
        if not self.pins and self.pinned_here:
            self.pinned_here = False
            if self.life is Life.GATHERED and not self.closed:  # an engine that is closed gathers nothing again
                self.release(keep=False)

    def close(self) -> None:
        """Its engine is closed: what is split stays so, and no step will come."""
        self.closed = True
        for _, parameter in self.parameters():
            parameter.grad = None  # a view of the engine's memory

    def use(self, modules: list[nn.Module]) -> None:
        """These are its modules from now on."""
        self.modules = modules

    def give_up(self) -> None:
        """The unit is no more, and its parameters are other units': nothing here keeps memory."""
        self.gradients.give_up()
        for segment in self.segments:
            segment.give_up()
        self.segments, self.trainable, self.replaced = [], [], True

    def _expect(self, life: Life) -> None:
        if self.life is not life:
            raise UsageError(
                f"unit {self.name!r} is {self.life.name} ({self.life.value}) where it must be {life.name}: "
                "call engine.reset() if an earlier pass ended in an exception."
            )

    def open(self) -> list[list[int]]:
        """The parameters may be touched; their versions, by segment that is split."""
        found: list[list[int]] = []
        for segment in self.segments:
            if segment.split:
                for parameter in segment.parameters:
                    unseal(parameter)
                found.append(versions := segment.versions())
                if self.life is Life.GATHERING:  # filling a flat again is no change, while updates in between count
                    versions[:] = [version - 1 for version in versions]
                    set_versions(tuple(segment.parameters), tuple(versions))
        return found

    def check_current(self) -> None:
        """A backward arrives.

        Raises:
            UsageError: its forward was that of a model that has changed since.
        """
        if self.replaced:
            raise UsageError(
                f"backward reached {self.name!r} through a forward that ran before the structure of the model changed: "
                "call backward before the change, or forward after it."
            )

    def forget_gradients(self) -> None:
        """As before the first backward of a step."""
        self.shown.end_step()
        self.gradients.forget()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for segment in self.segments:
            for slot, parameter in zip(segment.spec.slots, segment.parameters, strict=True):
                yield slot.name, parameter
