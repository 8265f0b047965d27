"""Says cheaply whether a model still is what its units were made of, and if not, what they have to become.

PyTorch tells of every parameter and module that is registered; what it does not tell of (deletions, ``requires_grad_``,
``parameter.data = x``, groups added to the optimizer) shows in a comparison that costs some ten nanoseconds per module
and parameter. Only when something differs is the model walked. Nothing here sends anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from shardfold.errors import ConfigError, UsageError
from shardfold.plan.format import typed
from shardfold.plan.rules import Rules
from shardfold.sharding.freed import FreedParameter
from shardfold.sharding.model import Loan, ShardedModel, alignment, group_numbers
from shardfold.sharding.partition import Cut, cut, main_dtypes
from shardfold.sharding.registry import hold, let_go
from shardfold.sharding.segment import TORCH_DTYPES, Segment
from shardfold.sharding.slices import check_reach
from shardfold.sharding.unit import Life, Unit
from shardfold.tiers.collection import AtCollection
from shardfold.torch_internals import no_subclass_functions, storage_key

__all__ = ["Changes", "UnitChange", "look_at_added"]

_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")


@dataclass
class UnitChange:
    """What the units will be.

    Attributes:
        cuts: of all units.
        kept: units that stay as they are, by name.
        group_of: the group of each parameter that the optimizer knows, by ``id``.
        new_modules: by path, whose buffers have to be moved and made alike.
    """

    cuts: list[Cut]
    kept: dict[str, Unit]
    group_of: dict[int, int]
    new_modules: dict[str, nn.Module]


class Changes:
    """Knows what an engine's units were made of, and says whether the model is still that.

    Args:
        model: whose optimizer has not been given its pieces yet.
        units: as the user gave them.
        seed: of the values of parameters without memory.
        bucket: of :func:`~shardfold.sharding.partition.cut`.
        made_here: the engine made the optimizer: what is new belongs to its group without having to be listed there.

    Attributes:
        modules: that the units were made of; one list, which follows the model.
    """

    def __init__(
        self,
        model: ShardedModel,
        units: Sequence[str | type[nn.Module]] | None,
        seed: int,
        bucket: int = 0,
        *,
        made_here: bool,
    ) -> None:
        self.model, self.seed = model, seed
        self.plan: UnitChange | None = None
        self._units, self._bucket = units, bucket
        self._made_here = made_here
        self.group_of = group_numbers(model.optimizer) if model.optimizer is not None else {}
        #: What a function that made the optimizer left out on purpose.
        self._declined = {id(p) for p in model.module.parameters() if p.requires_grad and id(p) not in self.group_of}
        self._main = main_dtypes(model.module, model.rules)
        self._dirty = False
        self.modules: list[nn.Module] = []
        self._members: set[int] = set()
        self._handles = _hear_registrations(weakref.ref(self))
        self._finalizer = AtCollection(self, _remove, self._handles)
        if model.optimizer is not None:
            look_at_added(model.optimizer, self.check_added)

    def put_together(self, bucket: int) -> None:
        """Small blocks are, up to so many bytes, from the next cut on."""
        self._bucket = bucket

    def cut(self, group_of: dict[int, int] | None = None, *, rules: Rules | None = None) -> list[Cut]:
        """The model's units as it is now; states are for what is trainable, or was and is frozen for a while.
        ``rules``: in place of the model's."""
        model = self.model
        rules = rules or model.rules
        group_of = self.group_of if group_of is None else group_of
        stateful = {id(p) for s in model.trainable() for p in s.parameters}
        trained = {
            id(p): group_of[id(p)]
            for p in model.module.parameters()
            if id(p) in group_of and (p.requires_grad or id(p) in stateful)
        }
        for segment in model.segments():
            for slot, p in zip(segment.spec.slots, segment.parameters, strict=True) if segment.spec.codes else ():
                if id(p) in trained:
                    raise ConfigError(
                        f"{slot.name!r} rests as {typed(segment.spec.codes)}, which no step updates, and was unfrozen: "
                        "freeze it again, or make the engine with it unfrozen, or named in Quantized(keep=...)."
                    )
        own = {id(p): s.spec.own for s in model.segments() for p in s.parameters}
        # What is new may have been made like the parameters that came, or like those that the engine keeps.

        def keeps(p: nn.Parameter, rule: int) -> bool:
            main = self._main.get(rule)
            ours = TORCH_DTYPES[rules.precisions[rule].compute] if own and main is not None else main
            return own.get(id(p), p.dtype not in (main, ours))

        cuts = cut(
            model.module,
            self._units,
            trained,
            rules,
            model.comm.mesh.sizes,
            keeps,
            alignment(model.optimizer),
            model.comm.mesh.coords,
            self._bucket,
            {id(p): s.spec.codes for s in model.segments() for p in s.parameters},
        )
        check_reach(model.optimizer, [c.spec for c in cuts], model.comm.mesh.sizes.reading)
        return cuts

    def close(self) -> None:
        let_go(self.model)
        self._finalizer()

    def check_added(self, parameters: Sequence[Any]) -> None:
        """Before a group is added to the optimizer.

        Raises:
            ConfigError: a parameter is in a group already.
        """
        if self.model.closed:
            return
        names = {id(p): name for name, p in self.model.module.named_parameters()}
        for each in parameters:
            if id(each) in self.group_of and id(each) in names:
                raise ConfigError(
                    f"add_param_group() lists {names[id(each)]!r}, which is in group {self.group_of[id(each)]} of the "
                    "optimizer already: list every parameter once."
                )

    def note(self, module: nn.Module) -> None:
        """A parameter or module was registered in ``module``."""
        if id(module) in self._members:
            self._dirty = True

    # -- what the units were made of

    def renew(self, group_of: dict[int, int] | None = None) -> None:
        """Takes the present model as what the units were made of; ``group_of``: its plan's."""
        model = self.model
        hold(model)
        self.plan, self._dirty = None, False
        self.modules[:] = model.module.modules()
        self._members = {id(module) for module in self.modules}
        self._children = [module._modules for module in self.modules]
        self._sizes = list(map(len, self._children))
        self._parameters = [module._parameters for module in self.modules]
        self._registered = list(self._present())  # PyTorch does not tell of a parameter that becomes None
        # What is trainable has its states already, so it may be frozen and unfrozen without anybody looking.
        self._frozen = [p for unit in model.units for s in unit.segments if not s.spec.trainable for p in s.parameters]
        self._flags = list(map(_requires_grad, self._frozen))
        self._whole = [p for unit in model.units for s in unit.segments if not s.split for p in s.parameters]
        self._places = list(map(Tensor.data_ptr, self._whole))
        # A finer master beside a whole parameter does not see what is written into the parameter.
        self._coarse = [
            (s, i)
            for unit in model.units
            for s in unit.trainable
            if not s.split and not s.master_is_rest
            for i in range(len(s.parameters))
        ]
        self._rounded = [s.parameters[i] for s, i in self._coarse]
        self.updated()
        groups = model.optimizer.param_groups if model.optimizer is not None else []
        self._listed = [len(group["params"]) for group in groups]
        known = {id(p) for unit in model.units for _, p in unit.parameters()}
        group_of = self.group_of if group_of is None else group_of
        self.group_of = {key: group for key, group in group_of.items() if key in known}
        self._declined &= known
        self._group_of_name = {
            name: self.group_of[id(p)]
            for unit in model.units
            for name, p in unit.parameters()
            if id(p) in self.group_of
        }

    def _present(self) -> Iterator[nn.Parameter | None]:
        return chain.from_iterable(map(dict.values, self._parameters))

    def unmoved(self) -> bool:
        """Whether every parameter that is always whole still is a view of its flat."""
        return list(map(Tensor.data_ptr, self._whole)) == self._places

    def updated(self) -> None:
        """Parameters have their master's values."""
        self._versions = list(map(_version, self._rounded))

    def take_written(self) -> None:
        """What was written in place into parameters (``load_state_dict()`` of the model) is the master's too; elements
        that the master rounds to keep its digits. (What is lent comes back by the end of its loan.)"""
        if self.model.loans:
            return
        versions = list(map(_version, self._rounded))
        if versions == self._versions:
            return
        with torch.no_grad():
            for (segment, slot), p, old, new in zip(self._coarse, self._rounded, self._versions, versions, strict=True):
                if old != new:
                    segment.take(slot, p, exact=False)
        self._versions = versions

    def unchanged(self) -> bool:
        """Whether nothing at all happened to the model or to the optimizer's groups; the cheap comparison."""
        with no_subclass_functions():  # a freed parameter would answer each question in Python
            if self._dirty or list(map(len, self._children)) != self._sizes:
                return False
            present = list(self._present())
            if len(present) != len(self._registered) or not all(map(is_, present, self._registered)):
                return False
            if list(map(_requires_grad, self._frozen)) != self._flags or not self.unmoved():
                return False
        optimizer = self.model.optimizer
        return optimizer is None or [len(group["params"]) for group in optimizer.param_groups] == self._listed

    def needed(self) -> bool:
        """Whether units have to be made anew; asks this rank's model only and sends nothing.

        Values given by ``parameter.data = x`` are read in on the way, which needs no other rank.

        Raises:
            ConfigError, ModelError: the model as it is now cannot be trained; it says why.
        """
        model = self.model
        if model.closed or self.unchanged():
            return False
        self.secure()
        if any(unit.pins for unit in model.units):  # inside gathered() the model runs with no communication at all
            return False
        self.plan = self.look()
        if self.plan is None:
            if model.updater is not None:
                model.updater.point_groups(model.units)
            self.renew()
        return self.plan is not None

    def secure(self) -> None:
        """Reads in what was written into parameters beside a finer master, and what ``parameter.data = x`` left outside
        of the flats; saves new parameters that are views of one.

        Raises:
            UsageError: ``x`` has another dtype or device; the parameters have their old values again.
        """
        model = self.model
        if model.closed:
            return
        self.take_written()
        if self.unmoved() and not any(unit.pins for unit in model.units):
            return
        full = [segment for unit in model.units if unit.life is Life.GATHERED for segment in unit.segments]
        moved, refused = _take_values(full, model.loans)
        if moved or refused:  # a change of dtype, there and back, makes autograd forget the nodes that have our hooks
            for unit in model.units:
                unit.shown.note_unheard()
            model.gate.attach(model.units)
        flats = {storage_key(segment.flat.untyped_storage()) for segment in full}
        slots = [(p, slot) for s in full for p, slot in zip(s.parameters, s.spec.slots, strict=True)]
        known = {id(p) for p, slot in slots if tuple(p.shape) == slot.shape}
        if len(known) < len(slots):  # of another shape: no value to read in, but another structure
            self._dirty = True
        for p in model.module.parameters():
            # A flat's memory will be given back; who made a parameter of a part of it has to get a copy.
            if isinstance(p, FreedParameter) or p.is_meta or id(p) in known:
                continue
            if storage_key(p.untyped_storage()) in flats:
                p.data = p.detach().clone()
        self._places = list(map(Tensor.data_ptr, self._whole))
        if refused:
            raise UsageError(
                f"{refused[0]!r}{f' and {len(refused) - 1} more' if len(refused) > 1 else ''} got .data of another "
                "dtype or device than the engine keeps parameters in, and has its old values again: choose precision= "
                "and Runtime(device=...) when making the engine."
            )

    # -- what they are to be made of

    def look(self) -> UnitChange | None:
        """What the units have to become; None if they stay.

        Raises:
            ConfigError: a parameter cannot be given to one group of the optimizer.
            ModelError: the model cannot be cut.
        """
        model = self.model
        if model.updater is not None:
            model.updater.adapt()
        group_of = self._find_groups()
        cuts = self.cut(group_of)
        known = {unit.name: unit for unit in model.units}
        kept = {c.name: known[c.name] for c in cuts if c.name in known and _is_same(known[c.name], c)}
        modules = model.module.named_modules()
        new_modules = {path: module for path, module in modules if id(module) not in self._members}
        stays = len(kept) == len(cuts) == len(known) and all(kept[c.name].modules == c.modules for c in cuts)
        if stays and not any(module._buffers for module in new_modules.values()):
            self.group_of = group_of
            return None
        return UnitChange(cuts, kept, group_of, new_modules)

    def _find_groups(self) -> dict[int, int]:
        """The group of each of the model's parameters that the optimizer knows or has to get."""
        model = self.model
        optimizer = model.optimizer
        if optimizer is None or model.updater is None:
            return {}
        named = list(model.module.named_parameters())
        known = {id(p): name for name, p in named}
        group_of = {key: group for key, group in self.group_of.items() if key in known}
        for number, stranger in model.updater.strangers():
            name = known.get(id(stranger))
            if name is None:
                raise ConfigError(
                    f"group {number} of the optimizer holds a tensor of shape {tuple(stranger.shape)} that is no "
                    "parameter of the model: attach it to the model first, or update it with an optimizer of its own."
                )
            if id(stranger) in group_of:
                raise ConfigError(
                    f"group {number} of the optimizer lists {name!r}, which is in group {group_of[id(stranger)]} "
                    "already: list every parameter once."
                )
            group_of[id(stranger)] = number
        if not self._made_here:  # as in PyTorch: what the user's optimizer does not list is not updated
            return group_of
        for name, p in named:
            if p.requires_grad and id(p) not in group_of and id(p) not in self._declined:
                group = 0 if len(optimizer.param_groups) == 1 else self._group_of_name.get(name)
                if group is None:
                    raise ConfigError(
                        f"{name!r} is trainable but in none of the optimizer's {len(optimizer.param_groups)} groups: "
                        "say which hyper-parameters it has, with engine.optimizer.add_param_group({'params': [...]})."
                    )
                group_of[id(p)] = group
        return group_of


