"""WHAT rests where: the table of states that every member of the ZeRO family is a value of.

Data-parallel training keeps a few kinds of state for every parameter. A :class:`Layout` says for each kind over which
mesh axes it is split, in which dtype, and in which tier it rests; and for the two transfers between rests (gather,
reduce) what is on the wire. A :class:`Precision` says which dtypes the words ``compute``, ``grads``, ``reduce``,
``master`` and ``moments`` mean. Nothing here knows a device, a process group or a stage.

    state     what it is                                                 absent when
    params    what forward and backward read                             None: master is cast while it is gathered
    held      what stays between forward and backward                    None: as params
    grads     accumulated gradients; split = reduced at once             the parameter is frozen
    master    what the optimizer updates                                 the parameter is frozen
    moments   the optimizer's own state, one cell per moment             the parameter is frozen

and one of none: ``activations``, what autograd saves in forward for backward (:class:`Activations`).

Sources: ZeRO (arXiv 1910.02054, section 5), ZeRO++ (arXiv 2306.10209, section 3), MiCS/HSDP (arXiv 2205.00119).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from math import prod
from os import PathLike
from typing import Any

from shardfold.errors import ConfigError, LayoutError, did_you_mean
from shardfold.plan.axes import DATA_AXES, Axes, Mesh, Sizes
from shardfold.plan.checks import (
    FOLDERS,
    Folders,
    are_folders,
    described,
    folders_of,
    is_integer,
    is_number,
    known_arguments,
    meant,
    parse_bytes,
)
from shardfold.plan.copies import Copies
from shardfold.plan.format import typed
from shardfold.plan.formats import FLOATS, FORMATS, ITEMSIZE, Format, format_named
from shardfold.plan.outer import Outer
from shardfold.plan.quantized import Quantized
from shardfold.plan.signs import Signs

_HOPS = re.compile(r"(?P<name>[a-z]+\d*(/\d+)?)x(?P<hops>\d+)(?P<options>([:+,].*)?)")
ORDERED = "+ordered"
"""Behind the name of a format: see :class:`Wire`."""

__all__ = [
    "DATA_AXES",
    "ITEMSIZE",
    "MODES",
    "PRECISIONS",
    "ROLES",
    "Activations",
    "Axes",
    "Cell",
    "Layout",
    "Precision",
    "Sizes",
    "Tier",
    "Wire",
    "rests",
]

UNTIL = ("backward", "step")
ROLES = ("compute", "grads", "reduce", "master", "moments")
"""The dtype words of a table; :class:`Precision` says what they mean."""

RECIPES = ("fp8", "fp8-rowwise")
"""How products of linear layers are rounded; see :class:`Precision`."""
STATES = ("params", "held", "grads", "master", "moments")
ENCODED = ("packed", "int8")
"""Those of :data:`MODES` that keep what autograd saves in fewer bits."""
MODES = ("keep", "recompute", "select", "host", "disk", *ENCODED)
"""What can happen to what autograd saves; see :class:`Activations`."""


class Tier(str, Enum):
    """Where a state rests.

    Examples:
        >>> sf.PRESETS["infinity"].params.tier is sf.Tier.HOST
        True
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    def __str__(self) -> str:
        return self.value


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Precision:
    """What the dtype words of a table mean. Values are dtype names of :data:`ITEMSIZE`.

    ``reduce`` is the dtype on the wire of a gradient's transfer and of the gradient buffer that feeds it; ``grads`` is
    the dtype in which gradients accumulate.

    Attributes:
        autocast: forward runs under ``torch.autocast`` with this dtype (``bf16`` or ``fp16``); None: without.
        buffers: ``"own"``: buffers keep their dtype. ``"compute"``: floating ones, but for fp64, follow ``compute``, as
            some models read them together with activations and do not cast.
        inputs: ``"compute"``: floating inputs of the model of up to 32 bits are cast to ``compute``, if that has 16.
            ``"own"``: the model gets them as they are, such as a time step that bf16 would round.
        outputs: ``"fp32"``: what the model gives in 16 bits comes back in fp32, so that a loss that is computed from it
            is; its gradients enter the model in 16 bits again. ``"compute"``: it stays as the model gives it.
        rounding: of a bf16 master and its moments after each update: ``"nearest"``, or ``"stochastic"``, which moves
            weights also where an update is smaller than half of their last digit (arXiv 2010.06192).
        linear: what the factors of products of linear layers are rounded to: ``"fp8"``, with a scale for each tensor;
            ``"fp8-rowwise"``, with one for each row; None: they are in the dtype of ``compute`` or ``autocast``. See
            ``numerics.fp8_layers``.
        tf32: whether matrix products and convolutions of fp32 tensors may round their inputs to TF32 (10 bits) on
            NVIDIA GPUs, in the whole process while the engine lives; None: as PyTorch is set. On the CPU it does
            nothing.

    Examples:
        >>> sixteen = sf.Precision(compute="bf16", grads="bf16", reduce="bf16")  # as the ZeRO paper counts: 16 bytes
        >>> sixteen.master
        'fp32'
    """

    compute: str = "fp32"
    grads: str = "fp32"
    reduce: str = "fp32"
    master: str = "fp32"
    moments: str = "fp32"
    autocast: str | None = None
    buffers: str = "own"
    inputs: str = "compute"
    outputs: str = "fp32"
    rounding: str = "nearest"
    linear: str | None = None
    tf32: bool | None = None

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype name of each role of a table."""
        return {role: getattr(self, role) for role in ROLES}

    @property
    def narrow(self) -> bool:
        """Whether forward computes in 16 bits."""
        return self.autocast is not None or self.compute in ("bf16", "fp16")

    @property
    def input_dtype(self) -> str | None:
        """What floating inputs of the model are cast to; None: they are left alone."""
        return self.compute if self.inputs == "compute" and self.compute in ("bf16", "fp16") else None

    @property
    def widens(self) -> bool:
        """Whether what the model gives in 16 bits is cast to fp32."""
        return self.narrow and self.outputs == "fp32"

    def __post_init__(self) -> None:
        floats = ("bf16", "fp16", "fp32", "fp64")
        for role in ROLES:
            if (name := getattr(self, role)) not in floats:
                raise LayoutError(
                    f"Precision.{role} is {name!r}, which is not a dtype.{did_you_mean(str(name), floats)}"
                )
        if self.autocast not in (None, "bf16", "fp16") or (self.autocast and self.compute != "fp32"):
            raise LayoutError(
                f"Precision.autocast is {self.autocast!r} with compute {self.compute!r}: autocast takes 'bf16' or "
                "'fp16' over parameters in fp32; set compute='fp32', or leave autocast out."
            )
        if self.buffers not in ("own", "compute"):
            near = did_you_mean(str(self.buffers), ("own", "compute"))
            raise LayoutError(f"Precision.buffers is {self.buffers!r}, which is unknown.{near}")
        if self.inputs not in ("compute", "own"):
            raise LayoutError(
                f"Precision.inputs is {self.inputs!r}: it is 'compute', or 'own' for what the model is given to keep "
                "its dtype."
            )
        if self.outputs not in ("fp32", "compute"):
            raise LayoutError(
                f"Precision.outputs is {self.outputs!r}: it is 'fp32', or 'compute' for what the model gives in 16 "
                "bits to stay so."
            )
        if self.rounding not in ("nearest", "stochastic") or (self.rounding != "nearest" and self.master != "bf16"):
            raise LayoutError(
                f"Precision.rounding is {self.rounding!r} with a master in {self.master}: it is 'nearest', or "
                "'stochastic' with master='bf16'."
            )
        if self.linear not in (None, *RECIPES):
            raise LayoutError(
                f"Precision.linear is {self.linear!r}, which is no recipe.{did_you_mean(str(self.linear), RECIPES)}"
            )
        if self.linear and self.compute == "fp64":
            raise LayoutError(
                f"Precision.linear is {self.linear!r} with compute 'fp64': it takes 'bf16', 'fp16' or 'fp32', of which "
                "factors are rounded."
            )
        if self.tf32 not in (None, True, False):
            raise LayoutError(f"Precision.tf32 is {self.tf32!r}: it is True, False, or None for PyTorch's setting.")
        if ITEMSIZE[self.master] < ITEMSIZE[self.compute]:
            raise LayoutError(
                f"Precision.master is {self.master} but compute is {self.compute}: "
                "the optimizer cannot update a copy that is coarser than what forward reads; widen master."
            )

    @staticmethod
    def named(name: str | Precision) -> Precision:
        """The policy of that name (see :data:`PRECISIONS`), or the value itself.

        Raises:
            LayoutError: the name is unknown.
        """
        if isinstance(name, Precision):
            return name
        if name not in PRECISIONS:
            raise LayoutError(f"precision {name!r} is unknown.{did_you_mean(str(name), PRECISIONS)}")
        return PRECISIONS[name]


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(compute="bf16"),
    "fp16": Precision(compute="fp16"),
    "bf16-autocast": Precision(autocast="bf16"),
    "fp16-autocast": Precision(autocast="fp16"),
    "fp8": Precision(compute="bf16", linear="fp8"),
    "fp8-rowwise": Precision(compute="bf16", linear="fp8-rowwise"),
    "bf16-pure": Precision(compute="bf16", grads="bf16", reduce="bf16", master="bf16", moments="bf16"),
}


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Cell:
    """How one state rests on each rank: ``over=()`` means that every rank holds all of it. A tier's name will do.
    ``folder``: of the disk tier, where the file is, or several, one for each drive, over which values are spread; ``~``
    is the user's home, and ``{local_rank}`` the rank's number on its node; None: the system's folder for temporary
    files. ``share``: of master and moments, or of params, in a slower tier: at least which part of their bytes rests
    there, in whole units; in the others they rest on the device (see :meth:`Layout.near`). ``until``: of held, which is
    whole: ``"backward"``, or ``"step"``: what the first micro-batch of a step has gathered stays for all of them.
    ``small``: of params that are split: those of at most so many elements are not (see :meth:`Layout.whole`).

    Examples:
        >>> cell = sf.Cell(over=("intra",), dtype="master", tier="host")
        >>> cell.parts({"inter": 2, "intra": 8})
        8
    """

    over: Axes = ()
    dtype: str
    tier: Tier = Tier.DEVICE
    folder: Folders = None
    share: float = 1.0
    until: str = "backward"
    small: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", folders_of(self.folder))
        if self.tier in list(Tier):  # what is none is told by the table, which knows the state
            object.__setattr__(self, "tier", Tier(self.tier))

    def parts(self, mesh: Sizes) -> int:
        """Into how many equal shards the state is cut on that mesh."""
        return prod(mesh[axis] for axis in self.over)

    @property
    def remarks(self) -> str:
        """What is said behind its memory."""
        part = "" if self.share == 1.0 else f", {self.share} of it or more"
        part += ", until the step" if self.until == "step" else ""
        return part + (f", whole where there are {self.small:,} elements or fewer" if self.small else "")

    def __str__(self) -> str:
        """All but the folder."""
        return f"split over {_axes(self.over)}, {self.dtype}, {self.tier}{self.remarks}"


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Activations:
    """What happens to what autograd saves in the forward of a unit: the last cell of a table. Dtypes are those of the
    operations.

    Attributes:
        mode: one of :data:`MODES`; or ``"fit:12GiB"``: for each unit the one with which what autograd saves takes at
            most so many bytes of the device at once, on each rank, and the least time; or, by a rule for modules that
            work token by token, ``"tile:1024"``: inputs are kept, and the forward runs for so many tokens at a time,
            and again in backward.
        among: of ``fit``: the modes to choose from; none: ``keep``, ``recompute`` and ``select``, and on CUDA ``host``.
        kept: of ``select``: operations whose results are kept too, e.g. ``torch.ops.aten.silu.default``.
        over: of ``recompute`` and ``select``: the axis of tensor whose ranks keep a slice each of inputs, which are the
            same on them; one gather brings an input back (arXiv 1910.02054, section 6.1). Empty: each keeps all.
        inputs: of ``recompute`` and ``select``: the tier in which what is kept of inputs rests.
        contiguous: with ``over``: slices lie in memory for so many units, one behind the other, which is used again in
            each step; 0: each for itself.
        smallest: bytes of the smallest tensor that is moved, sliced or encoded.
        folder: of ``disk``: where the file is; None: the system's folder for temporary files.

    Raises:
        ConfigError: the mode is unknown, or a field does not go with it.

    Examples:
        >>> sf.PRESETS["zero2"].replace(activations=sf.Activations(mode="recompute", inputs="host")).activations.mode
        'recompute'
    """

    mode: str = "keep"
    among: tuple[str, ...] = ()
    kept: tuple[Any, ...] = ()
    over: str = ""
    inputs: str = "device"
    contiguous: int = 0
    smallest: int = 64 * 1024
    folder: str | None = None

    def __post_init__(self) -> None:
        fits, tiles = self.budget is not None, self.tile is not None
        for name in ("among", "kept"):
            if not isinstance(getattr(self, name), tuple):
                raise ConfigError(f"Activations.{name} is {described(getattr(self, name))}: it is a tuple.")
        for mode in self.among:
            choices = [each for each in MODES if each not in ENCODED]
            if not fits or mode not in choices:
                raise ConfigError(
                    f"Activations.among has {mode!r}, but names what 'fit:...' chooses from."
                    f"{did_you_mean(mode, choices)}"
                )
        if self.mode not in MODES and not fits and not tiles:
            raise ConfigError(f"activations={self.mode!r} is unknown.{did_you_mean(str(self.mode), MODES)}")
        if self.kept and self.mode != "select" and not fits:
            raise ConfigError(f"Activations.kept says what 'select' keeps, but mode is {self.mode!r}: leave it out.")
        self._check_inputs()
        if self.folder is not None and "disk" not in (self.mode, self.inputs, *self.among):
            raise ConfigError(f"Activations.folder is for 'disk', but mode is {self.mode!r}: leave it out.")
        if self.folder is not None and not isinstance(self.folder, (str, PathLike)):  # pyright: ignore
            raise ConfigError(f"Activations.folder is {described(self.folder)}: it is the path of a folder, or None.")
        if not is_integer(self.smallest, 0):
            raise ConfigError(
                f"Activations.smallest is {described(self.smallest)}: it is a number of bytes, 0 or more."
            )

    def _check_inputs(self) -> None:
        """
        Raises:
            ConfigError: what becomes of a recomputed unit's inputs is unknown, or the mode keeps no inputs.
        """
        if not isinstance(self.over, str):  # pyright: ignore
            raise ConfigError(f"Activations.over is {described(self.over)}: it is the name of an axis, as 'tensor'.")
        if self.inputs not in list(Tier):
            raise ConfigError(
                f"Activations.inputs is {described(self.inputs)}, which is not a tier."
                f"{did_you_mean(str(self.inputs), map(str, Tier))}"
            )
        if not is_integer(self.contiguous, 0):
            raise ConfigError(f"Activations.contiguous is {described(self.contiguous)}: it is a number of units, or 0.")
        if (self.over or self.inputs != "device") and self.mode not in ("recompute", "select"):
            name = "over" if self.over else "inputs"
            raise ConfigError(
                f"Activations.{name} says what becomes of the inputs of what is recomputed, but mode is {self.mode!r}: "
                "take 'recompute' or 'select', or leave it out."
            )
        if self.contiguous and (not self.over or self.inputs != "device"):
            raise ConfigError(
                "Activations.contiguous is for slices of inputs that stay on the device: it goes with over= and "
                "without inputs=."
            )

    @property
    def budget(self) -> int | None:
        """Bytes, of ``fit``.

        Raises:
            ConfigError: there is no such number.
        """
        word, colon, size = str(self.mode).partition(":")
        if word != "fit":
            return None
        found = parse_bytes(size)
        if not colon or found is None:
            raise ConfigError(
                f"activations={self.mode!r}: after 'fit:' give the budget in bytes, as in 'fit:12GiB' or 'fit:500MB'."
            )
        return found

    @property
    def tile(self) -> int | None:
        """Tokens at a time, of ``tile``.

        Raises:
            ConfigError: there is no such number.
        """
        word, _, tokens = str(self.mode).partition(":")
        if word != "tile":
            return None
        if not tokens.isdecimal() or not int(tokens):
            raise ConfigError(f"activations={self.mode!r}: after 'tile:' give a number of tokens, as in 'tile:1024'.")
        return int(tokens)

    def chosen(self, mode: str) -> Activations:
        """The value for a unit for which that mode was chosen."""
        kept, folder = self.kept if mode == "select" else (), self.folder if mode == "disk" else None
        return replace(self, mode=mode, among=(), kept=kept, folder=folder)

    @property
    def tier(self) -> Tier | None:
        """Where it rests between forward and backward; None: nowhere, or each unit has its own mode."""
        if self.mode in ("keep", "select", *ENCODED):
            return Tier.DEVICE
        return {"host": Tier.HOST, "disk": Tier.DISK}.get(self.mode)

    @property
    def fate(self) -> str:
        """What becomes of it between forward and backward, as a table says it."""
        words = {
            "recompute": "recomputed",
            "select": "recomputed, but products",
            "packed": "device, masks as bits",
            "int8": "device, in 8 bits",
        }
        return words.get(self.mode, str(self.tier or self.mode)) + self._whereabouts

    def __str__(self) -> str:
        return self.mode + (f" over {self.over}" if self.over else "") + self._whereabouts

    @property
    def _whereabouts(self) -> str:
        return f", inputs on {self.inputs}" if self.inputs != "device" else ""

    @staticmethod
    def named(given: str | Activations) -> Activations:
        """The value itself, or that of a mode's name.

        Raises:
            ConfigError: the name is unknown.
        """
        return given if isinstance(given, Activations) else Activations(mode=given)


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Wire:
    """What a transfer puts on the link: the name of a format (see :mod:`shardfold.plan.formats`), which a dtype's name
    is too, or a dtype word of the table.

    Attributes:
        hops: 2: what is split over nodes and ranks of a node crosses one after the other, so that between nodes each
            element travels once and not once per rank. ``x2`` in the format's name says the same: ``int4x2``.
        ordered: of reduce: the gradient of each micro-batch is sent by itself, and added to the sum in the order of
            ranks, so that the sum does not depend on how many ranks share out the micro-batches of a step.
            ``+ordered`` behind the format's name says the same: ``fp32+ordered``.

    Examples:
        >>> sf.PRESETS["zero3"].replace(gather=sf.Wire(format="bf16")).gather.format
        'bf16'
    """

    format: str
    hops: int = 1
    ordered: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.format, str) and self.format.endswith(ORDERED):  # pyright: ignore
            object.__setattr__(self, "format", self.format.removesuffix(ORDERED))
            object.__setattr__(self, "ordered", True)
        if isinstance(self.format, str) and (found := _HOPS.fullmatch(self.format)):  # pyright: ignore
            object.__setattr__(self, "format", found["name"] + found["options"])
            object.__setattr__(self, "hops", int(found["hops"]))
        if self.hops not in (1, 2):
            raise LayoutError(
                f"a format takes 1 hop, or 2 (first within nodes and then between), and not {self.hops!r}: give 1 or 2."
            )
        if self.ordered not in (True, False) or (self.ordered and self.hops == 2):
            raise LayoutError(
                f"Wire(ordered={described(self.ordered)}, hops={self.hops}): it is True, for sums in the order of all "
                "ranks, of which two hops would make sums of sums, or False: give one of the two."
            )

    def __str__(self) -> str:
        name, plus, options = typed(self.format).partition("+")
        return name + ("x2" if self.hops == 2 else "") + plus + options + ORDERED * self.ordered

    @staticmethod
    def named(given: str | Wire) -> Wire:
        """The value itself, or that of a format's name."""
        return Wire(format=given) if isinstance(given, str) else given


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the ZeRO family. Values derive from each other with :meth:`replace` and :meth:`edit`.

    Raises:
        LayoutError: the table contradicts itself; the message says which two cells and how to mend them.

    Examples:
        >>> within_nodes = sf.PRESETS["zero2"].edit("grads", "master", "moments", over=("intra",))
        >>> within_nodes.moments.over
        ('intra',)
    """

    params: Cell | None = Cell(dtype="compute")
    held: Cell | None = None
    grads: Cell = Cell(dtype="grads")
    master: Cell = Cell(dtype="master")
    moments: Cell = Cell(dtype="moments")
    activations: Activations = Activations()
    gather: Wire = Wire(format="compute")
    reduce: Wire = Wire(format="reduce")
    outer: Outer | None = None
    signs: Signs | None = None
    base: Quantized | None = None
    copies: Copies | None = None

    @cached_property
    def rest(self) -> Cell:
        """Where forward's parameters come from: ``params``, or ``master`` when there is no such copy."""
        return self.params or self.master

    @property
    def kept(self) -> Cell:
        """What is kept between forward and backward."""
        return self.held or self.rest

    @property
    def gathers_once(self) -> bool:
        """Whether what the first micro-batch of a step has gathered stays for all of them."""
        return self.held is not None and self.held.until == "step"

    @cached_property
    def comes_and_goes(self) -> bool:
        """Whether a unit's gathered parameters have memory of the device only while they are read."""
        return _away(self.rest)

    @property
    def buffered(self) -> bool:
        """Whether gradients wait in a buffer of their own until they are summed and go to where they rest."""
        return _away(self.grads) or self.reduce.ordered

    @property
    def updates_on(self) -> Tier:
        """Where the update computes: on the host where ``master`` rests there or on disk."""
        return Tier.DEVICE if self.master.tier is Tier.DEVICE else Tier.HOST

    @property
    def copied(self) -> bool:
        """Of a bound table: whether a neighbour holds a copy of what this rank's master and moments are."""
        return self.is_copied(trainable=True)

    def is_copied(self, *, trainable: bool) -> bool:
        """The same, or of this rank's part of what is frozen."""
        cell = self.master if trainable else self.rest
        return self.copies is not None and self.copies.to in cell.over

    def copies_rest(self, *, trainable: bool) -> Cell:
        """The tier and the folder of copies; whatever else its cell says is of their originals."""
        cells = (self.moments, self.master) if trainable else (self.rest,)
        tier = Tier(self.copies.tier) if self.copies is not None and self.copies.tier is not None else cells[0].tier
        folder = next((cell.folder for cell in cells if cell.tier is tier), None)
        return replace(cells[0], tier=tier, folder=folder)

    @property
    def share(self) -> float:
        """Which part of the optimizer's states, or else of params, rests in a slower tier, at least."""
        return self.params.share if self.shares_params and self.params is not None else self.moments.share

    @property
    def shares_params(self) -> bool:
        """Whether it is params of which a part stays on the device."""
        return self.params is not None and self.params.share != 1.0

    def near(self) -> Layout:
        """The table of units whose part stays on the device: params do, or else master and moments, and gradients,
        which are where master is."""
        if self.shares_params and self.params is not None:
            return self.replace(params=replace(self.params, tier=Tier.DEVICE, folder=None, share=1.0))
        grads = self.grads if self.master.tier is Tier.DEVICE else replace(self.grads, tier=Tier.DEVICE, folder=None)
        master, moments = (
            replace(cell, tier=Tier.DEVICE, folder=None, share=1.0) for cell in (self.master, self.moments)
        )
        return self.replace(grads=grads, master=master, moments=moments)

    @property
    def small(self) -> int:
        """Parameters of at most so many elements rest whole where others are split."""
        return self.params.small if self.params is not None else 0

    def whole(self) -> Layout:
        """The table of small parameters: they rest whole on the device, and an update is gathered once, behind it."""
        assert self.params is not None
        params = replace(self.params, over=(), small=0, tier=Tier.DEVICE, folder=None)
        return self.replace(params=params, held=None, gather=Wire(format="compute"))

    @property
    def buffer(self) -> str:
        """The dtype of the buffer from which gradients are sent that do not rest whole, of a bound table: that of the
        format if it is one, so that they are rounded once and wait narrow."""
        return self.reduce.format if FORMATS[self.reduce.format].native is not None else self.grads.dtype

    def cells(self) -> dict[str, Cell]:
        """The states of parameters that this table has, by name, in table order."""
        named = {name: getattr(self, name) for name in STATES}
        return {name: cell for name, cell in named.items() if cell is not None}

    def replace(self, **changes: Any) -> Layout:
        """A copy with other cells or wires.

        Raises:
            LayoutError: the table has no such entry.
        """
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise LayoutError(f"the table has no entry {name!r}.{did_you_mean(name, known)}")
        return replace(self, **changes)

    def with_outer(self, outer: Outer | Signs | None) -> Layout:
        """A copy with these outer steps, or signs; None: the table itself."""
        if isinstance(outer, Signs):
            return replace(self, signs=outer)
        return self if outer is None else replace(self, outer=outer)

    @property
    def bundles(self) -> bool:
        """Whether one collective carries all segments of the units that a ``PUSH`` or ``PULL`` is for: signs of them,
        while outer gradients go one by one."""
        return self.signs is not None

    @property
    def rare(self) -> str:
        """The axis along which ranks come together now and then only; empty: there is none."""
        between = self.outer or self.signs
        return between.axis if between is not None else ""

    def edit(self, *states: str, **changes: Any) -> Layout:
        """A copy in which the named cells have other fields: ``edit("grads", over=("intra",))``,
        ``edit("activations", mode="recompute")``."""
        cells: dict[str, Any] = {**self.cells(), "activations": self.activations}
        known = (*STATES, "activations")
        for state in states:
            if state not in known:
                raise LayoutError(f"the table has no state {state!r}.{did_you_mean(state, known)}")
            if state not in cells:
                raise LayoutError(f"this table has no {state} to edit: give it a cell with replace({state}=Cell(...)).")
            known_fields = [field.name for field in fields(cells[state])]
            for name in changes:
                if name not in known_fields:
                    raise LayoutError(f"the cell of {state} has no field {name!r}.{did_you_mean(name, known_fields)}")
        return replace(self, **{state: replace(cells[state], **changes) for state in states})

    def __post_init__(self) -> None:
        object.__setattr__(self, "activations", Activations.named(self.activations))  # a mode's name does too
        if self.activations.tile is not None:
            raise LayoutError(
                f"activations={self.activations.mode!r} is for modules that work token by token: name them, as in "
                f"activations={{'*.mlp': {self.activations.mode!r}, '*': 'keep'}}."
            )
        for name in ("gather", "reduce"):  # and a format's
            object.__setattr__(self, name, Wire.named(getattr(self, name)))
        if self.base is not None:
            object.__setattr__(self, "base", Quantized.named(self.base))
            if not isinstance(self.base, Quantized):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise LayoutError(
                    f"base of the table is {described(self.base)}: it is a Quantized, the name of a format, or None."
                )
        self._check_copies()
        for names, kind, optional in ((STATES, Cell, ("params", "held")), (("gather", "reduce"), Wire, ())):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) and not (value is None and name in optional):
                    named = ", or the name of a format" if kind is Wire else ""
                    raise LayoutError(f"{name} of the table is {described(value)}: it is a {kind.__name__}{named}.")
        if self.outer is not None and not isinstance(self.outer, Outer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"outer of the table is {described(self.outer)}: it is an Outer, or None.")
        if self.signs is not None and (self.outer is not None or not isinstance(self.signs, Signs)):  # pyright: ignore
            raise LayoutError("signs of the table are Signs or None, and a table has them or outer steps, not both.")
        if self.outer is not None and self.outer.format is not None:  # as programs have it
            named = replace(self.outer, format=format_named(self.outer.format, "what outer steps send", (), _is_outer))
            object.__setattr__(self, "outer", named)
        for name, cell in self.cells().items():
            _check_cell(name, cell)
        for name, wire, fits in (("gather", self.gather, _is_gathered), ("reduce", self.reduce, bool)):
            object.__setattr__(self, name, replace(wire, format=format_named(wire.format, name, ROLES, fits)))
        for name, wire in (("gather", self.gather), ("reduce", self.reduce)):
            if wire.format not in ROLES and FORMATS[wire.format].only_rests:
                raise LayoutError(
                    f"{name} travels as {wire}, but that is made of whole tensors: frozen parameters can rest so, with "
                    f"base={typed(wire.format)!r}, and are then gathered so; give {name} another format."
                )
        if self.gather.ordered:
            raise LayoutError(f"gather travels as {self.gather}, but nothing is summed there: leave {ORDERED!r} out.")
        if self.reduce.ordered and (self.outer is not None or self.signs is not None):
            raise LayoutError(
                f"reduce travels as {self.reduce}, in the order of all ranks, and the table has groups that come "
                "together every so many steps (outer), or signs: leave one of the two out."
            )
        if self.gather.format not in ROLES and FORMATS[self.gather.format].state is not None:
            raise LayoutError(
                f"gather travels as {self.gather}, but nothing is added to parameters of what was lost before: "
                "what is gathered next is the parameters again; leave 'error' out."
            )
        if self.gather.format not in ROLES and not FORMATS[self.gather.format].gathers:
            raise LayoutError(
                f"gather travels as {self.gather}, but forward and backward cannot compute with signs of "
                "parameters: give gather 'int8' or 'int4'; signs are for reduce."
            )
        if self.master.over != self.moments.over:
            raise LayoutError(
                f"master is split over {_axes(self.master.over)} but moments over {_axes(self.moments.over)}: "
                "the update reads both element by element, so split them alike."
            )
        if self.grads.over and self.grads.over != self.master.over:
            raise LayoutError(
                f"grads are split over {_axes(self.grads.over)} but master over {_axes(self.master.over)}: "
                "the update needs a gradient for each element it owns, so split them alike or do not split grads."
            )
        rest = self.rest.over
        if rest != self.master.over[: len(rest)]:
            raise LayoutError(
                f"params are split over {_axes(rest)} but master over {_axes(self.master.over)}: "
                "the axes of params must be the first axes of master, so that an updated shard is part of params here."
            )
        self._check_tiers()
        if not set(self.kept.over) <= set(rest):
            raise LayoutError(
                f"held is split over {_axes(self.kept.over)} but params only over {_axes(rest)}: "
                "backward cannot hold less than rests; drop the extra axes from held, or split params over them."
            )

    def _check_tiers(self) -> None:
        """
        Raises:
            LayoutError: a state is not where its update, or its reader, could have it.
        """
        tier = self.master.tier
        for name, cell in self.cells().items():
            away = name == "moments" or (name == "master" and cell.tier is not Tier.DEVICE)
            if name != "params" and cell.share != (self.moments.share if away else 1.0):
                raise LayoutError(
                    f"{name} has share={cell.share:g} and moments share={self.moments.share:g}: units stay on the "
                    "device with all of the optimizer's states, so give master and moments one share where both rest "
                    "in a slower tier, and other states but params none."
                )
            if name in ("params", "moments") and cell.share != 1.0 and cell.tier is Tier.DEVICE:
                raise LayoutError(
                    f"{name} have share={cell.share:g} but rest on the device: it is of a slower tier; leave it out."
                )
        if self.moments.share != 1.0 and self.params is not None and self.params.tier is not Tier.DEVICE:
            raise LayoutError(
                f"moments have share={self.moments.share:g} and params rest in the {self.params.tier} tier: a unit "
                "whose master stays on the device has its parameters there, so let params rest on the device, or leave "
                "the share out."
            )
        if self.held is not None and self.held.tier is not Tier.DEVICE:
            raise LayoutError(
                f"held rests in the {self.held.tier} tier, but is what backward reads without a wait: let it rest on "
                "the device, or leave it out."
            )
        if tier is Tier.DEVICE:
            for name in ("params", "grads"):
                cell: Cell | None = getattr(self, name)
                if cell is not None and cell.tier is not Tier.DEVICE:
                    raise LayoutError(
                        f"{name} rest in the {cell.tier} tier but master on the device, where the update would need "
                        f"both: let master and moments rest in a slower tier too, or {name} on the device."
                    )
        elif self.moments.tier is Tier.DEVICE:
            raise LayoutError(
                f"master rests in the {tier} tier but moments on the device: the update runs on the host, where master "
                "is, so let moments rest in the host or the disk tier."
            )

    def _check_copies(self) -> None:
        """
        Raises:
            LayoutError: copies are none, or of states that they cannot be of.
        """
        object.__setattr__(self, "copies", Copies.named(self.copies))
        if self.copies is None:
            return
        if not isinstance(self.copies, Copies):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"copies of the table are {described(self.copies)}: it is a Copies, a word, or None.")
        if self.outer is not None or self.signs is not None:
            raise LayoutError(
                "copies are of ranks that take each step together, and the table has groups that come together every "
                "so many steps (outer), or signs: leave one of the two out."
            )
        tier = self.copies.tier
        if tier is not None and tier not in list(Tier):
            near = meant(str(tier), [str(each) for each in Tier])
            raise LayoutError(f"copies rest in tier {described(tier)}, which is unknown.{near}")
        if self.grads.tier is Tier.DISK:
            raise LayoutError(
                "grads rest in the disk tier, and where there are copies all of them go to other ranks in front of the "
                "first update: let them rest in host memory, as in offload={'optimizer': 'disk', 'grads': 'host'}, or "
                "leave copies out."
            )
        if tier is not None and Tier(tier) is Tier.DEVICE and self.updates_on is Tier.HOST:
            raise LayoutError(
                f"copies rest in the device tier but master in the {self.master.tier} tier, so that the host updates "
                "both: let copies rest in the host or the disk tier too, or leave their tier out."
            )

    def bind(self, precision: Precision, mesh: Sizes) -> Layout:
        """The table with its dtype words resolved and its axes of size 1 dropped. Gradients that rest in a slower tier
        are sums, so they lie as ``master`` does.

        Raises:
            LayoutError: a cell is split over an axis that the mesh lacks, parameters rest or travel in another dtype
                than compute, master is coarser than that, or gradients would have to change dtype in place to travel.
        """
        for name, cell in self.cells().items():
            for axis in cell.over:
                if axis not in mesh:
                    raise LayoutError(
                        f"{name} is split over {axis!r}, which the mesh does not have: add it to parallel= or drop it "
                        f"from the layout.{did_you_mean(axis, mesh)}"
                    )
                if mesh[axis] > 1 and axis not in (*Mesh.of(mesh).reading, *self._apart):
                    raise LayoutError(
                        f"{name} is split over {axis!r}, whose ranks do not sum gradients: a table splits over axes of "
                        f"data, as {' and '.join(DATA_AXES)}; drop the axis from the layout."
                    )

        def resolve(name: str) -> str:
            return getattr(precision, name) if name in ROLES else name

        def on_mesh(cell: Cell | None) -> Cell | None:
            if cell is None:
                return None
            carved = Mesh.of(mesh).carved(cell.over)
            over = tuple(axis for axis in carved if mesh[axis] > 1 and axis not in self._apart)
            found = replace(cell, over=over, dtype=resolve(cell.dtype))
            return found if _away(found) else replace(found, small=0)

        changes: dict[str, Any] = {f.name: on_mesh(getattr(self, f.name)) for f in fields(self)[:5]}
        if self.grads.tier is not Tier.DEVICE or self.reduce.ordered:
            changes["grads"] = replace(changes["grads"], over=changes["master"].over)
        alone = Mesh.of(mesh).divisor == 1
        exact = alone and self.grads.tier is not Tier.DEVICE
        bound = replace(
            self,
            **changes,
            gather=Wire(
                format=resolve(self.gather.format), hops=_hops(self.gather, changes["params"] or changes["master"])
            ),
            # What is not sent is not rounded on its way to where it rests either.
            reduce=Wire(
                format=changes["grads"].dtype if exact else resolve(self.reduce.format),
                hops=_hops(self.reduce, changes["master"]),
                ordered=self.reduce.ordered,
            ),
        )
        for name in ("params", "held"):
            part: Cell | None = getattr(bound, name)
            if part is not None and part.dtype != precision.compute:
                raise LayoutError(
                    f"{name} is {part.dtype} but Precision.compute is {precision.compute}: forward reads what "
                    f"rests; give {name} the dtype 'compute' and choose Precision.compute."
                )
        if ITEMSIZE[bound.master.dtype] < ITEMSIZE[precision.compute]:
            raise LayoutError(
                f"master is {bound.master.dtype} but Precision.compute is {precision.compute}: "
                "the optimizer cannot update a copy that is coarser than what forward reads; widen master."
            )
        params = bound.params
        if params is not None and params.tier is not Tier.DEVICE and params.over != bound.master.over:
            raise LayoutError(
                f"params rest in the {params.tier} tier split over {_axes(params.over)} but master over "
                f"{_axes(bound.master.over)}, so that what other ranks update would have to go there: split params as "
                "master is, as zero3 does, or let them rest on the device."
            )
        self._check_gather(bound, precision.compute)
        _check_reduce(bound, alone=alone and self.signs is None)  # until they are frozen, gradients cross all groups
        _check_ordered(bound, Mesh.of(mesh))
        _check_outer(bound)
        if bound.params is None and not bound.comes_and_goes:  # nothing is gathered, so the cast copy stays
            bound = replace(bound, params=Cell(dtype=precision.compute))
        if bound.held is not None and bound.held.over == bound.rest.over:
            bound = replace(bound, held=None)
        if bound.copies is not None:
            bound = replace(bound, copies=bound.copies.bound(bound.master.over, mesh))
        return bound

    def shared(self, distinct: Axes, compute: str) -> Layout:
        """A bound table for parameters of which each rank along the axes ``distinct`` has others: split over the other
        axes only, whose ranks share them. ``compute``: what forward reads."""
        cells = self.cells()
        changes: dict[str, Any] = {
            name: replace(cell, over=tuple(axis for axis in cell.over if axis not in distinct))
            for name, cell in cells.items()
        }
        if changes == cells:
            return self
        if not self.replace(**changes).rest.over:
            changes["gather"] = Wire(format=compute)
        if not changes["grads"].over:  # what is left of the sum is done where they lie
            changes["reduce"] = Wire(format=changes["grads"].dtype)
        table = self.replace(**changes)
        if table.held is not None and table.held.over == table.rest.over:
            table = table.replace(held=None)
        return table if table.params or table.comes_and_goes else table.replace(params=Cell(dtype=compute))

    @property
    def _apart(self) -> Axes:
        """The axis along which ranks are of different groups, which divide nothing: each has all states."""
        return (self.rare,) if self.rare else ()

    @property
    def axes(self) -> Axes:
        """Those that any cell is split over: what a parameter of this table is spread over."""
        return tuple(dict.fromkeys(axis for cell in self.cells().values() for axis in cell.over))

    def _check_gather(self, bound: Layout, compute: str) -> None:
        """
        Raises:
            LayoutError: what is gathered cannot travel as this table says.
        """
        name = bound.gather.format
        if name == compute:
            return
        if not FORMATS[name].carries(compute):
            raise LayoutError(
                f"gather travels as {name} but Precision.compute is {compute}, which {name} does not carry: give "
                "gather the format 'compute', or one that is narrower than what forward reads."
            )
        if not self.rest.over:
            raise LayoutError(
                f"gather travels as {name} but params rest whole on every rank, where each would read rounded what "
                "others update and unrounded what it updates itself: split params, or leave gather as 'compute'."
            )
        if self.rest.over != self.master.over:
            raise LayoutError(
                f"gather travels as {name} but params are split over {_axes(self.rest.over)} and master over "
                f"{_axes(self.master.over)}, so that what rests would be rounded only where another rank updates it: "
                "split both alike, or leave gather as 'compute'."
            )

    def aliases(self, *, own: bool = False) -> dict[str, str]:
        """States of a bound table that need no bytes of their own, and the state whose bytes they are.

        In equal dtype ``master`` is the owner's range of ``params`` (fp32: ``zero1`` is 8 + 8/N bytes per parameter);
        ``own`` is for parameters whose states all have one dtype anyway. A held copy that is not split is the gathered
        buffer itself.
        """
        alias: dict[str, str] = {}
        params = self.params
        if params is not None and (own or params.dtype == self.master.dtype) and params.tier == self.master.tier:
            alias["master"] = "params"
        if self.held is not None and not self.held.over:
            alias["held"] = "gathered"
        return alias

    def told(self) -> list[str]:
        """A text for each entry but ``activations``, without folders: where ranks may differ."""
        return [f"{each.name}: {getattr(self, each.name)}" for each in fields(self) if each.name != "activations"]

    def __str__(self) -> str:
        lines = [f"{'state':<13}{'split over':<16}{'dtype':<10}memory"]
        for name in STATES:
            cell = getattr(self, name)
            if cell is None:
                whose = "params" if name == "held" and self.params else "master"
                lines.append(f"{name:<13}same as {whose}{', cast while gathering' if name == 'params' else ''}")
            else:
                lines.append(f"{name:<13}{_axes(cell.over):<16}{cell.dtype:<10}{cell.tier}{cell.remarks}")
        saved = self.activations
        lines.append(f"{'activations':<13}{saved.over or _axes(()):<16}{'as made':<10}{saved.fate}")
        if self.base is not None:
            lines.append(f"{'base':<13}{_axes(self.rest.over):<16}{self.base}")
        lines.append(f"communication: gather as {self.gather}, reduce as {self.reduce}")
        if self.outer is not None:
            lines.append(f"outer steps: {self.outer}")
        if self.signs is not None:
            lines.append(f"signs: {self.signs}")
        if self.copies is not None:
            lines.append(f"copies: {self.copies}")
        return "\n".join(lines)


