"""WHERE what autograd saves for backward is meanwhile: kept, made again, or resting in host memory or on disk.

    keep        on the device, as in plain PyTorch
    recompute   a unit's inputs are kept; its forward runs again in backward (arXiv 1604.06174)
    select      the same, but products of matrices, convolutions and attention are kept: what is cheap is made again
    host        copies in (pinned) host memory, which come back one unit ahead of backward
    disk        copies in a file, written and read by a thread
    packed      on the device; what has two values, as masks, in bits (see ``encoded``)
    int8        that, and the rest in 8 bits: gradients are rounded, as no other mode's are
    fit:12GiB   one of these for each unit, by what the first passes measure (see ``fit``)
    tile:1024   of a module that works token by token: its inputs are kept, and what it saves exists for so many tokens
                at a time, in backward too (see ``tiles``)

A mode holds for a unit, or for a module that a rule of its own names. It takes the place of the module's ``forward``,
so that hooks run once, outside of it; in backward the engine has gathered the unit by the time its forward runs again,
so recomputation gathers nothing. Values are those without it, to the bit (but for gradients under ``int8``): random
numbers, autocast and buffers are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.activations._fit import ModeChooser
from shardfold.activations._tiles import tiling
from shardfold.activations.partitioned_inputs import SliceBuffer, Slicer, tensor_axis
from shardfold.activations.profile import Spot
from shardfold.activations.recompute import KEPT, recomputing, without_filling
from shardfold.activations.replaced import ReplacedForward, ReplacedProducts
from shardfold.activations.saved_tensors import Movers, counted, held
from shardfold.activations.unit_graphs import UnitGraphs
from shardfold.errors import ConfigError, ModelError
from shardfold.nn.axis_group import AxisGroup
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import ENCODED, MODES, Activations, Layout
from shardfold.plan.report import SavedReport, SavedRow
from shardfold.plan.rules import EVERYTHING, Patterns, pairs, text_of
from shardfold.sharding.pickling import replace_forward, restore_forward
from shardfold.sharding.unit import Unit
from shardfold.tiers.tiers import Tiers
from shardfold.torch_internals import NormBase, in_backward

__all__ = ["MODES", "Activations", "Replacements", "in_table"]

RECOMPUTED = ("recompute", "select")
MOVED = ("host", "disk", *ENCODED)
FITTED = ("recompute", "select", "host", "disk", "keep")
"""Modes that a budget chooses from; while it is measured, the first of those that apply is in force."""

ONLY_INPUTS = (nn.Embedding, nn.Linear)
"""Modules that save nothing but their inputs, so that making anything again saves nothing."""


def in_table(layout: Layout, given: Any) -> tuple[Layout, Any]:
    """The table of an engine whose argument is ``given``, and the rules that hold: those, or else the table's cell.

    Raises:
        ConfigError: the rules are none, or a mode is unknown.
    """
    if given is None:
        return layout, layout.activations
    rules = pairs(given, "activations", (str, Activations), "mode")
    rest = next((value for pattern, value in rules if pattern == EVERYTHING), layout.activations)
    return layout.replace(activations=rest), given


class Replacements:
    """The places of a model, for as long as an engine lives.

    Args:
        model: whose modules are meant.
        given: the engine's argument: a mode, an :class:`Activations`, or ordered rules of these.
        tiers: that what autograd saves may rest in.
        mesh: the axes that inputs may be split over.
        products: of linear layers.
        graphs: what compiles units; None: nothing does.

    Attributes:
        products: they come and go with the places.
        places: of the units that have a mode.

    Raises:
        ConfigError: the rules are none, a mode is unknown, or what is to be measured is to be compiled.
        LayoutError: inputs are to be split over an axis that is none of tensor.
        ModelError: a rule matches no module.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Any,
        tiers: Tiers,
        mesh: Mesh,
        products: ReplacedProducts,
        graphs: UnitGraphs | None = None,
    ) -> None:
        rules = pairs(given, "activations", (str, Activations), "mode")
        self._model, self.products, self._graphs = model, products, graphs
        self._values = [Activations.named(value) for _, value in rules]
        self._patterns = Patterns([pattern for pattern, _ in rules], "activations")
        self._patterns.check(model)
        self.places: list[ReplacedForward] = []
        self._regions: list[nn.Module] = []  # what is compiled
        self._graphed: list[tuple[nn.Module, Callable[..., Any]]] = []  # those that are no places, with their graphs
        self._elsewhere = False  # stages of other ranks have places, so that this one may have none
        self._movers = Movers(model, tiers)
        self._units: Sequence[Unit] = ()
        self._needs: Callable[[Unit], None] = lambda unit: None
        self._device, self._debug = tiers.device.device, tiers.device.debug
        axes = {value.over: tensor_axis(value.over, mesh) for value in self._values if value.over}
        self._axes = {over: axis for over, axis in axes.items() if mesh[axis] > 1}
        self._slicers: dict[str, Slicer] = {}
        self._rooms: dict[Activations, SliceBuffer] = {}
        self._chooser: ModeChooser | None = None
        if budgets := {value.budget: value.mode for value in self._values if value.budget is not None}:
            if len(budgets) > 1:
                raise ConfigError(
                    f"the rules of activations= have {' and '.join(map(repr, budgets.values()))}: a device has one "
                    "budget, so give all of these rules the same."
                )
            if graphs is not None:
                raise ConfigError(
                    f"activations={next(iter(budgets.values()))!r} measures what runs, which "
                    "Runtime(compile=...) compiles: name a mode instead, or leave compile out."
                )
            self._chooser = ModeChooser(*budgets.popitem(), self._device, self._movers.tally, self._put)

    def follow_ranks(self, along: Callable[[str], AxisGroup]) -> None:
        """From now on inputs are split over the ranks along an axis that ``along`` gives for its name."""
        self._slicers = {
            over: Slicer(along(axis), self._movers.moves, self._device, always=self._debug)
            for over, axis in self._axes.items()
        }

    def share(self, cuts: Sequence[Any], anyone: Callable[[list[bool], str], list[bool]]) -> None:
        """Stages of the model are on several ranks, which hear whether any has places; all call it.

        Args:
            cuts: of this rank's stages.
            anyone: which flags any rank has set, which are for a message.
        """
        self._elsewhere = anyone([self.finds(cuts)], "activations=")[0]

    def attach(self, units: Sequence[Unit], needs: Callable[[Unit], None]) -> None:
        """Puts forwards in place of those of these units, and takes away what was there.

        Args:
            units: of the model.
            needs: called with a unit whose forward is about to run again.

        Raises:
            ModelError: parts of what is recomputed have a mode of their own, or nothing has the mode that is asked for.
        """
        self.remove()
        self.products.attach()
        self.places = self._find(units)
        self._units, self._needs = units, needs
        self._movers.follow([storage for unit in units for storage in unit.storages()])
        if self._chooser is not None:
            for place in self.places:
                place.plan(self._spot(place) if place.given.tile is None else None)
            self._chooser.follow([place.spot for place in self.places if place.spot], self._movers.stays)
        self._regions = self._compilable(units, self.places)
        self._put()

    def check(self, cuts: Sequence[Any]) -> None:
        """Raises what :meth:`attach` would of units that are made of these cuts, while the model is as it was."""
        places = self._find(cuts)
        if self._graphs is not None and not self._elsewhere and not self._compilable(cuts, places):
            raise ModelError(
                "Runtime(compile=...) applies to no unit of this model, in which nothing but single layers was found: "
                "name its blocks with Init(units=...), or leave it out."
            )

    def finds(self, cuts: Sequence[Any]) -> bool:
        """Whether there is a place in them; True where :meth:`check` tells what is wrong with one."""
        try:
            return any(True for _ in self._search(cuts))
        except ModelError:
            return True

    def _find(self, units: Sequence[Any]) -> list[ReplacedForward]:
        """The places in these units, or in the cuts that units will be made of.

        Raises:
            ModelError: see :meth:`attach`.
        """
        places = list(self._search(units))
        if not places and not self._elsewhere and any(value.mode != "keep" for value in self._values):
            asked = next(value.mode for value in self._values if value.mode != "keep")
            raise ModelError(
                f"activations={asked!r} applies to no unit of this model, in which nothing but single layers was "
                "found: name its blocks with Init(units=...), or leave it out."
            )
        return places

    def _put(self) -> None:
        """Puts the forwards of the present modes in place."""
        measuring = self._chooser is not None and self._chooser.measuring
        regions = {id(module): module for module in self._regions}
        self._restore_regions()
        for place in self.places:
            place.restore()
            own, graph = place.module.forward, None
            if self._graphs is not None and regions.pop(id(place.module), None) is not None:
                own, graph = self._compiled(self._graphs, place)
            if place.spot is not None:
                own = without_filling(own)
                if self._chooser is not None and measuring:
                    own = _looked_at(place, place.spot, own, self._chooser)
            if place.current.mode in MOVED:
                place.replace(_moving(place, own, self._movers))
            elif place.current.mode in RECOMPUTED:
                given = place.current
                room = self._rooms.setdefault(given, SliceBuffer(given.contiguous)) if given.contiguous else None
                slicer = self._slicers.get(given.over)
                place.replace(
                    recomputing(
                        place, own, self._needs, self._movers, whole=measuring, slicer=slicer, room=room, graph=graph
                    )
                )
            elif place.current.tile is not None:
                place.replace(tiling(place, own, place.current.tile, self._needs))
            elif place.spot is not None:
                place.replace(own)
        if self._graphs is not None:
            for module in regions.values():
                forward = self._graphs.forward(module, module.forward)
                replace_forward(module, forward)
                self._graphed.append((module, forward))

    def _restore_regions(self) -> None:
        """What is compiled and is no place runs its own forward again."""
        for module, forward in self._graphed:
            restore_forward(module, forward)
        self._graphed = []
        if self._graphs is not None:
            self._graphs.begin()

    def _compiled(self, graphs: UnitGraphs, place: ReplacedForward) -> tuple[Any, Any]:
        """The forward of a place that is compiled, and under ``select`` what keeps and makes again in the graph, where
        nobody else can choose."""
        own, given = place.module.forward, place.current
        if given.mode != "select":
            return graphs.forward(place.module, own), None
        apart = given.over in self._slicers or given.inputs != "device"
        if apart or any(isinstance(module, NormBase) for module in place.inner):  # see ``recomputing``
            return own, None
        return graphs.forward(place.module, own), graphs.forward(place.module, own, KEPT | set(given.kept))

    def _compilable(self, units: Sequence[Any], places: Sequence[ReplacedForward]) -> list[nn.Module]:
        """What is compiled of these units, in which there are these places."""
        if self._graphs is None:
            return []
        tops = [module for unit in units if not unit.spec.root for module in unit.modules]
        return self._graphs.regions([*tops, *(place.module for place in places if not place.unit.spec.root)])

    def _spot(self, place: ReplacedForward) -> Spot:
        given = place.given
        modes = tuple(mode for mode in FITTED if mode in self._among(given)) if given.budget is not None else ()
        if isinstance(place.module, ONLY_INPUTS):
            modes = tuple(mode for mode in modes if mode not in RECOMPUTED)
        return Spot(
            place.unit.name if place.is_unit else place.path,
            type(place.module),
            modes or (given.mode,),
            given.smallest,
            KEPT | set(given.kept),
            lambda mode: self._movers.rate(mode, given.folder),
        )

    def _among(self, given: Activations) -> tuple[str, ...]:
        """What a budget chooses from. On the CPU a copy in host memory saves nothing there."""
        host = ("host",) if accelerator.has_streams(self._device) else ()
        return given.among or ("keep", "recompute", "select", *host)

    @property
    def modes(self) -> tuple[Activations, ...]:
        """Those that are asked for."""
        return tuple(self._values)

    def remove(self) -> None:
        """Gives every module its own forward."""
        for place in self.places:
            place.restore()
        self._restore_regions()
        self.products.remove()
        self.places, self._regions = [], []
        self._rooms.clear()

    # -- a budget

    @property
    def waits(self) -> bool:
        """Whether this rank has measured something that ranks are to agree on."""
        return self._chooser is not None and self._chooser.waits

    def agree(self, control: Callable[[list[float]], list[float]]) -> None:
        """See :meth:`ModeChooser.agree`; every rank calls it if one waits."""
        if self._chooser is not None:
            self._chooser.agree(control)

    def begin_forward(self, inputs: Any) -> bool:
        """See :class:`shardfold.engine.hooks.Replaced`.

        Raises:
            ModelError: what is to be measured is compiled.
        """
        if self._chooser is None:
            return False
        for place in self.places:
            if any(vars(module).get("_compiled_call_impl") is not None for module in place.inner):
                raise ModelError(
                    f"activations={place.given.mode!r} measures what runs, but {place.path!r} is compiled: name a mode "
                    "instead, or compile nothing."
                )
        return self._chooser.begin_forward(inputs)

    def look(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Any]]:
        assert self._chooser is not None
        return self._chooser.look()

    def end_forward(self, output: Any) -> None:
        if self._chooser is not None:
            self._chooser.end_forward(output)

    def end_backward(self) -> None:
        if self._chooser is not None:
            self._chooser.end_backward()
        if self._graphs is not None:
            self._graphs.end_backward()

    # -- reports

    def counted(self) -> AbstractContextManager[SavedReport]:
        """See :meth:`Engine.activations`."""
        return counted(self._model, self._units, self.described(), self._movers)

    def held(self) -> tuple[SavedRow, ...]:
        """See :attr:`MemoryReport.activations`."""
        return held(self._units, self.described(), self._movers)

    def described(self) -> dict[str, str]:
        """What happens in each unit, by its name, where that is not ``keep``."""
        said: dict[str, dict[str, str]] = {}
        for place in self.places:
            mode = str(place.current)
            if mode == "keep" and not place.left:
                continue
            if place.left or (place.current.mode in RECOMPUTED and place.leaves):
                mode = "left to the model's own checkpointing"
            said.setdefault(place.unit.name, {})["" if place.is_unit else place.path] = mode
        blocks = {unit.name: unit.spec.blocks for unit in self._units}
        found: dict[str, str] = {}
        for name, modes in said.items():
            if tuple(modes) == blocks.get(name) and len(alike := {*modes.values()}) == 1:  # of all that it is made of
                modes = {"": alike.pop()}
            found[name] = ", ".join(f"{path}: {mode}" if path else mode for path, mode in modes.items())
        return found

    def explained(self) -> list[str]:
        """What happens in units, in lines of text."""
        lines = self._chooser.described() if self._chooser is not None else []
        left = {n: mode for n, mode in self.described().items() if not lines or "left to" in mode}
        if left:
            lines += ["activations (of all others: keep):", *(f"  {name:<28}  {mode}" for name, mode in left.items())]
        graphs = self._graphs.explained() if self._graphs is not None else ()
        return [*self.products.described(), *lines, *graphs]

    def _search(self, units: Sequence[Any]) -> Iterator[ReplacedForward]:
        rule = self._patterns.assign(self._model)
        unit_of: dict[int, Any] = {}
        # The root's are those that no other has, and a unit's those that none inside of it has.
        for unit in sorted(units, key=lambda unit: (not unit.spec.root, bool(unit.spec.inside))):
            for module in unit.modules:
                unit_of.update({id(inner): unit for inner in module.modules()})
        outer_units = [unit for unit in units if not unit.spec.root and not unit.spec.inside]
        tops = {id(module) for unit in outer_units for module in unit.modules}
        around: set[str] = {""}  # paths of what contains units
        modules = dict(self._model.named_modules())
        for path, module in modules.items():
            if id(module) in tops:
                around.update(path[:i] for i, letter in enumerate(path) if letter == ".")
        found: dict[str, ReplacedForward] = {}
        for path, module in modules.items():
            outer = path.rpartition(".")[0]
            number = rule[id(module)]
            if path in around or (id(module) not in tops and number == rule[id(modules[outer])]):
                continue
            value, enclosing = self._values[number], _enclosing(found, path)
            above = enclosing.current if enclosing is not None else None
            if enclosing is not None and above is not None and _excludes(above, value):
                raise ModelError(
                    f"activations= has {value.mode!r} for {path!r} by its rule for "
                    f"{text_of(self._patterns.patterns[number])}, and {above.mode!r} for {enclosing.path!r}, "
                    "which contains it and is made again as a whole: leave one of them out."
                )
            modes = (value.mode,) if value.budget is None else self._among(value)
            planned = self._chooser is not None and id(module) in tops
            if (modes == ("keep",) and not planned) or id(module) not in unit_of:
                continue
            if isinstance(module, ONLY_INPUTS) and not set(modes) & set(MOVED):
                continue
            found[path] = ReplacedForward(path, module, unit_of[id(module)], value)
        yield from found.values()


