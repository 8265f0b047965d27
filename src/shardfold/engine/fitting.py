"""What a new engine takes of layouts and modes of activations, and whether its states fit: ``layout="auto"``, with and
without ``sample=``, and a warning before anything is made that will not fit.

Without a micro-batch only states and the program's buffers are counted, by ``planner.auto``: an engine is made before
it sees a batch. With one, rank 0 plans the user's own model, and all ranks take what it says: so they take the same,
whatever differs between their hosts. What it plans with is the least memory that any of them has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardfold import accelerator
from shardfold.comm.agreement import Agreement
from shardfold.comm.mesh import DataMesh
from shardfold.errors import ConfigError, LayoutError, ModelError, ShardfoldError, did_you_mean
from shardfold.optim.fused import num_moments
from shardfold.parallel.parallel import Parallel
from shardfold.plan import presets
from shardfold.plan.axes import Axis, Mesh, Role
from shardfold.plan.checks import described, human
from shardfold.plan.cost import resting_bytes
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.lifetimes import CPU, GPU
from shardfold.plan.offload import offloaded
from shardfold.plan.placement import UnitSpec
from shardfold.plan.rewrites import Overlap
from shardfold.planner.auto import AUTO, MODES, ORDER, Auto, choose, choose_layout, first_of, states_peak
from shardfold.planner.division import Division
from shardfold.planner.given import shapes_of
from shardfold.planner.hardware import RESERVE, Cluster, known_device
from shardfold.planner.ranking import BY_NODES, LAYOUTS
from shardfold.planner.ranking import MODES as SEARCHED
from shardfold.planner.setting import PlannedRank, Subject, mesh_of
from shardfold.planner.tracing import loss_of
from shardfold.tiers.limit import memory_limit

__all__ = ["Sampled", "memory_of", "sampled", "table_of", "warn_of_memory"]

LOG = getLogger("shardfold")
ERRORS = {kind.__name__: kind for kind in (ConfigError, LayoutError, ModelError)}
SHARED = (Role.TENSOR, Role.SEQUENCE, Role.EXPERT, Role.PIPELINE)


def table_of(
    layout: Any,
    offload: Any,
    model: nn.Module,
    precision: Any,
    mesh: Mapping[str, int] | Sequence[Axis] | None,
    device: torch.device,
    bucket: int = 0,
    copies: str | None = None,
) -> Layout:
    """The table of an engine with these arguments, but for its ``copies``; ``"auto"`` is said in the log.

    Raises:
        ConfigError: there is no such layout, or, with ``"auto"``, none fits, or the mesh cuts the model.
    """
    if layout == AUTO:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        sizes = mesh_of(mesh) if mesh is not None else Mesh.of({"inter": 1, "intra": world})
        if others := [axis.name for axis in sizes.axes if axis.role is not Role.DATA and axis.size > 1]:
            raise ConfigError(
                f"layout='auto' chooses for ranks that read other samples, but parallel= has {' and '.join(others)}, "
                "whose ranks have parts of the model: name a layout, or give a micro-batch, layout=sf.Auto(sample=...)."
            )
        found = choose_layout(model, precision, sizes, memory_of(device), bucket=bucket, copies=copies)
        if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0:
            LOG.warning(found.told)
        layout = found.layout
    elif isinstance(layout, str) and layout.partition("+")[0] not in presets.NAMES:
        raise LayoutError(f"layout {layout!r} is unknown.{did_you_mean(layout, (*presets.NAMES, AUTO))}")
    return offloaded(presets.named(layout), offload)


def warn_of_memory(
    layout: Layout, units: Sequence[UnitSpec], mesh: Mesh, moments: int, device: torch.device, precision: Precision
) -> None:
    """Says in the log that a step of these units will not fit into the device, and which layout would.

    Args:
        layout: bound.
        units: laid out on the mesh.
        mesh: of all ranks.
        moments: that the optimizer keeps of each element.
        device: of this rank.
        precision: of what no rule names.
    """
    memory, shared = memory_of(device), not accelerator.has_streams(device)
    resting = resting_bytes(layout, units, mesh, num_moments=moments, padded=True)
    if not memory or sum(resting.values()) < memory / 4:
        return

    def needed(table: Layout) -> float:
        """At the peak; what rests in host memory counts where that is the device's, too."""
        most = states_peak(table, units, mesh, moments)
        held = resting_bytes(table, units, mesh, num_moments=moments, padded=True) if shared else {}
        return most + sum(n for (_, tier), n in held.items() if tier is Tier.HOST)

    def advice() -> str:
        """Which layout would fit, or how much the smallest takes."""
        if any(segment.table_or(layout) != layout for unit in units for segment in unit.segments):
            return "Layouts that divide more states, or offload= of some to a slower tier, take less"
        names = ORDER if mesh.divisor > 1 else ORDER[-2:]

        def bound(name: str) -> Layout:
            return presets.named(name).replace(copies=layout.copies).bind(precision, mesh)

        looked = first_of(names, lambda name: needed(bound(name)), memory)
        if looked.fitting:
            return f"layout={looked.fitting[0].layout!r} takes {human(looked.fitting[0].needed)}"
        if (disk := needed(offloaded(presets.zero3, "disk").bind(precision, mesh))) <= memory:
            return f"layout='zero3' with offload='disk' takes {human(disk)}"
        least = min(looked.others, key=lambda each: each.needed)
        much = f"takes the least, {human(least.needed)}"
        return f"Of all layouts {least.layout!r} {much}: take more ranks or a smaller model"

    if (least := needed(layout)) <= memory or int(os.environ.get("LOCAL_RANK", "0")):  # one rank of a host says it
        return
    LOG.warning(
        f"a step will not fit: states and buffers alone take {human(least)} of the {human(memory)} of each rank, and "
        f"activations come on top. {advice()}; `shardfold plan` says what fits."
    )