def _check_cell(name: str, cell: Cell) -> None:
    if not isinstance(cell.over, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"{name} is split over {cell.over!r}: over= takes a tuple of axes, as in ('intra',).")
    if len(set(cell.over)) != len(cell.over):
        raise LayoutError(f"{name} is split over {_axes(cell.over)}, which names an axis twice: name each once.")
    _check_dtype(name, cell.dtype)
    if cell.tier not in list(Tier):
        near = meant(str(cell.tier), [str(tier) for tier in Tier])
        raise LayoutError(f"{name} {rests(name)} in tier {cell.tier!r}, which is unknown.{near}")
    if cell.folder is not None and cell.tier is not Tier.DISK:
        raise LayoutError(
            f"the cell of {name} has a folder, but {name} {rests(name)} in the {cell.tier} tier: it is of the "
            "disk tier; leave it out."
        )
    if not are_folders(cell.folder):
        raise LayoutError(f"{name} has folder={described(cell.folder)}: it is {FOLDERS}.")
    _check_until(name, cell)
    if not is_integer(cell.small, 0) or (cell.small and name != "params"):
        raise LayoutError(
            f"{name} has small={described(cell.small)}: it is a number of elements, of params, those of which "
            "have at most so many rest whole."
        )
    if not is_number(cell.share, 0, 1) or not cell.share:
        raise LayoutError(f"{name} has share={described(cell.share)}: it is a part, above 0 and at most 1.")


