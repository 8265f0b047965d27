"""The ranks: axis names and sizes, this rank's place, and every process group. No other file makes one.

``torchrun``'s environment is honoured, an already initialized ``torch.distributed`` is adopted, and one process
without either just works: then there are no groups at all.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import combinations
from logging import getLogger
from math import prod
from threading import Thread
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardfold import accelerator
from shardfold.comm._shown_traceback import shorten_tracebacks
from shardfold.comm.answered import Answered, answered, ask_another
from shardfold.comm.backend import GLOO, MARGIN, backend_in, start_group
from shardfold.comm.launcher_notes import note_exception
from shardfold.data import ranks_read_alike, ranks_read_apart
from shardfold.errors import CollectiveError, ConfigError, LayoutError, OrderError, UsageError, did_you_mean
from shardfold.plan.axes import ALSO, DATA_AXES, KNOWN, LINKS, Axes, Axis, Mesh, nearest_sizes
from shardfold.plan.checks import described, is_integer
from shardfold.plan.placement import shard_index
from shardfold.torch_internals import (
    abort_groups,
    all_groups,
    count_groups_anew,
    default_store,
    set_group_timeout,
)

__all__ = [
    "DataMesh",
    "Given",
    "begin_epoch",
    "keep_default",
    "parse_device",
    "pick_device",
    "refusals_told",
    "resolve_mesh",
    "states_come",
]

LOG = getLogger("shardfold")
JOINED, ALL = "joined", "all"  # where ranks look before they make groups, and what it says if there is nothing wrong
LOCAL, UNEVEN, CAME = "local", "local/uneven", "local/all"
"""Ranks of a node, as the first one says; that another's has more or fewer; and that all have said it."""
LOOK, SETTLE, ABORT = 0.1, 2.0, 30.0  # seconds: between looks, that a lost collective may still end, and to end all
REFUSAL = 30.0  # seconds that it may take to tell others why no mesh is made
UNSENT = 2**31 - 1  # the tag of a message that nobody sends
ABOUT_TO_COME = timedelta(seconds=1)  # which a rank that closes its engine leaves others to come to its last message


Given = Mapping[str, int] | Sequence[Axis]
"""What users say of a mesh: sizes by the name of an axis that has a role, or axes."""


