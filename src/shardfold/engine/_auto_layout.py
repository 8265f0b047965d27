"""What :class:`Auto` is for: the layout, and what happens to activations, by a plan of the user's own model.

Rank 0 plans, and all ranks take what it says: so they take the same, whatever differs between their hosts. What it
plans with is the least memory that any of them has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardfold import accelerator
from shardfold.comm.agreement import Agreement
from shardfold.comm.mesh import DataMesh
from shardfold.engine.fitting import memory_of
from shardfold.errors import ConfigError, LayoutError, ModelError, ShardfoldError
from shardfold.optim.fused import num_moments
from shardfold.parallel.parallel import Parallel
from shardfold.plan import presets
from shardfold.plan.axes import Role
from shardfold.plan.checks import described
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.lifetimes import CPU, GPU
from shardfold.plan.offload import offloaded
from shardfold.plan.program_passes import Overlap
from shardfold.planner.auto import AUTO, ORDER
from shardfold.planner.division import Division
from shardfold.planner.given import shapes_of
from shardfold.planner.hardware import RESERVE, Cluster, known_device
from shardfold.planner.sample import Auto
from shardfold.planner.sampled import MODES, PlannedRank, choose
from shardfold.planner.search import BY_NODES, LAYOUTS
from shardfold.planner.search import MODES as SEARCHED
from shardfold.planner.setting import Subject
from shardfold.planner.tracing import loss_of
from shardfold.tiers.limit import memory_limit

__all__ = ["Sampled", "sampled"]

LOG = getLogger("shardfold")
ERRORS = {kind.__name__: kind for kind in (ConfigError, LayoutError, ModelError)}
SHARED = (Role.TENSOR, Role.SEQUENCE, Role.EXPERT, Role.PIPELINE)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A micro-batch, and the arguments of the engine that a plan goes by; see :class:`shardfold.Engine`.

    Attributes:
        clips: gradients are clipped.

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

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise ConfigError("Auto(sample=...) is a micro-batch of training: give optimizer=, too, or name a layout.")
        for name, given, follows in (
            ("precision", self.precision, isinstance(self.precision, (str, Precision))),
            ("activations", self.activations, self.activations is None or self.activations in (AUTO, *MODES)),
            ("wire", self.wire, self.wire is None),
            ("stages", self.parallel.stages, self.parallel.stages is None),
        ):
            if not follows:
                known = {"precision": "one policy", "activations": f"auto, {', '.join(MODES)}"}.get(name, "None")
                raise ConfigError(
                    f"{name}={described(given)} with Auto(sample=...): a plan of an engine follows {known} there; say "
                    "that, or name a layout and a mode."
                )

    @property
    def first(self) -> Layout:
        """A table with which ranks meet: what they meet for is in all that may be taken."""
        return presets.named(ORDER[0] if self.layout == AUTO else self.layout)

    @property
    def layout(self) -> str | Layout:
        """The one that is given, or ``"auto"``."""
        return self.auto.layout

    @property
    def tables(self) -> dict[str, Layout]:
        """Layouts that may be taken, by name, what sends the least first."""
        if self.layout != AUTO:
            table = presets.named(self.layout)
            return {str(self.layout) if isinstance(self.layout, str) else "layout": offloaded(table, self.offload)}
        found, refused = dict[str, Layout](), list[LayoutError]()
        for name in (*ORDER, *(name for name in LAYOUTS if name not in ORDER)):
            try:
                found[name] = offloaded(presets.named(name), self.offload)
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
        job.same({"sample=": shapes_of(batch), "the layouts to choose from": str(list(self.tables))})
        memory = memory_of(mesh.device)
        host = memory_limit() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        said = [json.loads(text) for text in job.exchange("memory", json.dumps([memory, host]))]
        memory, host = (min(each) for each in zip(*said, strict=True))
        mine = self._answer(model, mesh, memory, host) if mesh.rank == 0 else ""
        answer = json.loads(job.exchange("what is taken for sample=", mine)[0])
        if "error" in answer:
            raise ERRORS.get(answer["error"], ConfigError)(answer["told"])
        if mesh.rank == 0:
            LOG.warning(answer["told"])
        mode = answer["mode"]
        return self.tables[answer["layout"]].replace(activations=mode), mode, [answer["told"]]

    def _answer(self, model: nn.Module, mesh: DataMesh, memory: float, host: float) -> str:
        """What rank 0 tells the others."""
        try:
            with _same_random_numbers():
                place = self._place(mesh, memory, host)
                found = choose(self._subjects(model, mesh), self._fitting(mesh), self._modes(), place)
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

    def _subjects(self, model: nn.Module, mesh: DataMesh) -> list[Subject]:
        """The model as it is planned, one for each stage."""
        sizes: dict[str, int] = {}
        for role in SHARED:
            for name in mesh.sizes.of_role(role):
                if name != role.value:
                    raise ConfigError(
                        f"mesh= has an axis {name!r} of {role}, which a plan for Auto(sample=...) finds by its name: "
                        f"call it {role.value!r}."
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
        return [
            Subject(model, batch, compute, units=self.units, division=replace(division, stage=stage))
            for stage in range(division.pipeline)
        ]

    def _place(self, mesh: DataMesh, memory: float, host: float) -> PlannedRank:
        streams = accelerator.has_streams(mesh.device)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.world)))
        device = known_device(accelerator.product(mesh.device) or "")
        behaviour = GPU if streams else CPU if local >= mesh.world else replace(CPU, transport="gloo")
        return PlannedRank(
            axes=mesh.sizes.axes,
            precision=self.precision,
            micro_batches=self.accumulate,
            overlap=self.overlap,
            moments=moments_of(self.optimizer),
            clip=self.clips,
            behaviour=behaviour,
            memory=memory - RESERVE if memory else float("inf"),
            host=host if streams else None,
            where=Cluster(device, max(mesh.world // local, 1), local) if device is not None else None,
        )


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """What is run to be planned, on rank 0 only, takes no random numbers of the run."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


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