def _check_until(name: str, cell: Cell) -> None:
    """
    Raises:
        LayoutError: ``until`` is unknown, or not of what is held whole.
    """
    if cell.until not in UNTIL:
        near = did_you_mean(str(cell.until), UNTIL)
        raise LayoutError(f"{name} has until={described(cell.until)}: it is {' or '.join(map(repr, UNTIL))}.{near}")
    if cell.until != "backward" and (name != "held" or cell.over):
        raise LayoutError(
            f"{name} is split over {_axes(cell.over)} and has until={cell.until!r}: over micro-batches what was "
            "gathered stays whole, so give it to held, with over=()."
        )


def _check_reduce(bound: Layout, *, alone: bool) -> None:
    """
    Raises:
        LayoutError: gradients cannot travel as a bound table says; where this rank is ``alone``, none do.
    """
    grads, form = bound.grads, FORMATS[bound.reduce.format]
    carries = form.carries(grads.dtype)
    if not carries and (form.native is None or form.native not in FLOATS):
        raise LayoutError(
            f"reduce travels as {form.name} but grads accumulate in {grads.dtype}, which {form.name} does not carry: "
            "choose another format or Precision.grads."
        )
    if form.state is not None and grads.dtype == "fp16":
        raise LayoutError(
            f"reduce travels as {form.name} but grads accumulate in fp16, which keeps them under the loss scale: what "
            "is kept would be of another scale when that changes; choose Precision.grads='fp32'."
        )
    if grads.over or alone or form.name == grads.dtype or (carries and bound.master.over):
        return
    raise LayoutError(
        f"grads accumulate unreduced in {grads.dtype} but travel as {form.name}: they are reduced where they lie, so "
        "give Precision.grads and Precision.reduce the same dtype or split grads."
    )


