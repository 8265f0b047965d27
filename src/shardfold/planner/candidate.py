"""A way to train that a search looks at, as what an engine, a recipe and a DeepSpeed config take."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from shardfold.errors import ConfigError
from shardfold.parallel.parallel import Parallel
from shardfold.plan import presets
from shardfold.plan.copies import WORDS
from shardfold.plan.layout import ORDERED, Layout
from shardfold.plan.rewrites import Overlap
from shardfold.planner.division import UNDIVIDED, Division
from shardfold.planner.seconds import Seconds

__all__ = ["ANY", "STAGES", "Candidate", "FittingCandidate", "Refused", "sizes_to_show"]

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3, "offload": 2, "infinity": 3}
"""What DeepSpeed calls them."""
ANY = "any"
"""Of layout and mode, where none does."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train.

    Attributes:
        layout: name of a preset.
        mode: of activations.
        micro_batch: samples on each rank at a time.
        accumulate: micro-batches of a step.
        precision: policy.
        prefetch: units gathered ahead.
        division: how ranks share the model besides its states.
        gather: as what parameters travel, a format and its hops as ``int8x2``; empty: as the layout has it.
        reduce: the same of gradients.
        copies: who holds the optimizer's states of a rank once more, ``"rank"`` or ``"host"``; empty: as the layout has
            it.
        exact: whether gradients are summed in the order of ranks, as by ``Runtime(exact=True)``.
    """

    layout: str
    mode: str = "keep"
    micro_batch: int = 1
    accumulate: int = 1
    precision: str = "bf16"
    prefetch: int = 1
    division: Division = UNDIVIDED
    gather: str = ""
    reduce: str = ""
    copies: str = ""
    exact: bool = False

    @property
    def wires(self) -> dict[str, str]:
        """As what travels, where that is not as the layout has it."""
        return {purpose: name for purpose in ("gather", "reduce") if (name := getattr(self, purpose))}

    @property
    def wired(self) -> str:
        """The same in words; empty: as the layout has it."""
        return ", ".join(f"{purpose} {name}" for purpose, name in self.wires.items())

    @property
    def changes(self) -> dict[str, str]:
        """What of the table is not as the layout has it."""
        ordered = {"reduce": f"{presets.named(self.layout).reduce}{ORDERED}"} if self.exact else {}
        return self.wires | ({"copies": self.copies} if self.copies else {}) | ordered

    @property
    def table(self) -> Layout:
        """The layout with these."""
        return presets.named(self.layout).replace(**self.changes)

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of :class:`shardfold.Engine`."""
        axes, how = self.division.axes, dict[str, Any]()
        if "pipeline" in axes:
            how["pipeline"] = self.division.order
        if "tensor" in axes:
            how |= {"tensor": self.division.plan, "sequence_parallel": self.division.sequence_parallel}
        more = {"parallel": Parallel(mesh=axes, **how) if how else axes} if axes else {}
        return {
            "layout": self.table if self.changes else self.layout,
            "precision": self.precision,
            "activations": self.mode,
            "accumulate": self.accumulate,
            "overlap": Overlap(prefetch=self.prefetch),
            **more,
        }

    @property
    def train(self) -> dict[str, Any]:
        """Settings of ``shardfold train``, but for what it trains, and on how many processes."""
        found: dict[str, Any] = {
            "layout": self.layout,
            "precision": self.precision,
            "activations": self.mode,
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
            **self.division.axes,
            **self.wires,
        }
        if "pipeline" in self.division.axes:
            found["order"] = self.division.order
        if self.copies == WORDS[0]:
            found |= {"elastic": True} | ({"exact": True} if self.exact else {})
        return found | ({"sequence_parallel": True} if self.division.sequence_parallel else {})

    @property
    def deepspeed(self) -> dict[str, Any]:
        """A DeepSpeed config, as far as it has words for this; :attr:`unsaid` is what it has none for.

        Raises:
            ConfigError: it has none for the layout.
        """
        if self.layout not in STAGES:
            raise ConfigError(f"DeepSpeed has no stage that is {self.layout}: take zero3, or give Engine the layout.")
        zero: dict[str, Any] = {"stage": STAGES[self.layout]}
        if self.layout in ("offload", "infinity"):
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.layout == "infinity":
            zero["offload_param"] = {"device": "cpu"}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulate,
            "zero_optimization": zero,
        }
        if self.precision in ("bf16", "fp16"):
            found[self.precision] = {"enabled": True}
        if self.division.tensor > 1:
            found["tensor_parallel"] = {"autotp_size": self.division.tensor}
        if self.division.sequence > 1:
            found["sequence_parallel_size"] = self.division.sequence
        return found

    @property
    def unsaid(self) -> str:
        """What :attr:`deepspeed` has no words for, and where a program says it, in a sentence; empty: for nothing."""
        said: list[str] = []
        if self.mode != "keep":
            said.append(f"activations={self.mode!r} (the model calls deepspeed.checkpointing)")
        if self.division.pipeline > 1:
            stages, order = self.division.pipeline, self.division.ordered
            plain = order in ("1f1b", "gpipe")
            where = f"PipelineModule(num_stages={stages})" if plain else "the order is of sf.Parallel(pipeline=)"
            said.append(f"pipeline={stages} in order {order} ({where})")
        if self.division.expert > 1:
            said.append(f"expert={self.division.expert} (MoE(ep_size={self.division.expert}))")
        if self.division.sequence_parallel:
            said.append("sequence parallelism (sf.Parallel(sequence_parallel=True))")
        if self.wires:
            said.append(f"{self.wired} (the layout of Engine)")
        if self.copies:
            said.append(f"copies={self.copies!r} (the layout of Engine)")
        if self.exact:
            said.append("sums in the order of ranks (Runtime(exact=True))")
        return f"a DeepSpeed config has no words for {'; '.join(said)}." if said else ""

    def __str__(self) -> str:
        axes = f"{self.division}, " if self.division.axes else ""
        wires = f"{self.wired}, " if self.wires else ""
        return f"{self.layout}, {wires}{axes}{self.mode}, micro-batch {self.micro_batch} x {self.accumulate}"


