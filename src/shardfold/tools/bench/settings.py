"""What is run, how large and how often. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError, did_you_mean
from shardfold.launch.namespaces import check_rate, why_not
from shardfold.tools.effects import Effect
from shardfold.tools.recipes.train_config import GPTConfig

__all__ = ["EFFECTS", "JOBS", "UNITS", "Settings", "gpt_shape"]

JOBS = ("gpt", "tensors", "units", "offload")
UNITS = 64  # of the job `units`
NODES = 2  # of a link
OF_GPT = ("gpt", "offload")
EFFECTS = (
    *(
        Effect(
            name, lambda bench: bench.job not in JOBS or bench.job in OF_GPT, "this job has no GPT", "give the job gpt"
        )
        for name in ("params", "context")
    ),
    *(
        Effect(name, lambda bench: bench.timeline is None, "--timeline draws a picture and compares nothing")
        for name in ("within", "without", "reference", "json", "markdown")
    ),
)
"""What options of the command need that do nothing by themselves."""
CHOICES = {
    "job": JOBS,
    "precision": ("fp32", "bf16"),
    "device": ("cpu", "cuda", "sim"),
    "optimizer": ("adamw", "sgd"),
}
AT_LEAST = {
    "rows": 1,
    "context": 1,
    "ranks": 1,
    "threads": 1,
    "rounds": 1,
    "steps": 1,
    "warm": 1,
    "timeout": 1,
    "within": 1,
    "together": 1,
    "clip_norm": 0,
}

#: (layers, d_model, heads) of the GPT, from a fifth of a million to six and a half billion parameters.
SHAPES = (
    (3, 64, 4),
    (5, 128, 4),
    (8, 320, 5),
    (10, 448, 7),
    (13, 544, 8),
    (14, 768, 12),
    (16, 1024, 16),
    (21, 1408, 22),
    (26, 2048, 16),
    (34, 2560, 20),
    (32, 4096, 32),
)


def gpt_shape(params: float, context: int) -> GPTConfig:
    """The shape whose number of parameters is nearest to ``params``.

    Raises:
        ConfigError: the nearest is off by more than a factor of 2.
    """
    shapes = [GPTConfig(layers=a, d_model=b, heads=c, context=context) for a, b, c in SHAPES]
    nearest = min(shapes, key=lambda shape: abs(log(shape.num_parameters / params)))
    if not 0.5 <= nearest.num_parameters / params <= 2:
        raise ConfigError(
            f"params is {params:g}, but the gpt job has {shapes[0].num_parameters:,} to "
            f"{shapes[-1].num_parameters:,} parameters: give a number in that range."
        )
    return nearest


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One benchmark.

    Attributes:
        job: ``gpt``, ``tensors``, ``units``, or ``offload``: the GPT under contenders whose states rest in slower
            tiers.
        params: about how many parameters the GPT has.
        rows: sequences per rank and step.
        context: tokens per sequence.
        ranks: processes of each contender, on this machine.
        threads: of each rank, where it computes on the CPU.
        precision: ``fp32`` or ``bf16``.
        device: ``cpu`` (Gloo), ``cuda`` (NCCL, one GPU per rank) or ``sim`` (the simulated device
            of :mod:`shardfold.testing.simulated`, whose times say nothing).
        optimizer: ``adamw`` (fused) or ``sgd`` (without momentum).
        clip_norm: the largest norm of gradients; 0: nobody clips.
        folder: where contenders keep files while they run, which decides on the drive; None: the system's folder for
            temporary files.
        rounds: turns of each contender.
        steps: timed steps of a turn; one more comes before them.
        warm: steps before the first turn.
        timeout: seconds until a contender that does not answer is given up.
        within: seconds after which no further round begins, and after three quarters of which no further contender is
            started; None: all are.
        link: what goes between two simulated nodes, over which the ranks are spread, as ``"200mbit"``; it needs root.
            None: all ranks are on one node.
        together: contenders that are started at once: each imports, compiles and warms up, which is not timed, so
            several do where cores and memory are enough.

    Raises:
        ConfigError: a value is unknown or too small.
    """

    job: str = "gpt"
    params: float = 46e6
    rows: int = 1
    context: int = 64
    ranks: int = 2
    threads: int = 1
    precision: str = "fp32"
    device: str = "cpu"
    optimizer: str = "adamw"
    clip_norm: float = 0.0
    folder: str | None = None
    rounds: int = 5
    steps: int = 5
    warm: int = 3
    timeout: float = 300.0
    within: float | None = None
    link: str | None = None
    together: int = 1

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}, which is unknown.{did_you_mean(str(value), choices)}")
        for name, least in AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}, but must be at least {least}.")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ConfigError(f"there is no folder {self.folder!r} for the files of contenders: make it first.")
        if self.link is not None:
            check_rate(self.link)
            if self.device != "cpu" or self.ranks % NODES or self.ranks < 2 * NODES:
                raise ConfigError(
                    f"--link spreads ranks of the CPU over {NODES} nodes, at least two on each, but there are "
                    f"{self.ranks} on {self.device}: give --ranks {2 * NODES}, or another multiple of {NODES}."
                )
            if reason := why_not():
                raise ConfigError(f"--link {self.link}: {reason}.")
        if self.of_gpt:
            gpt_shape(self.params, self.context)

    @property
    def of_gpt(self) -> bool:
        """Whether the job trains the GPT."""
        return self.job in OF_GPT

    def title(self) -> str:
        """The settings in one line."""
        of_gpt = ""
        if self.of_gpt:
            shape = gpt_shape(self.params, self.context)
            of_gpt = (
                f" of {shape.num_parameters / 1e6:.1f}M parameters ({shape.layers} layers, d_model {shape.d_model}, "
                f"{shape.heads} heads), {self.rows} x {self.context} tokens per rank"
            )
        plural = "s" if self.ranks > 1 else ""
        threads = f" of {self.threads} threads" if self.threads > 1 else ""
        clip = f"clipped at {self.clip_norm:g}" if self.clip_norm else "no clipping"
        return (
            f"{self.job}{of_gpt}, {self.ranks} rank{plural}{threads}, {self.precision}, {self.optimizer}, {clip}, "
            f"{self.device}{f', {self.link} between two nodes' if self.link is not None else ''}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
