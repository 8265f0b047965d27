"""WHEN a budget of bytes is spent: the first passes of training measure what each unit would keep, and a plan is made.

    bytes       units are recomputed, so that no more is kept than has to be; what each mode would keep is noted
    recompute, keep, select      times; as many units at once are tried as the budget allows
    (ranks take the largest of each number, and all find the same plan: see ``budget``)
    check       the first pass of the plan: what it keeps is measured
    ""          nothing is looked at any more but the shapes of the model's inputs

All modes give the same values, so that which one a pass is tried with changes nothing. Inputs larger than those that
were measured begin anew with ``bytes``.

What is counted are storages that autograd holds for backward, or that are made again or brought back for it, each
once, of what runs inside of the model's forward, without parameters and buffers. A storage is known by its address,
which no other has as long as there is a weak reference to it. On a device it counts as its allocator rounds it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.activations._knapsack import Item, ModeOption, choose, peak, smallest
from shardfold.activations.profile import (
    Bytes,
    MeasuredForward,
    Saved,
    Spot,
    covers,
    milliseconds,
    numel,
    size_of,
    survey,
)
from shardfold.activations.saved_tensors import Results, Tally
from shardfold.errors import ConfigError
from shardfold.plan.checks import human
from shardfold.sharding.autograd import keep, tensors_in
from shardfold.torch_internals import expired, free_weak, storage_key, top_saved_hooks, untraced, weak_storage

__all__ = ["ModeChooser"]

ROUNDS = 3
"""How often each mode is timed."""

LOG = getLogger("shardfold")


class ModeChooser:
    """Chooses the modes of a model's units for a budget.

    Args:
        budget: bytes.
        asked: the argument, for messages.
        device: that trains.
        tally: of what is moved.
        renewed: called when modes are others than before.

    Attributes:
        spots: what is planned.
        phase: see the module; ``wait`` until ranks have agreed.
        kept: the most bytes that were on the device at once in the first pass of the plan, on this rank.
    """

    def __init__(
        self, budget: int, asked: str, device: torch.device, tally: Tally, renewed: Callable[[], None]
    ) -> None:
        self._budget, self._asked, self._device, self._tally, self._renewed = budget, asked, device, tally, renewed
        tally.tell(self._sample)
        self._stays: set[int] = set()
        self._weak: dict[int, Any] = {}
        self._live: Bytes = {}
        self.follow([], set())

    def follow(self, spots: Sequence[Spot], stays: set[int]) -> None:
        """Begins anew with these spots; ``stays`` are the storages of parameters and buffers."""
        self.spots, self._stays = list(spots), stays
        trials = [
            mode for mode in ("recompute", "keep", "select") if any(mode in s.modes for s in spots if s.modes[1:])
        ]
        self.phase, self._next = "bytes", trials * ROUNDS
        self._after = self._forwards = 0
        self._repeated = self._inside = False
        self._shapes: list[Any] = []
        self._open: list[tuple[Any, Any]] = []  # forwards since the last backward: what lives with them, shapes
        self._events: list[MeasuredForward | Saved] = []
        self._plan: list[tuple[Spot, ModeOption]] = []
        self._predicted = 0
        self.kept: int | None = None
        for spot in self.spots:
            spot.enter()

    @property
    def measuring(self) -> bool:
        """Whether forwards are looked at."""
        return bool(self.phase)

    @property
    def waits(self) -> bool:
        """Whether ranks have something to agree on."""
        return self.phase not in ("", "check")

    # -- events

    def begin_forward(self, inputs: Any) -> bool:
        """A forward that is trained begins; whether to :meth:`look` at what autograd saves in it."""
        self._inside = True
        self._open = [(token, shapes) for token, shapes in self._open if token() is not None]
        shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors_in(inputs))
        together = sorted([*(shapes for _, shapes in self._open), shapes], key=numel)
        if not any(covers(known, together) for known in self._shapes):
            if self.phase in ("", "check"):
                LOG.info("activations=%r: larger inputs, so what units keep is measured again", self._asked)
            if self.phase != "bytes":
                self._next = [self.phase, *self._next] if self.phase not in ("", "wait", "check") else self._next
                self._enter("bytes")
        self._together, self._shape = together, shapes
        if self.phase == "bytes":
            self._events = [e for e in self._events if e.token() is not None]
        self._forwards += 1
        return self.phase in ("bytes", "check")

    def look(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Any]]:
        """What is to be done with what autograd saves in the forward under way, in place of what is done now."""

        def unpack(packed: Any) -> Any:
            return packed

        token = weakref.ref(unpack)

        def pack(tensor: Tensor) -> None:
            key, num_bytes = self._know(tensor)
            if key is not None and self.phase == "check":
                self._live[key] = num_bytes
            elif key is not None:
                self._events.append(Saved(key, num_bytes, token))

        return _on_top(pack, unpack)

    def end_forward(self, output: Any) -> None:
        """The forward is over."""
        self._inside = False
        live = _Token()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(live)
        self._open.append((weakref.ref(live), self._shape))
        self._sample()

    def end_backward(self) -> None:
        """A backward is over: the pass has been measured."""
        if self._inside or not self._forwards:
            return
        self._open.clear()
        self._forwards = 0
        if self.phase == "bytes":
            self._shapes.append(self._together)
            after, repeated = survey(self._events)
            self._after, self._repeated = max(self._after, after), self._repeated or repeated
            self._events.clear()
        elif self.phase == "check" and self.kept is not None and self.kept > self._budget:
            LOG.warning("activations=%r: %s were on the device at once", self._asked, human(self.kept))
        if self.phase not in ("", "wait"):
            self._enter("" if self.phase == "check" else self._next.pop(0) if self._next else "wait")

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._forget()
        if phase != "check":
            for spot in self.spots:
                spot.enter()
        if phase in ("keep", "select"):
            self._try(phase)
        if phase in ("check", ""):
            for spot, option in self._plan:
                spot.enter(option.mode)
        self._renewed()

    # -- forwards of spots

    @contextmanager
    def first(self, spot: Spot, inputs: Any) -> Iterator[None]:
        """A forward of a spot, inside of what its mode does."""
        if self.phase == "bytes":
            with self._noted(spot, inputs):
                yield
        elif self.phase == "check":
            if spot.mode == "select":
                with Results(spot.results, self._alive):
                    yield
            else:
                yield
        else:
            with self._timed(spot.forward, spot, inputs):
                yield

    @contextmanager
    def again(self, spot: Spot, inputs: Any) -> Iterator[None]:
        """A forward of a spot that runs again in backward."""
        if self.phase == "bytes":
            yield
        elif self.phase == "check":
            hooks = torch.autograd.graph.saved_tensors_hooks(*_on_top(self._alive, lambda packed: packed))
            with hooks:
                try:
                    yield
                finally:
                    self._sample()
        else:
            with self._timed(spot.again, spot, inputs):
                yield

    @contextmanager
    def _timed(self, times: dict[str, float], spot: Spot, inputs: Any) -> Iterator[None]:
        size = size_of(inputs)
        self._synchronize()
        begun = perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            ms = 1000 * (perf_counter() - begun) / size
            times[spot.mode] = min(times.get(spot.mode, ms), ms)

    @contextmanager
    def _noted(self, spot: Spot, inputs: Any) -> Iterator[None]:
        run = MeasuredForward(spot, size_of(inputs))
        for tensor in tensors_in(inputs):
            self._note(run.inputs, tensor)

        def changed(value: Any) -> None:
            strided = isinstance(value, Tensor) and value.layout is torch.strided
            if strided and storage_key(value.untyped_storage()) in run.results:
                spot.refuse_once()

        def unpack(packed: Any) -> Any:
            return packed

        run.token = weakref.ref(unpack)
        hooks = torch.autograd.graph.saved_tensors_hooks(*_on_top(partial(self._note, run.saved), unpack))
        self._events.append(run)
        with hooks:
            if "select" in spot.modes:
                with Results(spot.results, partial(self._note, run.results), changed):
                    yield
            else:
                yield

    def _know(self, tensor: Tensor) -> tuple[int | None, int]:
        if tensor.layout is not torch.strided:
            return None, 0
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._stays:
            return None, 0
        if key not in self._weak:
            self._weak[key] = weak_storage(storage)
        return key, accelerator.taken(storage.nbytes(), tensor.device)

    def _note(self, into: Bytes, tensor: Tensor) -> None:
        key, num_bytes = self._know(tensor)
        if key is not None:
            into[key] = num_bytes

    def _alive(self, tensor: Tensor) -> None:
        self._note(self._live, tensor)

    def _sample(self) -> None:
        if self.phase == "check":
            self._live = {k: n for k, n in self._live.items() if not expired(self._weak[k])}
            self.kept = max(self.kept or 0, sum(self._live.values()) + self._tally.device)

    def _forget(self) -> None:
        for weak in self._weak.values():
            free_weak(weak)
        self._weak, self._live = {}, {}

    def _synchronize(self) -> None:
        accelerator.synchronize(self._device)

    # -- the plan

    def _items(self, modes: Callable[[Spot], Sequence[str]]) -> tuple[list[Spot], list[Item]]:
        spots = sorted((s for s in self.spots if s.place >= 0), key=lambda s: (s.place, s.name))
        groups: dict[Any, list[Spot]] = {}
        for spot in spots:
            groups.setdefault(spot.group, []).append(spot)
        items = []
        for spot in spots:
            group = groups[spot.group]
            options = [ModeOption(mode, *spot.kept[mode], ms=milliseconds(spot, group, mode)) for mode in modes(spot)]
            items.append(Item(spot.name, spot.fixed, tuple(options)))
        return spots, items

    def _try(self, mode: str) -> None:
        """As many spots as the budget allows are in a mode, and first one of each group."""
        spots, items = self._items(lambda spot: spot.modes)
        plan = [item.options[0] for item in items]
        rank: dict[Any, int] = {}
        order: list[tuple[int, int]] = []
        for i, spot in enumerate(spots):
            group = spot.group
            rank[group] = rank.get(group, -1) + 1
            order.append((rank[group], i))
        for _, i in sorted(order):
            option = next((o for o in items[i].options if o.mode == mode), None)
            if option is not None and (mode != "select" or spots[i].once):
                tried = [*plan[:i], option, *plan[i + 1 :]]
                if peak(items, tried, self._after, repeated=self._repeated) <= self._budget:
                    plan = tried
                    spots[i].enter(mode)

    def _offered(self, spot: Spot) -> Sequence[str]:
        """Modes that can be chosen: what was timed, in a spot of its group, or is moved."""
        group = [other for other in self.spots if other.place >= 0 and other.group == spot.group]
        found = [
            mode
            for mode in spot.modes
            if mode in ("host", "disk")
            or (mode == spot.modes[0])
            or (any(mode in s.forward for s in group) and (mode != "select" or all(s.once for s in group)))
        ]
        return found

    def agree(self, control: Callable[[list[float]], list[float]]) -> None:
        """Ranks find one plan, if all have measured enough.

        Args:
            control: gives the largest of each number over all ranks.

        Raises:
            ConfigError: the first plan does not fit the budget; the message says what the least is.
        """
        left = len(self._next) + (self.phase not in ("wait", "check", ""))
        said = control([left, self._after, self._repeated, *(n for spot in self.spots for n in spot.numbers)])
        if said[0]:
            return
        first = not self._plan
        self._after, self._repeated = int(said[1]), bool(said[2])
        numbers = said[3:]
        for spot in self.spots:
            count = len(spot.numbers)
            spot.take(numbers[:count])
            numbers = numbers[count:]
        spots, items = self._items(self._offered)
        plan = choose(items, self._budget, self._after, repeated=self._repeated)
        if plan is None:
            plan = smallest(items, self._after, repeated=self._repeated)
            least = peak(items, plan, self._after, repeated=self._repeated)
            message = (
                f"activations={self._asked!r}: what autograd saves in this model takes at least {human(least)} "
                f"({least} bytes) on the device: give that, or a smaller batch."
            )
            if first:
                raise ConfigError(message)
            LOG.warning("%s Training goes on with that.", message)
        self._plan = list(zip(spots, plan, strict=True))
        self._predicted = peak(items, plan, self._after, repeated=self._repeated)
        self.kept = None
        modes = Counter(option.mode for option in plan)
        chosen = ", ".join(f"{count} {mode}" for mode, count in sorted(modes.items()))
        LOG.info("activations=%r: %s; at most %s at once", self._asked, chosen or "-", human(self._predicted))
        self._enter("check")

    def described(self) -> list[str]:
        """The plan, in lines of text."""
        head = f"activations={self._asked!r}"
        if not self._plan:
            return [f"{head}: measuring; until then units are recomputed"]
        kept = f"kept {human(self.kept)}" if self.kept is not None else "not run yet"
        again = "; larger inputs are being measured" if self.waits else ""
        lines = [f"{head}: at most {human(self._predicted)} of {human(self._budget)} predicted, {kept}{again}"]
        lines.append(f"  {'unit':<28}  {'mode':<12}{'on the device':>14}{'while backward':>16}{'more ms':>9}")
        for spot, option in self._plan:
            group = [other for other, _ in self._plan if other.group == spot.group]
            more = max(0.0, option.ms - milliseconds(spot, group, "keep")) if option.mode != "keep" else 0.0
            lines.append(
                f"  {spot.name:<28}  {option.mode:<12}{human(option.kept):>14}{human(option.back):>16}{more:>9.2f}"
            )
        rest = self._after + sum(spot.fixed for spot, _ in self._plan)
        return [*lines, f"  {'(all others)':<28}  {'keep':<12}{human(rest):>14}"]


class _Token:
    """A hook of an output that does nothing: it lives as long as what the output was made of."""

    def __call__(self, grad: Tensor) -> None: ...


def _on_top(pack: Callable[[Tensor], None], unpack: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Hooks that do what the present ones do, behind ``pack``; ``unpack`` lives as long as what they save."""
    outer = top_saved_hooks()

    def packed(tensor: Tensor) -> Any:
        with torch.no_grad():
            pack(tensor)
        return keep(tensor) if outer is None else outer[0](tensor)

    def unpacked(value: Any) -> Any:
        unpack(value)
        return value.get() if outer is None else outer[1](value)

    return untraced(packed), untraced(unpacked)