def memory_of(device: torch.device) -> float:
    """Bytes that a rank here may take; of the host, its share among the ranks of this machine."""
    total = accelerator.total_memory(device) if accelerator.has_streams(device) else None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if total is not None:
        return total / -(-ranks // max(accelerator.count(device), 1))
    return memory_limit() / ranks


# -- by a plan of a micro-batch


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A micro-batch, and the arguments of the engine that a plan goes by; see :class:`shardfold.Engine`.

    Attributes:
        clips: gradients are clipped.
        survive: who holds copies.

    Raises:
        ConfigError: one of them is none that a plan follows.
    """

    auto: Auto
    activations: Any
    offload: Any
    optimizer: Any
    precision: Any
    wire: Any
    accumulate: int
    clips: bool
    parallel: Parallel
    units: Any
    overlap: Overlap
    survive: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise ConfigError("Auto(sample=...) is a micro-batch of training: give optimizer=, too, or name a layout.")
        mode, stages = self.activations, self.parallel.stages
        for given, follows, known in (
            (f"precision={described(self.precision)}", isinstance(self.precision, (str, Precision)), "one policy"),
            (f"activations={described(mode)}", mode is None or mode in (AUTO, *MODES), f"auto, {', '.join(MODES)}"),
            (f"wire={described(self.wire)}", self.wire is None, "None"),
            (f"Parallel(stages={described(stages)})", stages is None, "None"),
        ):
            if not follows:
                raise ConfigError(
                    f"{given} with Auto(sample=...): a plan of an engine follows {known} there; say "
                    "that, or name a layout and a mode."
                )

    @property
    def first(self) -> Layout:
        """A table with which ranks meet: what they meet for is in all that may be taken."""
        return self._table(ORDER[0] if self.layout == AUTO else self.layout)

    def _table(self, layout: str | Layout) -> Layout:
        table = presets.named(layout).with_outer(self.auto.outer)
        return table if self.survive is None else table.replace(copies=self.survive)

    @property
    def layout(self) -> str | Layout:
        """The one that is given, or ``"auto"``."""
        return self.auto.layout

    @property
    def tables(self) -> dict[str, Layout]:
        """Layouts that may be taken, by name, what sends the least first."""
        if self.layout != AUTO:
            table = self._table(self.layout)
            return {str(self.layout) if isinstance(self.layout, str) else "layout": offloaded(table, self.offload)}
        found, refused = dict[str, Layout](), list[LayoutError]()
        for name in (*ORDER, *(name for name in LAYOUTS if name not in ORDER)):
            try:
                found[name] = offloaded(self._table(name), self.offload)
            except LayoutError as error:  # where it divides nothing that offload= names, for one
                refused.append(error)
        if not found:
            raise refused[0]
        return found

    def choose(self, model: nn.Module, mesh: DataMesh, job: Agreement) -> tuple[Layout, str, list[str]]:
        """The table with its mode of activations, the mode, and why, in lines; all ranks call it.

        Raises:
            ConfigError: on all ranks: nothing fits, or they were given other micro-batches.
            ModelError: on all ranks: the model does not train on the micro-batch.
        """
        batch, _ = self._parts()
        job.same({"Auto(sample=...)": shapes_of(batch), "the layouts to choose from": str(list(self.tables))})
        memory = memory_of(mesh.device)
        host = memory_limit() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        said = [json.loads(text) for text in job.exchange("memory", json.dumps([memory, host]))]
        memory, host = (min(each) for each in zip(*said, strict=True))
        mine = self._answer(model, mesh, memory, host) if mesh.rank == 0 else ""
        answer = json.loads(job.exchange("what is taken for Auto(sample=...)", mine)[0])
        if "error" in answer:
            raise ERRORS.get(answer["error"], ConfigError)(answer["told"])
        if mesh.rank == 0:
            LOG.warning(answer["told"])
        mode = answer["mode"]
        return self.tables[answer["layout"]].replace(activations=mode), mode, [answer["told"]]

    def _answer(self, model: nn.Module, mesh: DataMesh, memory: float, host: float) -> str:
        """What rank 0 tells the others."""
        try:
            with torch.random.fork_rng(devices=()):  # what is run takes no random numbers of the run
                rank = self._rank(mesh, memory, host)
                found = choose(self._subject(model, mesh).ranks, self._fitting(mesh), self._modes(), rank)
        except ShardfoldError as error:
            return json.dumps({"error": type(error).__name__, "told": str(error)})
        return json.dumps({"layout": found.layout, "mode": found.mode, "told": found.told})

    def _fitting(self, mesh: DataMesh) -> dict[str, Layout]:
        """The layouts that differ on this mesh: on one node ``hsdp`` and ``hpz`` divide as ``zero3`` does."""
        nodes = mesh.sizes.get("inter", 1) > 1
        alone = () if mesh.sizes.divisor > 1 else ("zero1", "zero2", "zero3")
        left = {*alone, "fsdp2"} | (set() if nodes else set(BY_NODES))
        return {name: table for name, table in self.tables.items() if self.layout != AUTO or name not in left}

    def _modes(self) -> Sequence[str]:
        named = self.activations if self.activations is not None else AUTO
        return SEARCHED if named == AUTO else (named,)

    def _parts(self) -> tuple[Any, Callable[[Any, Any], Any]]:
        """The micro-batch, and what gives its loss."""
        return self.auto.sample, self.auto.loss or loss_of

    def _subject(self, model: nn.Module, mesh: DataMesh) -> Subject:
        """The model as it is planned."""
        sizes: dict[str, int] = {}
        for role in SHARED:
            for name in mesh.sizes.of_role(role):
                if name != role.value:
                    raise ConfigError(
                        f"parallel= has an axis {name!r} of {role}, which a plan for Auto(sample=...) finds by its "
                        f"name: call it {role.value!r}."
                    )
                sizes[name] = mesh.sizes[name]
        how, plan = self.parallel, cast("Any", self.parallel.tensor)
        division = Division(
            **sizes,
            sequence_parallel=how.sequence_parallel,
            plan=plan,
            attention=how.attention,
            order=str(how.pipeline),
            micro_batches=self.accumulate if sizes.get("pipeline", 1) > 1 else 1,
            streams=accelerator.has_streams(mesh.device),
        )
        batch, compute = self._parts()
        return Subject(model, batch, compute, units=self.units, division=division)

    def _rank(self, mesh: DataMesh, memory: float, host: float) -> PlannedRank:
        streams = accelerator.has_streams(mesh.device)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.world)))
        device = known_device(accelerator.product(mesh.device) or "")
        behaviour = GPU if streams else CPU if local >= mesh.world else replace(CPU, transport="sockets")
        return PlannedRank(
            mesh=mesh.sizes.axes,
            precision=self.precision,
            micro_batches=self.accumulate,
            overlap=self.overlap,
            moments=moments_of(self.optimizer),
            clip=self.clips,
            behaviour=behaviour,
            budget=memory - RESERVE if memory else float("inf"),
            host=host if streams else None,
            where=Cluster(device, max(mesh.world // local, 1), local) if device is not None else None,
        )


def sampled(layout: Any, activations: Any, **more: Any) -> Sampled | None:
    """What an engine with these arguments is planned with before it is made; None: nothing is planned.

    Raises:
        ConfigError: the mode of activations is left to a plan, and there is no micro-batch; or as of :class:`Sampled`.
    """
    if isinstance(layout, Auto):
        return Sampled(auto=layout, activations=activations, **more)
    if isinstance(activations, str) and activations == AUTO:
        raise ConfigError(
            "activations='auto' takes what a plan of the model with a micro-batch finds: give one, as in "
            "layout=sf.Auto(sample=...), or name a mode."
        )
    return None


def moments_of(optimizer: Any) -> int:
    """How many moments an optimizer keeps of each element, or one that is made of a parameter for that; of one that
    cannot be made so, two."""
    if isinstance(optimizer, Optimizer):
        return num_moments(optimizer)
    try:
        return num_moments(optimizer([nn.Parameter(torch.zeros(1))]))
    except Exception:  # it takes the model's own parameters, or is refused when the engine makes it
        return 2