def _check_ordered(bound: Layout, mesh: Mesh) -> None:
    """
    Raises:
        LayoutError: sums in the order of ranks would still depend on how many these are.
    """
    grads, form = bound.grads, FORMATS[bound.reduce.format]
    if not bound.reduce.ordered:
        return
    if form.native != grads.dtype or ITEMSIZE[grads.dtype] < 4:
        raise LayoutError(
            f"reduce travels as {bound.reduce} and grads accumulate in {grads.dtype}: sums that do not depend on the "
            "number of ranks are not rounded to fewer bits on their way, so give Precision.reduce and Precision.grads "
            "one dtype, 'fp32' or 'fp64'."
        )
    if grads.tier is not Tier.DEVICE and set(mesh.summed()) - set(bound.master.over):
        raise LayoutError(
            f"grads rest in the {grads.tier} tier and master is split over {_axes(bound.master.over)}, so that sums in "
            "the order of ranks would go there before they are whole: let grads rest on the device, or split master "
            f"over {_axes(mesh.summed())}."
        )
    if grads.tier is Tier.DISK:
        raise LayoutError(
            f"reduce travels as {bound.reduce} and grads rest in the disk tier, where their norm is taken before it is "
            "known what to round it to: let them rest in host memory."
        )


def _check_outer(bound: Layout) -> None:
    """
    Raises:
        LayoutError: outer steps cannot be taken on what a bound table keeps, or outer gradients not travel as they say.
    """
    outer = bound.outer
    if outer is None:
        return
    if bound.master.tier is Tier.DISK:
        raise LayoutError(
            "master rests in the disk tier, where outer steps cannot reach it: let it rest in host memory, or leave "
            "outer steps out."
        )
    form = FORMATS[outer.format] if outer.format is not None else None
    if form is not None and not _is_outer(form):
        raise LayoutError(
            f"Outer.format is {typed(form.name)!r}, which "
            + (
                "keeps what it loses for the next sum: outer gradients begin anew in each round, so leave that out."
                if form.state is not None
                else "does not carry fp32, in which outer gradients are: take another."
            )
        )


def _is_outer(form: Format) -> bool:
    """Whether outer gradients may travel so."""
    return form.state is None and form.carries("fp32")


def _is_gathered(form: Format) -> bool:
    """Whether parameters may."""
    return form.state is None and form.gathers


def _hops(wire: Wire, cell: Cell) -> int:
    """Of a transfer to or from what is split as ``cell``; where there is one axis, there is one hop."""
    return wire.hops if cell.over == DATA_AXES else 1


def rests(state: str) -> str:
    """The verb that goes with the name of a state."""
    return "rests" if state in ("master", "held") else "rest"


def _away(cell: Cell) -> bool:
    return bool(cell.over) or cell.tier is not Tier.DEVICE


def _check_dtype(name: str, dtype: str) -> None:
    known = (*ROLES, *ITEMSIZE)
    if dtype not in known:
        raise LayoutError(f"{name} has dtype {dtype!r}, which is not a dtype.{did_you_mean(dtype, known)}")


def _axes(axes: Axes) -> str:
    return "+".join(axes) if axes else "nothing"