def _take_values(segments: Sequence[Segment], loans: Sequence[Loan]) -> tuple[int, list[str]]:
    """Reads in the values of parameters that no longer are views of their (full) flats: how many, and who is refused.

    If they are lent to be written to, the end of that loan brings rank 0's to every state that mirrors them.
    """
    moved: dict[int, tuple[nn.Parameter, Tensor, Tensor]] = {}  # parameter, its place, its values
    refused: list[str] = []
    for segment in segments:
        views = segment.views_of(segment.flat)
        for slot, p, view in zip(segment.spec.slots, segment.parameters, views, strict=True):
            if p.shape != view.shape or p.data_ptr() == view.data_ptr():
                continue  # another shape is another structure
            if p.dtype != view.dtype or p.device != view.device:
                refused.append(slot.name)
                p.data = view
            else:  # a copy, and written when all are read: two parameters may have been swapped
                moved[id(p)] = (p, view, p.detach().clone())
    with torch.no_grad():
        for p, view, value in moved.values():
            view.copy_(value)
            p.data = view
        if moved:
            torch.autograd.graph.increment_version([p for p, _, _ in moved.values()])
        if any(loan.writes for loan in loans):
            return len(moved), refused
        for segment in segments:
            for slot, p in enumerate(segment.parameters):
                if id(p) in moved:
                    segment.take(slot, moved[id(p)][2])
        for loan in loans:
            loan.overlook(moved)
    return len(moved), refused