@dataclass(frozen=True)
class FittingCandidate:
    """A candidate that fits.

    Attributes:
        peak: bytes of each device.
        host: bytes of host memory for each rank.
        seconds: of a step.
        samples: per second, of all ranks; of those that a step was asked to have, where that was said.
        batch: samples of a step of all ranks, in whole micro-batches: as many as were asked for, or a few more.
        zeros: why the model ran on zeros with memory, whose values sizes and branches may go by; empty: it ran without.
        loss: what was taken for the loss of a model that gives none; empty: it, or ``compute``, gave one.
    """

    candidate: Candidate
    peak: float
    host: float
    seconds: Seconds
    samples: float
    batch: int
    zeros: str = ""
    loss: str = ""
    fits = True

    @property
    def cost(self) -> tuple[float, float]:
        """What trains the most samples is the best, and of equal ones what needs the least."""
        return -self.samples, self.peak

    def device_hours(self, tokens: float = 1e9) -> float:
        """Hours of devices, those of all of them added up, that training on so many tokens takes; inf: the model reads
        no tokens. Times what a device costs an hour, it is what they cost."""
        seconds = self.seconds
        if not seconds.tokens:
            return inf
        return tokens / seconds.tokens_per_second * self.candidate.division.sharing / 3600


@dataclass(frozen=True)
class Refused:
    """What does not fit, and why, in a sentence; ``wired``: as of a candidate."""

    layout: str
    mode: str
    why: str
    division: Division = UNDIVIDED
    wired: str = ""
    fits = False
    cost = inf, inf

    @property
    def named(self) -> str:
        """Which way it is."""
        parts = (self.layout, str(self.division) if self.division.axes else "", self.wired, self.mode)
        return ", ".join(part for part in parts if part and part != ANY) or ANY


def sizes_to_show(most: int) -> list[int]:
    """Powers of two, and the largest."""
    return [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
