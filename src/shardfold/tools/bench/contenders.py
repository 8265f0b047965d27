"""Who can run a job: bare loops, PyTorch's own, DeepSpeed, and the layouts of this library. Imports none of them.

Who takes part in the job ``offload`` keeps states in slower tiers; ``zero2``, which keeps none there, is what they are
compared with.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.bench.settings import Settings

__all__ = ["CONTENDERS", "Contender", "choose", "default_reference", "find"]

ONE, SEVERAL = (1, 1), (2, sys.maxsize)  # ranks
ON_DEVICE, OFFLOAD = ("gpt", "tensors", "units"), ("offload",)  # jobs

#: Keeps glibc from giving pages back that the next step takes again.
KEEP_PAGES = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to run a job.

    Attributes:
        name: what it is called on the command line and in tables.
        says: what it is, in a few words.
        kind: which function of ``sides`` builds it, with ``option``.
        package: what must be installed for it.
        environment: variables of its processes.
        ranks: the least and the most ranks it makes sense for.
        nodes: how many nodes its ranks pretend to be spread over, at least two on each.
        precisions: those in which it differs from the others.
        jobs: those that it takes part in.
        on_request: it takes part only where it is asked for by name or pattern.
        compiled: what ``torch.compile`` compiles: ``model``, ``blocks``, each by itself, or nothing.
        precision: its own, in place of the settings'.
        overlap: of ours, fields of :class:`~shardfold.Overlap`.
        rounds: what it sends is rounded, so that its losses are its own.
        offload: what rests in slower tiers: of ours, the engine's own argument; of DeepSpeed, the device.
        moved: of a peer, the bytes per parameter, over all ranks, that go between device and host in a step, as its
            source has it; 0 where it does not offload, and for ours, which count them.
    """

    name: str
    says: str
    kind: str
    option: str = ""
    package: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, int] = (1, sys.maxsize)
    nodes: int = 1
    precisions: tuple[str, ...] = ("fp32", "bf16")
    jobs: tuple[str, ...] = ON_DEVICE
    offload: str = ""
    on_request: bool = False
    compiled: str = ""
    precision: str = ""
    overlap: Mapping[str, object] = field(default_factory=dict)
    rounds: bool = False
    moved: float = 0.0

    @property
    def ours(self) -> bool:
        return self.kind == "engine"

    @property
    def differs(self) -> bool:
        """Whether its losses are its own, and equal to nobody else's."""
        return self.rounds or bool(self.precision) or bool(self.overlap.get("delayed_update"))

    def misfit(self, settings: Settings) -> str | None:
        """Why it does not take part under these settings, or None."""
        if settings.job not in self.jobs:
            return f"it does the job{'s' if len(self.jobs) > 1 else ''} {', '.join(self.jobs)}"
        least, most = self.ranks
        if settings.ranks < least:
            return f"needs at least {least} ranks"
        if settings.ranks > most:
            return "one rank only"
        if self.rounds and settings.link is None:
            return "rounds what it sends, for slow links: give --link"
        if self.nodes > 1 and (settings.ranks % self.nodes or settings.ranks < 2 * self.nodes):
            return f"needs a multiple of {self.nodes} ranks, at least {2 * self.nodes}"
        if settings.precision not in self.precisions:
            return f"is the same as another in {settings.precision}"
        return None

    def missing(self) -> bool:
        return self.package is not None and importlib.util.find_spec(self.package) is None


def _ours(name: str, says: str, **more: object) -> Contender:
    return Contender(**{"name": name, "says": says, "kind": "engine", "option": name, **more})  # type: ignore[arg-type]


def _away(name: str, layout: str, offload: str, says: str) -> Contender:
    return _ours(name, says, option=layout, offload=offload, jobs=OFFLOAD)


def _compiled(name: str, says: str, kind: str, compiled: str, **more: object) -> Contender:
    on_request = {"compiled": compiled, "on_request": True, "jobs": ("gpt",)}
    return Contender(**{"name": name, "says": says, "kind": kind, **on_request, **more})  # type: ignore[arg-type]


def _deepspeed(stage: str, offload: str = "", moved: float = 0.0) -> Contender:
    away = {"": "", "cpu": ", optimizer in host memory", "nvme": ", optimizer on disk"}[offload]
    return Contender(
        name=f"deepspeed-{stage}{'-' * bool(offload)}{'host' if offload == 'cpu' else offload}",
        says=f"DeepSpeed, ZeRO stage {stage}{away}",
        kind="deepspeed",
        option=stage,
        package="deepspeed",
        jobs=OFFLOAD if offload else ON_DEVICE,
        offload=offload,
        moved=moved,
    )


def _bare(name: str, says: str, option: str = "", **environment: str) -> Contender:
    return Contender(
        name=name, says=f"a plain loop{says}", kind="bare", option=option, environment=environment, ranks=ONE
    )