def _is_same(unit: Unit, c: Cut) -> bool:
    """Whether the unit is what its cut says, so that it can stay."""
    return unit.spec == c.spec and all(
        len(s.parameters) == len(members) and all(a is b for a, b in zip(s.parameters, members, strict=True))
        for s, members in zip(unit.segments, c.by_segment, strict=True)
    )


def _hear_registrations(listening: weakref.ref[Changes]) -> list[Any]:
    """PyTorch tells of every registration in the process; one that nobody holds any more hears nothing."""

    def registered(module: nn.Module, name: str, value: Any) -> None:
        listener = listening()
        if listener is not None:
            listener.note(module)

    return [
        torch_modules.register_module_parameter_registration_hook(registered),
        torch_modules.register_module_module_registration_hook(registered),
    ]


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


# -- what is added to an optimizer's groups


def look_at_added(optimizer: Any, check: Callable[[list[Any]], None]) -> None:
    """From now on ``optimizer.add_param_group()`` asks first; nothing here keeps the optimizer or what checks alive.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        check: a method, which is called with the parameters that are added, and raises where they cannot be.
    """
    seen, checks = weakref.ref(optimizer), weakref.WeakMethod(check)

    @wraps(type(optimizer).add_param_group)
    def add_param_group(param_group: dict[str, Any]) -> None:
        own = seen()
        assert own is not None  # it is its attribute
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is not None and not isinstance(params, set):  # which has no order: PyTorch refuses it
            params = [params] if isinstance(params, Tensor) else list(params)  # an iterator is read once
            param_group = {**param_group, "params": params}
            if (ask := checks()) is not None:
                ask([each[1] if isinstance(each, tuple) else each for each in params])
        type(own).add_param_group(own, param_group)

    optimizer.add_param_group = add_param_group
