"""A rank that is planned for: its devices, what it runs, and how a model is planned on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any

from shardfold.errors import ConfigError
from shardfold.plan.axes import Axis
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.lifetimes import CPU, GPU, Behaviour
from shardfold.plan.program_passes import Overlap
from shardfold.planner.division import UNDIVIDED, Division
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import MemoryPlan, Setting, plan_memory
from shardfold.planner.moved import MOVED
from shardfold.planner.setting import LINE, Subject
from shardfold.planner.trace import Trace

__all__ = ["PlannedRank"]


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """A rank, and what it is to run.

    Attributes:
        mesh: of all ranks, as an engine takes it.
        budget: bytes for the rank's process on the device.
        host: bytes of host memory for it; inf: not known; None: there is one memory, ``budget``.
        precision: of the whole model.
        micro_batches: of a step.
        overlap: as the engine has it.
        moments: that the optimizer keeps of each element.
        clip: the norm of the gradients is taken.
        behaviour: of the device.
        where: devices whose rates are known; None: they are not.

    Raises:
        ConfigError: the devices have no products in fp8, which ``precision`` has; of their emulation nothing is known.
    """

    mesh: Mapping[str, int] | Sequence[Axis] = ()
    budget: float = inf
    host: float | None = inf
    precision: str | Precision = "bf16"
    micro_batches: int = 1
    overlap: Overlap | None = None
    moments: int = 2
    clip: bool = True
    behaviour: Behaviour = GPU
    where: Cluster | None = None

    def __post_init__(self) -> None:
        device, precision = self.where and self.where.device, Precision.named(self.precision)
        if device is not None and device.streams and precision.linear and "fp8" not in device.flops:
            raise ConfigError(
                f"a plan with products in {precision.linear} for {device.name}: it has none, and they are emulated in "
                "fp32 there, which takes time and memory that no plan knows; plan bf16."
            )

    @classmethod
    def on(cls, where: Cluster, division: Division = UNDIVIDED, **what: Any) -> PlannedRank:
        """One of ranks that share a model on some devices; ``what`` it runs, as of this class."""
        device, mesh = where.device, division.over(where.mesh)
        behaviour = GPU if device.streams else CPU
        return cls(mesh=mesh.axes, budget=device.usable, behaviour=behaviour, where=where, **what)

    def plan(
        self, subject: Subject, layout: str | Layout, mode: str, samples: int | None = None
    ) -> tuple[Setting, MemoryPlan]:
        """What it binds for a model, and bytes over a step; ``samples``: as of a trace."""
        return self.walk(subject, layout, subject.trace(self.precision, mode, samples))

    def walk(self, subject: Subject, layout: str | Layout, trace: Trace) -> tuple[Setting, MemoryPlan]:
        """The same by a trace."""
        setting = subject.setting(
            trace,
            layout=layout,
            precision=self.precision,
            mesh=self.mesh,
            overlap=self.overlap,
            micro_batches=self.micro_batches,
            moments=self.moments,
            clip=self.clip,
            behaviour=self.behaviour,
        )
        return setting, plan_memory(setting, trace)

    def largest(self, subject: Subject, plan: MemoryPlan) -> int:
        """The most samples with which no point of a plan has more bytes than there are, nor host memory more: what
        forward and backward hold at each is a line over the number of samples, and what the engine holds does not
        depend on it."""
        mode, held = plan.trace.mode, plan.tiers.get(Tier.HOST, 0.0)
        few, more = subject.line(self.precision, mode)
        most = plan.line(few, more, LINE).largest(self.budget - (held if self.host is None else 0.0))
        room = (inf if self.host is None else self.host) - (held - plan.trace.away.get(Tier.HOST, 0.0))  # beside states
        if room < 0:
            return 0
        if room < inf and 1 <= most < inf and mode in MOVED:
            held = subject.trace(self.precision, mode, floor(most)).away.get(Tier.HOST, 0.0)
            most *= min(1.0, room / held) if held else 1.0  # of fewer samples no larger part is moved
        return 0 if most == inf else floor(most)