CONTENDERS: tuple[Contender, ...] = (
    _bare("bare", ""),
    _bare("bare-zeros", ", zero_grad(set_to_none=False)", "zeros"),
    _bare("bare-malloc", ", malloc keeps its pages", **KEEP_PAGES),
    Contender(name="torch-ddp", says="DistributedDataParallel", kind="ddp"),
    Contender(name="torch-zero1", says="DDP with ZeroRedundancyOptimizer", kind="ddp", option="zero", ranks=SEVERAL),
    Contender(name="torch-fsdp2", says="PyTorch's fully_shard", kind="fully_shard"),
    Contender(
        name="torch-fsdp2-keep",
        says="fully_shard, reshard_after_forward=False",
        kind="fully_shard",
        option="keep",
        ranks=SEVERAL,
    ),
    *(_deepspeed(stage) for stage in "123"),
    _ours("ddp", "nothing split"),
    _ours("zero1", "optimizer states split"),
    _ours("zero2", "gradients split too", jobs=(*ON_DEVICE, *OFFLOAD)),
    _ours("zero3", "parameters split too"),
    _ours("fsdp2", "the master alone rests", ranks=SEVERAL, precisions=("bf16",)),
    _ours("hsdp", "split within two nodes", nodes=2),
    _ours("hpz", "zero3 with a second copy within two nodes", nodes=2),
    _ours("zeropp", "the same in int8 and int4, in two hops", nodes=2, rounds=True),
    _compiled("compile-bare", "a plain loop, torch.compile of the model", "bare", "model", ranks=ONE),
    _compiled("compile-fsdp2", "fully_shard, torch.compile of each block", "fully_shard", "blocks"),
    _compiled("compile-zero3", "parameters split, blocks compiled", "engine", "blocks", option="zero3"),
    _ours(
        "one-pass-zero3",
        "parameters split, the update one compiled pass",
        option="zero3",
        jobs=("gpt",),
        precisions=("bf16",),
        overlap={"compiled_update": True},
        on_request=True,
    ),
    _ours("fp8-zero3", "parameters split, products in fp8", option="zero3", precision="fp8", on_request=True),
    _away("zero2-host", "zero2", "host", "gradients and optimizer states in host memory"),
    _ours(
        "delayed-zero2-host",
        "the same, updated beside the next step",
        option="zero2",
        offload="host",
        jobs=OFFLOAD,
        overlap={"delayed_update": True},
        on_request=True,
    ),
    _away("zero3-host", "zero3", "host", "the same, and parameters split"),
    _away("infinity", "infinity", "", "parameters in host memory too"),
    _away("zero2-moments-disk", "zero2", "moments=disk", "moments on disk"),
    _away("zero3-disk", "zero3", "disk", "gradients and optimizer states on disk"),
    _away("infinity-disk", "infinity", "params=disk,grads=disk,optimizer=disk", "parameters on disk too"),
    # Gradients go down in fp32 and parameters come up in 16 bits.
    _deepspeed("2", "cpu", 4 + 2),
    _deepspeed("3", "cpu", 4 + 2),
    _deepspeed("3", "nvme", 4 + 2),
    # fp32 shards come up in forward and in backward, to be cast there, and fp32 gradients go down.
    Contender(
        name="torch-fsdp2-host",
        says="PyTorch's fully_shard with CPUOffloadPolicy",
        kind="fully_shard",
        option="reshard",
        jobs=OFFLOAD,
        offload="cpu",
        moved=4 + 4 + 4,
    ),
)


def find(name: str) -> Contender:
    """The contender of that name.

    Raises:
        ConfigError: there is none; the message suggests the nearest.
    """
    for contender in CONTENDERS:
        if contender.name == name:
            return contender
    raise ConfigError(f"there is no contender {name!r}.{did_you_mean(name, [each.name for each in CONTENDERS])}")


def choose(
    settings: Settings, only: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[list[Contender], dict[str, str]]:
    """Those that take part, and those left out with the reason.

    Args:
        settings: of the benchmark.
        only: names or patterns (``deepspeed-*``); none: all.
        without: names or patterns.

    Raises:
        ConfigError: a pattern names nobody, or all that it names cannot take part.
    """
    reasons = {}
    for contender in CONTENDERS:
        if contender.missing():
            reasons[contender.name] = f"{contender.package} is not installed (pip install 'shardfold[peers]')"
        elif misfit := contender.misfit(settings):
            reasons[contender.name] = misfit
    for pattern in only:
        names = _named(pattern)
        if all(name in reasons for name in names):
            raise ConfigError(f"{names[0]} was asked for and cannot take part: {reasons[names[0]]}.")
    usual = {each.name for each in CONTENDERS if not each.on_request}
    asked = {name for pattern in only for name in _named(pattern)} if only else usual
    asked -= {name for pattern in without for name in _named(pattern)}
    chosen = [each for each in CONTENDERS if each.name in asked and each.name not in reasons]
    if not chosen:
        raise ConfigError("no contender is left: --without names all of them.")
    of_job = {each.name for each in CONTENDERS if settings.job in each.jobs}
    return chosen, {name: reason for name, reason in reasons.items() if name in asked & of_job}


def _named(pattern: str) -> list[str]:
    names = [each.name for each in CONTENDERS if fnmatchcase(each.name, pattern)]
    return names or [find(pattern).name]


def default_reference(names: Sequence[str], settings: Settings) -> tuple[str, ...]:
    """Among whom the fastest is what the others are compared with."""
    usual = [name for name in names if name.startswith("bare" if settings.ranks == 1 else "torch-ddp")]
    return tuple(usual or names[:1])