def _excludes(above: Activations, value: Activations) -> bool:
    """Whether nothing inside of what has ``above`` may have ``value``. Tiles go with a recomputation: it keeps their
    inputs as it keeps its own; but ``select`` would keep the products of all tiles."""
    if above.mode == "recompute" and value.tile is not None:
        return False
    return above.mode in RECOMPUTED or above.budget is not None or above.tile is not None


def _enclosing(places: dict[str, ReplacedForward], path: str) -> ReplacedForward | None:
    while path:
        path = path.rpartition(".")[0]
        if path in places:
            return places[path]
    return None


def _moving(place: ReplacedForward, forward: Callable[..., Any], movers: Movers) -> Callable[..., Any]:
    given = place.current

    @partial(torch.compiler.disable, recursive=False)  # what it calls is compiled, under the hooks of its frame
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        begun = movers.begin(place.unit.name, given.mode, given.folder, given.smallest, (args, kwargs))
        if place.leave(begun is None):
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            movers.end(begun, place.unit.name)

    return run


def _looked_at(
    place: ReplacedForward, spot: Spot, forward: Callable[..., Any], chooser: ModeChooser
) -> Callable[..., Any]:
    """A module's own forward, of which the chooser learns."""

    @torch.compiler.disable
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if place.left or place.leaves or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with (chooser.again if in_backward() else chooser.first)(spot, (args, kwargs)):
            return forward(*args, **kwargs)

    return run