def resolve_mesh(world: int, mesh: Given | None, local: int | None = None, rare: str = "", meets: bool = False) -> Mesh:
    """The mesh of ``world`` ranks: ``inter``, ``intra`` and what else is given, from the slowest link to the fastest.

    Args:
        world: number of ranks.
        mesh: sizes by axis name, or axes; of ``inter`` and ``intra`` one that is left out takes what remains. None:
            ``intra`` is the ranks of one node.
        local: ranks per node, if known.
        rare, meets: see :class:`Mesh`.

    Raises:
        LayoutError: an axis is unknown or the sizes do not multiply up.
    """
    if mesh is None:
        intra = local if local and world % local == 0 else world
        return Mesh([Axis("inter", world // intra), Axis("intra", intra)], rare, meets=meets)
    sizes = {**dict.fromkeys(DATA_AXES, 0), **_given_sizes(mesh)}
    given = prod(size for size in sizes.values() if size)
    if world % given or (all(sizes.values()) and given != world):
        raise LayoutError(
            f"mesh {_by_axis(_given_sizes(mesh))} does not multiply up to the {world} rank{'s' if world > 1 else ''} "
            f"there are: {_legal(_given_sizes(mesh), world, whole=all(sizes.values()))}."
        )
    if not sizes["inter"] and not sizes["intra"]:
        sizes["inter"] = 1
    roles = {} if isinstance(mesh, Mapping) else {axis.name: axis.role for axis in mesh}
    axes = [Axis(name, size or world // given, roles.get(name)) for name, size in sizes.items()]
    return Mesh(sorted(axes, key=lambda axis: LINKS.index(axis.role)), rare, meets=meets)


def _given_sizes(mesh: Given) -> dict[str, int]:
    """The size of each axis that is named.

    Raises:
        LayoutError: it is no mesh, names an unknown axis, or gives one a size that is no number of ranks.
    """
    if isinstance(mesh, (Mapping, list, tuple)) and not mesh:
        raise LayoutError(
            "parallel= is empty: give sizes by axis, as in {'intra': 8}, or None for the ranks of one node."
        )
    if isinstance(mesh, (list, tuple)) and all(isinstance(axis, Axis) for axis in mesh):
        return dict(Mesh(mesh))
    if not isinstance(mesh, Mapping):
        raise LayoutError(
            f"parallel= is {described(mesh)}: it is sizes by axis, as in {{'intra': 8}}, or a list of Axis(name, size)."
        )
    for axis, size in mesh.items():
        if axis not in KNOWN:
            near = f" Did you mean {ALSO[axis]!r}?" if axis in ALSO else did_you_mean(axis, KNOWN)
            raise LayoutError(f"mesh names the axis {axis!r}, which is unknown.{near}")
        if isinstance(size, (list, tuple)) and "pipeline" in mesh:
            raise LayoutError(
                f"parallel= has {described(size)} for {axis!r}, but all stages have as many ranks along each of the "
                "other axes: give one number, and let Parallel(stages=...) give slow stages fewer layers."
            )
        if not is_integer(size, 1):
            raise LayoutError(
                f"parallel= has {described(size)} for {axis!r}: the size of an axis is a number of ranks, 1 or more; "
                "leave the axis out for what remains."
            )
    return {axis: int(size) for axis, size in mesh.items()}


def _legal(sizes: Mapping[str, int], world: int, *, whole: bool) -> str:
    """What is next to sizes that do not multiply up."""
    near, each = nearest_sizes(sizes, world, whole=whole), prod(sizes.values())
    ranks = [each] if whole else [n for n in (world // each * each, world // each * each + each) if n]
    of_ranks = f"the number of ranks, as to {' or '.join(map(str, ranks))}"
    if not near:
        return f"change the sizes or {of_ranks}"
    if (times := world // prod(near.values())) > 1:
        near = {**near, "inter" if "intra" in near else "intra": times}
    return f"change the sizes, as to {_by_axis(near)}, or {of_ranks}"


def _by_axis(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def _role_text(axis: Axis, sizes: Mesh) -> str:
    """An axis's role, and whether its ranks come together now and then only."""
    return str(axis.role) + ", synchronized by outer steps" * (axis.name in sizes.rare)


def _axis_text(name: str, size: int, role: str) -> str:
    return f"{name}={size}" + ("" if KNOWN.get(name) == role else f" ({role})")


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, else this local rank's GPU (or other accelerator), else the CPU. Ranks beyond the number of
    devices share them, and one that is given without a number is this local rank's.

    Raises:
        ConfigError: it is none that trains here.
    """
    if device is not None:
        return _usable(parse_device("device", device))
    there = accelerator.found()
    if there is None:
        return torch.device("cpu")
    if lacks := accelerator.lacking(there):
        LOG.warning(
            "the model is trained on the CPU, although this machine has a device of the type %s: its module in PyTorch "
            "has no %s; Runtime(device='cpu') says that you know.",
            there.type,
            ", ".join(lacks),
        )
        return torch.device("cpu")
    return accelerator.indexed(there)


def parse_device(name: str, device: Any) -> torch.device:
    """The device of that name, number or value; ``name`` is the argument's.

    Raises:
        ConfigError: there is no such device.
    """
    if isinstance(device, (str, int, torch.device)) and not isinstance(device, bool):
        with suppress(RuntimeError, ValueError):
            return torch.device(device)
    raise ConfigError(f"{name}= is {described(device)}: it is a device, as 'cpu', 'cuda' or 'cuda:1'.")


def _usable(device: torch.device) -> torch.device:
    """
    Raises:
        ConfigError: nothing trains on it, or it is not here.
    """
    if device.type == "cpu":
        return device
    there = accelerator.found()
    known = "'cpu'" if there is None or accelerator.lacking(there) else f"'cpu' or {there.type!r}"
    if not accelerator.has_streams(device) or not accelerator.is_known(device):
        raise ConfigError(f"Runtime(device={str(device)!r}): models are trained on {known} here.")
    if lacks := accelerator.lacking(device):
        raise ConfigError(
            f"Runtime(device={str(device)!r}): PyTorch's module for it has no {', '.join(lacks)}, which training "
            f"needs; models are trained on {known} here."
        )
    count = accelerator.count(device)
    if (device.index or 0) >= count:
        there = f"{count}, up to {device.type}:{count - 1}" if count else "none"
        raise ConfigError(
            f"Runtime(device={str(device)!r}): PyTorch finds {there} of the type {device.type} here; choose another "
            "device."
        )
    return accelerator.indexed(device)


class DataMesh:
    """This rank's place among all ranks of a job, and the groups of the axes that collectives go over.

    Attributes:
        sizes: the axes; also ``{"inter": n, "intra": m}``, ``inter`` is the slow link.
        coords: this rank's coordinate on each axis; rank = inter * m + intra where there are no others.
        data: the axes on which ranks of a group read other things, of more than one rank.
        data_rank: this rank's number among those that it shares parameters with and that read other things.
        data_ranks: how many these are.
        sample_rank: this rank's number among those that read other samples, and not other parts of the same.
        sample_ranks: how many these are.
        per_host: ranks of each host; None: unknown, or not the same on all.
        device: of the tensors that collectives carry.
        name: of this mesh among those of the process, equal on all ranks.
        store: a key-value store shared by all ranks, private to this mesh; None for one rank.
        default_store: the one of the process's default group.
        control: a Gloo group of all ranks for small facts that the host needs.
        program: the same of the ranks that run one program, of :attr:`program_ranks`; ``control`` where all do.
        on_streams: whether collectives are queued on streams of the device, as NCCL's are: waiting for one orders
            streams, and the host goes on. Gloo's, and all on the CPU, are waited for by the host.
        gave_up: whether this rank raised because ranks cannot go on together.
        lost: why others will not come to what this rank has issued; None: they will. Until somebody knows, they will.
        farewell: called when the interpreter exits while the mesh is open.
        states_come: what its ranks have comes from an epoch before: nobody needs the first values of a model.
    """

    def __init__(
        self,
        sizes: Given | None,
        device: torch.device,
        timeout: timedelta,
        rare: str = "",
        meets: bool = False,
        asks: str = "",
    ) -> None:
        accelerator.use(device)
        _start(device, timeout)
        self.name, self.device, self.states_come = "", device, _PROCESS.states_come
        self.gave_up = self.on_streams = False
        self._meeting: Any = None
        self.listen(lambda: None, lambda: None)
        self._timeout = timeout
        self._ended = False
        self.store: Any = None
        self.default_store: Any = None
        self._groups: dict[Axes, Any] = {}
        self._made: list[Any] = []  # groups that are this mesh's own
        self._process = os.getpid()
        self.control: Any = None
        self.program: Any = None
        self._among: dict[tuple[int, ...], Any] = {}  # by places along the stages
        self._hosts: dict[str, Any] = {}  # by axis, those that users' collectives go over
        self._ways: dict[tuple[int, int], Any] = {}  # by the ranks from which and to which activations go
        self._default = _PROCESS.add(self)
        try:
            self._join(sizes, timeout, rare, meets, asks)
        except BaseException:
            self.close(failed=True)
            raise

    def listen(self, lost: Callable[[], str | None], farewell: Callable[[], None]) -> None:
        """Who watches this mesh says from now on whether others come, and is called when the interpreter exits."""
        self.lost, self.farewell = lost, farewell

    def give_up(self) -> None:
        """This rank raises because ranks cannot go on together."""
        self.gave_up = True

    def begin_meeting(self, work: Any) -> None:
        """This rank is at a meeting that others may still have to come to; ``work`` is done when they have."""
        self._meeting = work

    @property
    def meets(self) -> bool:
        """Whether this rank has begun a meeting that others have not come to."""
        return self._meeting is not None and not self._meeting.is_completed()

    def end_meeting(self) -> None:
        """They have come."""
        self._meeting = None

    def _join(self, sizes: Given | None, timeout: timedelta, rare: str, meets: bool, asks: str) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.world = dist.get_world_size() if self.distributed else 1
        self.on_streams = accelerator.has_streams(self.device) and self.backend not in ("none", GLOO)
        if self.world > 1:
            self.name, self.default_store, self.store = _next_stores(self.rank, timeout.total_seconds())
        self.sizes = self._agreed_sizes(sizes, timeout, rare, meets, asks)
        self.coords = self.sizes.coords(self.rank)
        self.data: Axes = self.sizes.reading
        self.data_rank = shard_index(self.data, self.sizes, self.coords)
        self.data_ranks = self.sizes.divisor
        sampling = self.sizes.sampling
        self.sample_rank = shard_index(sampling, self.sizes, self.coords)
        self.sample_ranks = self.sizes.parts(sampling)
        own = self.sizes.meeting
        self.program_ranks = next(row for row in self.sizes.rows(own) if self.rank in row)
        if self.sample_ranks < self.world:
            ranks_read_alike(self, self.sample_rank, self.sample_ranks)
        if self.world > 1:
            self._make_groups()

    def _agreed_sizes(self, mesh: Given | None, timeout: timedelta, rare: str, meets: bool, asks: str) -> Mesh:
        """The sizes, once every rank is known to have the same: making groups, ranks would wait for one that has none,
        or makes others. ``asks``: for what ranks are to meet before the rest is made, in words; they all have the same.

        Raises:
            LayoutError: on every rank: ``mesh`` of one is refused, or is not that of the others.
            CollectiveError: a rank did not come.
        """
        try:
            self.per_host = self._agreed_local(timeout)
            sizes = resolve_mesh(self.world, mesh, self.per_host, rare, meets)
            if (store := self.asked) is None:
                return sizes
            mine = [[axis.name, axis.size, _role_text(axis, sizes)] for axis in sizes.axes]
            first, theirs, other = json.loads(store.compare_set("sizes", "", json.dumps([self.rank, mine, asks])))
            if other != asks:
                here, there = (each or "not given" for each in (asks, other))
                raise LayoutError(
                    f"Auto(sample=...) is {here} on rank {self.rank} and {there} on rank {first}: give every rank the "
                    "same layout= and activations=."
                )
            if theirs != mine:
                here, there = (" x ".join(_axis_text(*axis) for axis in each) for each in (mine, theirs))
                raise LayoutError(
                    f"mesh is {here} on rank {self.rank} and {there} on rank {first}: give every rank the same "
                    "parallel=."
                )
            if store.add("came", 1) == self.world:
                store.compare_set(JOINED, "", ALL)
            store.wait([JOINED], timeout)
            said = store.get(JOINED).decode()
        except LayoutError as error:
            if self.asked is not None:
                with suppress(RuntimeError):  # the process that serves the store may have died
                    _refuse(self.asked, self.rank, error)
            raise
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: not every rank came to make an engine within {timeout.total_seconds():.0f} s "
                f"({str(error).splitlines()[0]}); another rank has probably died or does something else: look at its "
                "output."
            ) from error
        if said != ALL:
            kind, why = json.loads(said)
            refusal = LayoutError if kind == LayoutError.__name__ else ConfigError
            raise refusal(f"no engine is made, as one was refused on another rank: {why}")
        return sizes

    def _agreed_local(self, timeout: timedelta) -> int | None:
        """Ranks of each node; None: unknown, or not the same on all nodes, which then are no axis.

        Raises:
            RuntimeError: a rank did not come, or the store is gone.
        """
        given = os.environ.get("LOCAL_WORLD_SIZE", "")
        local = int(given) if given else None
        store = self.asked
        if store is None or local is None or local >= self.world:
            return local
        if store.compare_set(LOCAL, "", given).decode() != given:
            store.set(UNEVEN, "")
        if store.add(f"{LOCAL}/came", 1) == self.world:
            store.set(CAME, "")
        store.wait([CAME], timeout)  # or a rank is refused, which is read behind this
        return None if store.check([UNEVEN]) else local

    @property
    def asked(self) -> Answered | None:
        """The store, asked for no longer than a collective may take."""
        return None if self.store is None else Answered(self.store, self._timeout.total_seconds())

    def _make_groups(self) -> None:
        # What the host needs to know travels on the CPU: no device synchronization. It never shares a Gloo group with
        # collectives of the user's own, nor with data, which one rank may have sent when another meets: Gloo pairs
        # collectives by their number within a group.
        self.control = self._new_group(None, GLOO)
        if self.data_ranks == self.world:
            self._groups[self.data] = dist.group.WORLD if self.on_streams else self._new_group(None, GLOO)
        data = (*self.sizes.rare, *self.data)
        parts = [axes for n in range(1, len(data) + 1) for axes in combinations(reversed(data), n)]
        for axes in (*(part[::-1] for part in parts), *((axis,) for axis in self.sizes if axis not in data)):
            if axes in self._groups or self.sizes.parts(axes) == 1:
                continue
            self._groups[axes] = self._own_group(self.sizes.rows(axes))
        self.program = self.control
        if len(self.program_ranks) < self.world and self.sizes.meeting:  # of each stage, or group along a rare axis
            self.program = self._own_group(self.sizes.rows(self.sizes.meeting), GLOO)
        if self.sizes.stages:
            self._make_ways()

    def _own_group(self, rows: Iterable[list[int]], backend: str | None = None) -> Any:
        """Makes a group of each row of ranks, every rank all of them and in the same order; that which this rank is in,
        if any."""
        own: Any = None
        for ranks in rows:
            group = self._new_group(ranks, backend)
            if self.rank in ranks:
                own = group
        return own

    def _make_ways(self) -> None:
        """What a pipeline needs: a group for each direction between neighbours (the first and the last stage are such,
        too), so that neither waits for the other."""
        for row in self.sizes.rows(self.sizes.stages):
            ring = list(zip(row, row[1:] + row[:1], strict=True))
            for way in dict.fromkeys([*ring, *((there, here) for here, there in ring)]):
                self._ways[way] = self._own_group([list(way)])

    def join_pairs(self, axis: str) -> None:
        """Makes a group of each two ranks along an axis, for what those send each other that are there; all ranks call
        it."""
        for row in self.sizes.rows((axis,)):
            for low, high in combinations(row, 2):
                self._ways[low, high] = self._ways[high, low] = self._own_group([[low, high]])

    def join_places(self, groups: Iterable[Sequence[int]]) -> None:
        """Makes groups of ranks at some places along the stages, for what those have together; all ranks call it."""
        for places in sorted({tuple(places) for places in groups}):
            rows = self.sizes.rows(self.sizes.stages)
            self._among[places] = self._own_group(sorted(row[place] for place in places) for row in rows)

    def among(self, places: Sequence[int]) -> Any:
        """The group that :meth:`join_places` made for these places."""
        return self._among[tuple(places)]

    def way(self, source: int, target: int) -> Any:
        """The group over which the rank ``source`` sends to its neighbour ``target`` along the stages, or to one that
        :meth:`join_pairs` has named."""
        return self._ways[source, target]

    def _new_group(self, ranks: list[int] | None, backend: str | None = None, timeout: timedelta | None = None) -> Any:
        """
        Args:
            ranks: in it; None: all.
            backend: None: that of the device.
            timeout: None: the mesh's.

        Raises:
            CollectiveError: a rank is lost, or the store does not answer.
        """
        lasting = (timeout or self._timeout) + MARGIN
        timeout = min(timeout or self._timeout, _PROCESS.within or timedelta.max)
        make = partial(dist.new_group, ranks, timeout=_PROCESS.within or lasting, backend=backend)
        mine = ranks is None or self.rank in ranks

        def connected() -> Any:
            group = make()
            if mine:  # who gives it back at once would cut off those that still connect
                dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
                if _PROCESS.within is not None:
                    set_group_timeout(lasting, group)
            return group

        try:
            # Ranks look for each other in the store; what is on streams, later and on a device of this thread's.
            waits = backend == GLOO or not self.on_streams
            limit = timeout.total_seconds() * (1 if _PROCESS.within is None else 2)  # then the group gives up first
            group = answered(connected, limit) if waits else make()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: a process group of rank {', '.join(map(str, ranks or range(self.world)))} was not "
                f"made within {timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}): a rank has probably "
                "died, or the link to the host of rank 0 is cut; look at their output, and at the network between the "
                "hosts."
            ) from error
        if mine:
            self._made.append(group)
        return group

    def open_group(self, timeout: timedelta) -> Any:
        """A Gloo group of all ranks for messages between two of them, until :meth:`close_group`; all ranks call it."""
        return self._new_group(None, GLOO, timeout)

    def close_group(self, group: Any) -> None:
        """Gives back what :meth:`open_group` made."""
        self._made.remove(group)
        dist.destroy_process_group(group)

    @property
    def backend(self) -> str:
        """What carries tensors of the mesh's device, as ``gloo`` or ``nccl``; of composite names, such as
        ``cpu:gloo,cuda:nccl``, the part for that type. ``none``: there is nobody to send to.

        Raises:
            ConfigError: ``torch.distributed`` was started with a backend that does not carry them.
        """
        if not self.distributed:
            return "none"
        return backend_in(str(dist.get_backend_config()), self.device)

    @property
    def everyone(self) -> Any:
        """The group of all ranks that have the same parameters and read other things."""
        return self.group(self.data)

    def group(self, axes: Axes) -> Any:
        """The process group of the ranks that differ from this one on ``axes`` only, in row-major order."""
        if axes in self._groups:
            return self._groups[axes]
        return self._groups[tuple(axis for axis in axes if self.sizes[axis] > 1)]

    def add_group(self, axes: Axes) -> None:
        """Makes the groups of these axes, if there are none yet; all ranks call it."""
        axes = tuple(axis for axis in axes if self.sizes[axis] > 1)
        if not axes or axes in self._groups:
            return
        self._groups[axes] = self._own_group(self.sizes.rows(axes))

    def host_group(self, axis: str) -> Any:
        """A Gloo group of the ranks that differ from this one on ``axis`` only, for collectives of the user's; all
        ranks ask for the first of them together, which makes those of all axes."""
        if not self._hosts:
            for name in (name for name, size in self.sizes.items() if size > 1):
                self._hosts[name] = self._own_group(self.sizes.rows((name,)), GLOO)
        return self._hosts[axis]

    def groups(self) -> list[tuple[Any, list[int]]]:
        """Every group that parameters, gradients and activations go over, with its ranks; in one order on all ranks."""
        return [(group, dist.get_process_group_ranks(group)) for group in self._groups.values()]

    def parts(self, axes: Iterable[str]) -> int:
        return self.sizes.parts(axes)

    def close(self, *, failed: bool = False) -> None:
        """Gives back the groups of this mesh; the last one of the process leaves ``torch.distributed`` as the first
        found it. Every rank calls it at the same place of the program.

        A group that outlives the interpreter ends the process with SIGABRT now and then: a thread of Gloo's lets go of
        a tensor when Python is no longer there to take it back. So no reference to a group may stay, and a mesh that
        nobody closes is closed when the interpreter exits.

        Args:
            failed: what the mesh was made for could not be made, perhaps on this rank only: a default group that a
                mesh started stays then, on all ranks, unless others have closed this mesh already.
        """
        if os.getpid() != self._process or self not in _PROCESS.open:
            return
        default = self._default
        if default is not None and self._first_said("keep" if failed else "end") == "keep":
            default.keep()
        self._await_others()
        self._give_back()
        if default is not None:
            default.meshes.discard(self)
            _PROCESS.end_if_unused()

    def _await_others(self) -> None:
        """Ranks that close at the same place are about to come to what this one has told them, and would find the
        connections cut; those that will not come are not waited for."""
        if self._meeting is not None and not self.gave_up:
            with suppress(RuntimeError):  # they have left, or come later
                self._meeting.wait(ABOUT_TO_COME)

    def _first_said(self, what: str) -> str:
        """What the rank that was first to close this mesh said of the default group: it holds for all of them, as one
        that ended it would meet the others nowhere else."""
        if (store := self.asked) is None:
            return what
        try:
            return store.compare_set("default group", "", what).decode()
        except RuntimeError:  # the process that serves the store has ended the group, or has died
            return "end"

    def leave(self) -> None:
        """Gives back the groups of this mesh at a moment that ranks do not share, such as a garbage collection. This
        needs no other rank. A default group that a mesh started stays until the interpreter exits: were it ended here,
        the next mesh would start another one on this rank, and wait there for ranks that still have the first."""
        if os.getpid() != self._process or self not in _PROCESS.open:
            return  # forked: the threads that serve the groups are in the other process
        if self._default is not None:
            self._default.keep()
            self._default.meshes.discard(self)
        self._give_back()

    def _give_back(self) -> None:
        ranks_read_apart(self)
        self.end_kernels()
        self._groups.clear()
        self._ways.clear()
        self._among.clear()
        self._hosts.clear()
        if dist.is_initialized():
            self._cut_off()
        self.control = self.program = self.store = self.default_store = None
        while self._made:
            group = self._made.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)
        _PROCESS.open.discard(self)

    def _cut_off(self) -> None:
        """Disconnects the groups in which something is under way that others never come to, or not soon: to destroy
        one would wait for it."""
        unmet = [self.control, self.program] if self.meets else []
        for group in self._made:
            if self.gave_up or any(group is each for each in unmet):
                _disconnect(group)

    def end_kernels(self, *, lost: bool = False) -> bool:
        """Returns when the device has done everything, whatever other ranks do.

        Collectives that are under way there end when all ranks have come to them. If some will not (``lost``), or do
        not within the timeout, they are ended, and with them every group on streams of this process: what waits for
        the device, on any thread, goes on. To destroy such a group, as to leave the process, would wait for them.

        ``lost``: it is known that some will not come. Returns whether any was ended.
        """
        if not self.on_streams or self._ended:
            return False
        done = Thread(target=self._finish_device, name="shardfold-device", daemon=True)
        done.start()
        begun = monotonic()
        since = begun if lost or self.gave_up else None
        while done.is_alive():
            done.join(LOOK)
            now = monotonic()
            if since is None and self.lost() is not None:
                since = now
            if (since is not None and now - since > SETTLE) or now - begun > self._timeout.total_seconds():
                LOG.error("rank %d ends the collectives on its device, as other ranks do not come to them", self.rank)
                self._ended = True
                ending = Thread(target=abort_groups, args=(self.device,), name="shardfold-abort", daemon=True)
                ending.start()
                ending.join(ABORT)
                return True
        return False

    def _finish_device(self) -> None:
        with suppress(RuntimeError):  # what failed is told elsewhere: here it is over
            accelerator.synchronize(self.device)

    @property
    def is_alone(self) -> bool:
        """Whether the process groups there are were all made for this mesh."""
        return not self.distributed or (self._default is not None and self._default.meshes == {self})

    def break_off(self) -> None:
        """Ends the connections of all groups of this process: whoever waits in one raises, here and on other ranks.
        What others may read of this rank's memory stays as it is."""
        self.give_up()
        if dist.is_initialized():
            for group in all_groups():
                _disconnect(group)

    def abandon(self) -> None:
        """Leaves all groups but those of meshes, so that ranks stuck in collectives of the user's own wake up.

        A mesh's groups may have collectives under way, and closing one of those would wait for them.
        """
        if dist.is_initialized():
            ours = [group for mesh in _PROCESS.open for group in mesh._made]
            for group in all_groups():
                if not any(group is own for own in ours):
                    _disconnect(group)
            for mesh in _PROCESS.open:  # no group is known any more when they are left
                mesh._cut_off()
            _PROCESS.forget_default()
            self.end_kernels()
            dist.destroy_process_group()


@dataclass(eq=False)
class _Default:
    """A default group that a mesh started.

    Attributes:
        meshes: those of it that are not closed.
        kept: whether it stays until the interpreter exits: a mesh of it was left, and not closed by all ranks.
    """

    meshes: set[DataMesh] = field(default_factory=set["DataMesh"])
    kept: bool = False

    def keep(self) -> None:
        """It stays."""
        self.kept = True


class _Process:
    """What the meshes of this process share.

    Attributes:
        open: those that are not closed.
        default: the default group, if it was a mesh that initialized ``torch.distributed``.
        starts: how often one did, so far.
        comings: how often this rank came to make a mesh with the others, or told them that it does not.
        within: how long it may take to make a group; None: as long as its collectives.
        states_come: see :func:`states_come`.
    """

    def __init__(self) -> None:
        self.open: set[DataMesh] = set()
        self.default: _Default | None = None
        self.starts = self.comings = 0
        self.within: timedelta | None = None
        self.states_come = False
        self._pid = os.getpid()

    def started(self) -> None:
        """A mesh has initialized ``torch.distributed``."""
        self._forget_another()
        self.starts += 1
        self.default = _Default()

    def keep(self) -> None:
        """The default group is the meshes', and stays."""
        if self.default is None:
            self.started()
        assert self.default is not None
        self.default.keep()

    def begin_anew(self, within: timedelta) -> None:
        """Nobody has started any at the store that comes."""
        self.starts, self.within = 0, within

    @contextmanager
    def taking_states(self) -> Iterator[None]:
        """See :func:`states_come`."""
        self.states_come = True
        try:
            yield
        finally:
            self.states_come = False

    def come(self) -> None:
        """This rank comes to make a mesh, or tells the others that it does not."""
        self.comings += 1

    def add(self, mesh: DataMesh) -> _Default | None:
        """The default group that ``mesh`` is in, if a mesh started it."""
        self._forget_another()
        shorten_tracebacks()
        self.open.add(mesh)
        if self.default is not None:
            self.default.meshes.add(mesh)
        atexit.unregister(self.close)
        atexit.register(self.close)  # once more, because what is registered last runs first
        return self.default

    def _forget_another(self) -> None:
        if self._pid != os.getpid():  # forked: what is open is the other process's
            self._pid, self.default = os.getpid(), None
            self.open.clear()

    def end_if_unused(self) -> None:
        if self.default is not None and not self.default.meshes and not self.default.kept:
            self._end()

    def forget_default(self) -> None:
        """The default group is no mesh's any more."""
        self.default = None

    def _end(self) -> None:
        self.forget_default()
        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """The interpreter exits. A rank that another one waits for in a group of the user's will not come there: it
        wakes up, or the two would wait for each other, this one for what it has under way in a mesh's group."""
        if self._pid != os.getpid():
            return
        for mesh in list(self.open):
            mesh.farewell()
        note_exception()
        for mesh in list(self.open):
            if mesh.gave_up or mesh.meets:
                mesh.abandon()
        for mesh in list(self.open):
            mesh.leave()
        if self.default is not None:
            self._end()


_PROCESS = _Process()


def begin_epoch(within: timedelta) -> None:
    """Ends what is left of the process groups of an epoch: those of the next one are made at a store of its own, where
    nothing has been said yet, and each ``within`` so long, as any rank may be gone meanwhile."""
    _PROCESS.close()
    _PROCESS.begin_anew(within)
    count_groups_anew()
    ask_another()


def states_come() -> AbstractContextManager[None]:
    """A mesh that is made inside is of an engine whose states come from an epoch before; all its ranks know that."""
    return _PROCESS.taking_states()


def keep_default() -> None:
    """The default group is the meshes', also if others have started it, and stays until the interpreter exits or an
    epoch ends."""
    if dist.is_available() and dist.is_initialized():
        _PROCESS.keep()


@contextmanager
def refusals_told() -> Iterator[None]:
    """Where what is inside raises before it comes to make a mesh, the ranks that do come raise too and say why.

    One process has nobody to tell, and one without a default group no way to: a mesh inside would have started it.
    """
    before = _PROCESS.comings
    try:
        yield
    except (OrderError, CollectiveError):  # which the others know of
        raise
    except Exception as error:
        if _PROCESS.comings == before and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            with suppress(RuntimeError):  # the process that serves the store may have died
                _, _, store = _next_stores(dist.get_rank(), REFUSAL)
                _refuse(Answered(store, REFUSAL), dist.get_rank(), error)
        raise


def _next_stores(rank: int, limit: float) -> tuple[str, Any, Any]:
    """The name of the next mesh that ranks make, the default store, and the part of it that is that mesh's; ``limit``:
    seconds that an answer may take.

    Raises:
        CollectiveError: none came.
    """
    # The default store is the only key-value store that every rank is known to share.
    default = default_store()
    # Counted in the store, not in the process: a process may have been in other groups before.
    try:
        name = str(Answered(default, limit).add(f"shardfold/engines/{rank}", 1))
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank}: the store that all ranks share cannot be asked, so no engine is made "
            f"({str(error).splitlines()[0]}): the link to the host of rank 0 is cut, or its process is gone; look at "
            "its output, and at the network between the hosts."
        ) from error
    _PROCESS.come()
    return name, default, dist.distributed_c10d.PrefixStore(f"shardfold/{name}", default)


def _refuse(store: Any, rank: int, error: Exception) -> None:
    """Tells the ranks that come to make the mesh of this store."""
    store.set(CAME, "")
    store.compare_set(JOINED, "", json.dumps([type(error).__name__, f"rank {rank}: {error}"]))


def _disconnect(group: Any) -> None:
    """Ends the connections of a group over Gloo: every rank that waits in it, or will, raises.

    Destroying a group does that only when the last reference to it goes, and there are more than the user's: the
    signatures of ``torch.distributed.nn`` keep the default group that was there when they were imported. But a receive
    that is given up takes the connections of its group with it.
    """
    size = group.size()
    if size == 1 or "gloo" not in str(dist.get_backend_config(group)):
        return  # what others wait for on a device is ended there (see DataMesh.end_kernels)
    with suppress(RuntimeError):  # that it was given up, or that the connections are gone already
        group.recv([torch.empty(1)], (group.rank() + 1) % size, UNSENT).wait(timedelta(milliseconds=1))


def _start(device: torch.device, timeout: timedelta) -> None:
    """Initializes ``torch.distributed`` from the environment if there are several ranks and nobody did."""
    if not dist.is_available() or dist.is_initialized():
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {world} but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
            "start the script with torchrun or `shardfold train`, or unset WORLD_SIZE."
        )
    where: dict[str, Any] = {}
    if _PROCESS.starts:
        # torchrun's store outlives a group, and what the last one said of its addresses is still in it.
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store = dist.distributed_c10d.PrefixStore(f"shardfold/start/{_PROCESS.starts}", store)
        where = {"store": store, "rank": rank, "world_size": size}
    start_group(device, _PROCESS.within or timeout, **where)
    if _PROCESS.within is not None:
        set_group_timeout(timeout)
    _PROCESS.started()
