"""DeepSpeed's JSON as values of ours: ``read`` gives :class:`Settings`, which this layer builds an engine from.

Nothing here imports torch, so that a config can be judged without it.

The batch triad: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks. The section
``elasticity`` chooses it, as DeepSpeed's 0.1 and 0.2 do: among the largest multiples of each micro-batch, and of their
least common one, by a highly composite number, the batch that most numbers of ranks divide.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isqrt, lcm
from typing import TYPE_CHECKING, Any

from shardfold.compat.deepspeed.config_check import Checked, Note, check
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_hyper import SIGNED, hyper, idle
from shardfold.compat.deepspeed.config_keys import KEYS
from shardfold.compat.deepspeed.config_offload import offload_of, older_words, table_of
from shardfold.compat.deepspeed.config_parallel import AUTOTP, Said, Sizes, mesh_of, sizes_of
from shardfold.compat.deepspeed.config_precision import Scaling, layout_of, loss_scale_of, overlap_of, precision_of
from shardfold.compat.deepspeed.config_quantized import base_of
from shardfold.compat.deepspeed.config_source import load
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.presets import named
from shardfold.plan.quantized import Quantized
from shardfold.plan.rewrites import Overlap
from shardfold.plan.signs import Signs

if TYPE_CHECKING:
    from shardfold.numerics.scaling import LossScale

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Batch", "Settings", "read", "solve", "wires_of"]


ZERO = "zero_optimization."


def wires_of(get: Callable[[str], Any], stage: int, notes: list[Note]) -> dict[str, str]:
    """By transfer of the table (``gather``, ``reduce``) its format; those that stay as they are, are left out."""
    weights, gradients = (get(f"{ZERO}zero_quantized_{what}") for what in ("weights", "gradients"))
    loco = get(ZERO + "zeropp_loco_param")
    asked = {"zero_quantized_weights": weights, "zero_quantized_gradients": gradients, "zeropp_loco_param": loco}
    if stage != 3:
        notes += [
            Note(ZERO + name, value, f"it is for stage 3, and the stage is {stage}")
            for name, value in asked.items()
            if value
        ]
        return {}
    if loco and not gradients:
        notes.append(Note(ZERO + "zeropp_loco_param", loco, "it is for zero_quantized_gradients, which is not set"))
    elif loco:
        notes.append(
            Note(
                ZERO + "zeropp_loco_param",
                loco,
                "all that a reduction loses is added to the next one: nothing of it "
                "is averaged away (err_beta) or forgotten from time to time (reset_T)",
            )
        )
    found = {"gather": "int8x2"} if weights else {}
    return found | ({"reduce": "int4x2+error" if loco else "int4x2"} if gradients else {})


GIVEN, DERIVED, DEFAULT = "given", "derived", "default"


class Batch(NamedTuple):
    """The three numbers, and where each came from."""

    train: int
    micro: int
    accumulate: int
    origins: tuple[str, str, str]


def solve(train: int | None, micro: int | None, accumulate: int | None, ranks: int, ranks_from: str) -> Batch:
    """The third of any two; of one, with one backward per step.

    Raises:
        DeepSpeedConfigError: they do not multiply up, or neither batch size is given; every number is in the message,
            and where it came from.
    """
    if train is None and micro is None:
        raise DeepSpeedConfigError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
            + (f", only gradient_accumulation_steps = {accumulate}" if accumulate else "")
            + ": give one of them."
        )
    by_default = accumulate is None and (train is None or micro is None)
    origins = (
        DERIVED if train is None else GIVEN,
        DERIVED if micro is None else GIVEN,
        DEFAULT if by_default else DERIVED if accumulate is None else GIVEN,
    )
    if by_default:
        accumulate = 1
    if accumulate is None:
        assert train is not None and micro is not None
        accumulate = train // (micro * ranks)
    elif micro is None:
        assert train is not None
        micro = train // (accumulate * ranks)
    elif train is None:
        train = micro * accumulate * ranks
    assert train is not None and micro is not None
    batch = Batch(train, micro, accumulate, origins)
    if not batch.micro or not batch.accumulate or batch.train != batch.micro * batch.accumulate * ranks:
        raise DeepSpeedConfigError(_mismatch(batch, ranks, ranks_from))
    return batch


def _mismatch(batch: Batch, ranks: int, ranks_from: str) -> str:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    parts = [
        f"{name} = {'?' if origin == DERIVED else number} ({'to be derived' if origin == DERIVED else origin})"
        for name, number, origin in zip(names, batch[:3], batch.origins, strict=True)
    ]
    return (
        f"the batch sizes do not multiply up: {parts[0]} must be {parts[1]} x {parts[2]} x {ranks} ranks "
        f"({ranks_from}){_product(batch, ranks)}."
    )


def _product(batch: Batch, ranks: int) -> str:
    if DERIVED not in batch.origins:
        return f", which is {batch.micro * batch.accumulate * ranks}"
    others = batch.accumulate if batch.origins[1] == DERIVED else batch.micro
    return f", and {batch.train} is not a multiple of {others} x {ranks} = {others * ranks}"


ELASTIC = "elasticity."
COMPOSITE = (
    "1 2 4 6 12 24 36 48 60 120 180 240 360 720 840 1260 1680 2520 5040 7560 10080 15120 20160 25200 27720 45360 50400 "
    "55440 83160 110880 166320 221760 277200 332640 498960 554400 665280 720720"
)
HIGHLY_COMPOSITE = tuple(map(int, COMPOSITE.split()))
"""Numbers with more divisors than any below them, as far as DeepSpeed takes them."""


def _admissible(batch: int, micros: Sequence[int], low: int, high: int) -> list[int]:
    """Numbers of ranks, from ``low`` to ``high``, that make up the batch of one of these micro-batches."""
    found: set[int] = set()
    for shares in {batch // micro for micro in micros if batch % micro == 0}:
        small = [n for n in range(1, isqrt(shares) + 1) if shares % n == 0]
        found.update(n for one in small for n in (one, shares // one) if low <= n <= high)
    return sorted(found)


def _most_admissible(most: int, micros: Sequence[int], low: int, high: int, larger: bool) -> tuple[int, list[int]]:
    """The batch of at most ``most`` samples that most numbers of ranks can train with, and these numbers."""
    bases = {*micros, lcm(*micros)}
    batches = {
        base * HIGHLY_COMPOSITE[bisect(HIGHLY_COMPOSITE, most // base) - 1] if base < most else base for base in bases
    }
    counts = {batch: _admissible(batch, micros, low, high) for batch in batches}
    best = max(batches, key=lambda batch: (len(counts[batch]), batch if larger else -batch))
    return best, counts[best]


def _elastic(get: Callable[[str], Any], given: Mapping[str, Any], ranks: int, notes: list[Note]) -> Batch:
    """The triad that the section ``elasticity`` chooses for this number of ranks.

    Raises:
        DeepSpeedConfigError: the section lacks a size, there are sizes beside it, or it has none for these ranks.
    """
    most, micros, low, high = (
        get(ELASTIC + n) for n in ("max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus")
    )
    larger, version, per_node = (get(ELASTIC + n) for n in ("prefer_larger_batch", "version", "num_gpus_per_node"))
    beside = [name for name in TRIAD if name in given]
    _check_elastic(most, micros, low, high, version, per_node)
    if beside and not get(ELASTIC + "ignore_non_elastic_batch_info"):
        raise DeepSpeedConfigError(
            f"elasticity is enabled, which chooses the batch sizes, and {', '.join(beside)} is given: leave out one or "
            "the other, or set elasticity.ignore_non_elastic_batch_info."
        )
    notes += [Note(name, given[name], "elasticity chooses the batch sizes") for name in beside]
    if version == 0.1:
        per_node = 1
    # Of nodes: fewer than one is none, which is no limit.
    high = high // per_node or most // per_node // min(micros)
    train, counts = _most_admissible(most // per_node, micros, low // per_node or 1, high, larger)
    train, counts = train * per_node, [n * per_node for n in counts]
    if version == 0.2 and ranks not in counts:  # what these ranks alone can have
        fitting = [most // (micro * ranks) * micro * ranks for micro in micros]
        train, counts = max(fitting) if larger else min(fitting), [ranks]
    if ranks not in counts or not train:
        why = (
            f"its {train} samples are for {_listed(counts)} ranks" if train else f"{most} samples are too few for them"
        )
        raise DeepSpeedConfigError(
            f"elasticity has no batch for {ranks} ranks: {why}; start another number of ranks, or change "
            "max_train_batch_size, micro_batch_sizes or max_gpus."
        )
    micro = max(micro for micro in micros if train // ranks % micro == 0)
    notes.append(Note(f"{ELASTIC}enabled", True, f"a batch has {train} samples, on {_listed(counts)} ranks alike"))
    return Batch(train, micro, train // (micro * ranks), (DERIVED, DERIVED, DERIVED))


def _check_elastic(
    most: int | None, micros: list[int] | None, low: int, high: int, version: float, per_node: int
) -> None:
    """
    Raises:
        DeepSpeedConfigError: a value of the section is missing, or cannot be.
    """
    if most is None or not micros:
        missing = "max_train_batch_size" if most is None else "micro_batch_sizes"
        raise DeepSpeedConfigError(f"elasticity is enabled, and elasticity.{missing} is not given: give it.")
    if version not in (0.1, 0.2):
        raise DeepSpeedConfigError(f"elasticity.version is {version}: the versions are 0.1 and 0.2.")
    share = most // per_node if version == 0.2 else most
    if not all(1 <= micro <= share for micro in micros):
        raise DeepSpeedConfigError(
            f"elasticity.micro_batch_sizes is {micros}: each is 1 at least, and {share} at most, the samples of "
            f"max_train_batch_size{' for one rank of each node' * (share != most)}."
        )
    if low > high:
        raise DeepSpeedConfigError(
            f"elasticity.min_gpus is {low}, and max_gpus {high}: give limits the other way round."
        )


def _listed(counts: Sequence[int]) -> str:
    """``"1, 2 or 4"``; of many, the first ones and the last."""
    if len(counts) < 2:
        return str(*counts) or "no"
    shown = [*counts[:8], "...", counts[-1]] if len(counts) > 10 else counts
    return f"{', '.join(map(str, shown[:-1]))} or {shown[-1]}"


PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
TRIAD = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A config, read.

    Attributes:
        raw: the dict given, the very object; of a file, what it holds.
        values: every key by its path, with its effective value.
        origins: of each of these: ``"given"``, ``"derived"`` or ``"default"``.
        notes: what to say once at start.
        world_size: number of ranks that the triad was solved for: all but that those which share sequences count as
            one. Those of tensor count each, as they do in DeepSpeed; those that have one copy of a model in stages
            count as one.
        sizes: ranks along each axis.
        stage: 0 to 3.
        train_batch_size, micro_batch, accumulate: the triad; with ``early``, as given, and 1 for ``accumulate``.
        clip_norm: None does not clip.
        precision, mesh, overlap: as :class:`shardfold.Engine` takes them.
        layout: the name of the stage's table; :attr:`table` is that with ``offload``.
        offload: tiers by state, of those that do not rest on the device.
        offload_folders: of the states in files.
        scaling: of the loss, or None.
        optimizer, scheduler: type and arguments, or None.
        activations: as :class:`shardfold.Engine` takes it.
        base: what weights rest as that are not trained; None: as they are.
    """

    raw: dict[str, Any]
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    notes: tuple[Note, ...]
    world_size: int
    sizes: Sizes
    stage: int
    train_batch_size: int | None
    micro_batch: int | None
    accumulate: int
    clip_norm: float | None
    precision: Precision
    layout: str
    offload: Mapping[str, str] = field(default_factory=dict)
    offload_folders: Mapping[str, str | None] = field(default_factory=dict)
    mesh: dict[str, int] | None = None
    overlap: Overlap = field(default_factory=Overlap)
    scaling: Scaling | None = None
    optimizer: tuple[str, dict[str, Any]] | None = None
    scheduler: tuple[str, dict[str, Any]] | None = None
    activations: str = "keep"
    wires: Mapping[str, str] = field(default_factory=dict)
    base: Quantized | None = None

    def __getitem__(self, path: str) -> Any:
        """The effective value of a key, e.g. ``settings["tensorboard.output_path"]``."""
        return self.values[path]

    @property
    def table(self) -> str | Layout:
        """The layout, as :class:`shardfold.Engine` takes it."""
        table = table_of(self.layout, self.offload, self.offload_folders)
        if self.optimizer is not None and self.optimizer[0] in SIGNED:
            table = named(table).with_outer(Signs(axis="inter"))
        if self.wires:
            table = named(table).replace(**self.wires)
        if self.base is not None:
            table = named(table).replace(base=self.base)
        small = self["zero_optimization.stage3_param_persistence_threshold"] if self.stage == 3 else 0
        return named(table).edit("params", small=small) if small else table

    @property
    def loss_scale(self) -> LossScale | None:
        """As :class:`shardfold.Engine` takes it."""
        return self.scaling.rule() if self.scaling is not None else None

    @property
    def steps_per_print(self) -> float | None:
        return self["steps_per_print"]

    @property
    def wall_clock_breakdown(self) -> bool:
        return self["wall_clock_breakdown"]

    @property
    def memory_breakdown(self) -> bool:
        return self["memory_breakdown"]

    @property
    def dump_state(self) -> bool:
        return self["dump_state"]

    @property
    def drop_last(self) -> bool:
        return self["dataloader_drop_last"]

    @property
    def tag_validation(self) -> str:
        """``"ignore"``, ``"warn"`` or ``"fail"``."""
        return self["checkpoint.tag_validation"].lower()

    @property
    def gather_16bit_on_save(self) -> bool:
        return self["zero_optimization.stage3_gather_16bit_weights_on_model_save"]


def read(
    config: Any,
    *,
    world_size: int | None = None,
    early: bool = False,
    data_ranks: int | None = None,
    told: Mapping[str, Sequence[Said]] | None = None,
    optimizer_given: bool = False,
) -> Settings:
    """Reads a config.

    Args:
        config: a dict, the path of a JSON file, or a file's content in urlsafe base64.
        world_size: number of ranks; None: of ``torch.distributed`` if it runs, else of the environment, else 1.
        early: before clients have filled in their ``"auto"`` values: these count as absent, and the batch triad is not
            solved.
        data_ranks: that the triad is solved for; None: as ``world_size`` and the config say.
        told: ranks of ``"tensor"``, ``"sequence"`` and ``"pipeline"``, as far as they were said beside the config, and
            of ``"autotp"``: those of tensor of a model that is cut by itself.
        optimizer_given: one is, beside the config: the config's own is not used.

    Raises:
        DeepSpeedConfigError: it cannot be honoured; one sentence says what, where and how to mend it.
    """
    raw, where = load(config)
    ranks, ranks_from = (world_size, "as given") if world_size is not None else _ranks()
    checked = check(raw, where)
    if checked.autos and not early:
        raise DeepSpeedConfigError(
            f"{where} still has 'auto' for {', '.join(checked.autos)}: only the client that fills these in knows them; "
            "give values."
        )
    given, notes = checked.given, checked.notes
    older_words(given)
    get = partial(_value, given)
    stage = _stage(get("zero_optimization.stage"))
    if not early:
        _check_stage(get, given, stage)
    train, micro, accumulate = (given.get(name) for name in TRIAD)
    told = told or {}
    sizes = Sizes(1, 1, ranks) if early else sizes_of(get, given, ranks, told)
    if told.get("autotp"):
        given[AUTOTP] = sizes.tensor
    if data_ranks is not None:
        readers, ranks_from = data_ranks, "as given"
    else:
        readers = ranks // sizes.sequence
        ranks_from += f", of which {sizes.sequence} share sequences" * (sizes.sequence > 1)
        if told.get("pipeline"):  # in a pipeline DeepSpeed counts each copy of the model once
            readers, ranks_from = sizes.data, f"copies of the model on {ranks} ranks"
    batch = None if early else _batch_of(get, given, readers, ranks_from, notes)
    optimizer = hyper("optimizer", get("optimizer.type"), get("optimizer.params"))
    if optimizer_given and optimizer is not None:
        why = "it is not used: initialize(optimizer=...) was given one, which is; leave one of them out"
        notes.append(Note("optimizer.type", optimizer[0], why))
        optimizer = None
    _say_defaults(checked, early, optimizer)
    layout, mesh = layout_of(get, stage, ranks // (sizes.tensor * sizes.pipeline), notes, early)
    if optimizer is not None and optimizer[0] in SIGNED and not stage and mesh is None and not early:
        mesh = {"intra": 1}  # all ranks send signs, as there; with stages, those of different nodes do
    offload, folders = offload_of(get, stage, notes, early)
    wires = wires_of(get, stage, notes)
    if sizes.sequence > 1 and "seq_parallel_communication_data_type" in given:
        given["communication_data_type"] = given["seq_parallel_communication_data_type"]
    precision = precision_of(get, given, stage, notes)
    base = _base_of(get, notes, trained=optimizer is not None or optimizer_given)
    values, origins = _effective(checked, batch, precision)
    return Settings(
        raw=raw, values=values, origins=origins, world_size=readers, sizes=sizes, stage=stage,
        train_batch_size=batch.train if batch else train, micro_batch=batch.micro if batch else micro,
        accumulate=batch.accumulate if batch else accumulate or 1,
        clip_norm=float(get("gradient_clipping")) or None,
        precision=precision, layout=layout, mesh=mesh_of(sizes, mesh),
        offload=offload, offload_folders=folders, overlap=overlap_of(get), scaling=loss_scale_of(get),
        optimizer=optimizer,
        scheduler=hyper("scheduler", get("scheduler.type"), get("scheduler.params")),
        wires=wires, base=base, notes=tuple(notes),
    )  # fmt: skip


def _batch_of(
    get: Callable[[str], Any], given: Mapping[str, Any], ranks: int, ranks_from: str, notes: list[Note]
) -> Batch:
    """
    Raises:
        DeepSpeedConfigError: there is no batch for these ranks.
    """
    if get(f"{ELASTIC}enabled"):
        return _elastic(get, given, ranks, notes)
    train, micro, accumulate = (given.get(name) for name in TRIAD)
    return solve(train, micro, accumulate, ranks, ranks_from)


def _value(given: Mapping[str, Any], path: str) -> Any:
    return given.get(path, KEYS[path].default)


def _base_of(get: Callable[[str], Any], notes: list[Note], trained: bool) -> Quantized | None:
    """
    Raises:
        DeepSpeedConfigError: the model is ``trained``.
    """
    base = base_of(get("weight_quantization") or {}, "weight_quantization", notes)
    if base is not None and trained:
        raise DeepSpeedConfigError(
            "weight_quantization is for a model that is not trained, and there is an optimizer: leave one of them out."
        )
    return base


def _ranks() -> tuple[int, str]:
    """Number of ranks, and where it is from. ``torch.distributed`` runs only where torch was imported."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), "from torch.distributed"
    text = os.environ.get("WORLD_SIZE")
    if text is not None and text.isdecimal() and int(text):
        return int(text), "from WORLD_SIZE"
    return 1, "one process"


def _stage(stage: int) -> int:
    if stage not in (0, 1, 2, 3):
        raise DeepSpeedConfigError(f"zero_optimization.stage is {stage}: the stages are 0, 1, 2 and 3.")
    return stage


def _check_stage(get: Any, given: Mapping[str, Any], stage: int) -> None:
    """
    Raises:
        DeepSpeedConfigError: a key is not for this stage.
    """
    if get("gradient_allreduce_op") == "sum" and stage == 3:
        raise DeepSpeedConfigError(
            "gradient_allreduce_op is 'sum', which is not supported with ZeRO stage 3: 'mean' is."
        )
    if not get("zero_optimization.compute_grad_norm") and stage not in (1, 2):
        raise DeepSpeedConfigError(
            "zero_optimization.compute_grad_norm is false, which is supported only with ZeRO stage 1 or 2, and the "
            f"stage is {stage}: leave it out."
        )
    if not get("managed_gradient_accumulation") and given.get("zero_optimization.overlap_comm") and stage < 2:
        raise DeepSpeedConfigError(
            "managed_gradient_accumulation is false and zero_optimization.overlap_comm is true, which is supported "
            f"only from ZeRO stage 2 on, and the stage is {stage}: set overlap_comm to false."
        )
    if get("zero_optimization.offload_optimizer.ratio") < 1 and stage != 3:
        raise DeepSpeedConfigError(
            "zero_optimization.offload_optimizer.ratio is less than 1: partial offloading is only supported for ZeRO "
            f"stage 3, and the stage is {stage}; leave it out."
        )


def _say_defaults(checked: Checked, early: bool, optimizer: tuple[str, dict[str, Any]] | None) -> None:
    """What people are surprised by."""
    given, notes = checked.given, checked.notes
    for name, value, why in idle(*optimizer) if optimizer is not None else ():
        notes.append(Note(f"optimizer.params.{name}", value, why))
    if given.get(PREFETCH):
        notes.append(Note(PREFETCH, given[PREFETCH], "one unit is gathered ahead of its use, of whatever size"))
    if "gradient_clipping" not in given and not early:
        notes.append(
            Note("gradient_clipping", 1.0, "it is absent, so DeepSpeed's default holds and gradients are clipped to a "
                 "norm of 1.0; 0 does not clip")
        )  # fmt: skip
    if optimizer is not None and optimizer[0] == "Lamb":
        notes.append(
            Note("optimizer.type", "Lamb", "the trust ratio is of the update with its bias correction, as in arXiv "
                 "1904.00962; DeepSpeed's is of the update without")
        )  # fmt: skip
    warms_up = str(given.get("scheduler.type", "")).lower().startswith("warmup")
    if warms_up and "warmup_type" not in given.get("scheduler.params", {}):
        notes.append(
            Note("scheduler.params.warmup_type", "log", "it is absent, so DeepSpeed's default holds: the rate rises "
                 "with the logarithm of the step, and is warmup_min_lr in the first two; 'linear' is the other")
        )  # fmt: skip


def _effective(checked: Checked, batch: Batch | None, precision: Precision) -> tuple[dict[str, Any], dict[str, str]]:
    given = checked.given
    values = {path: given.get(path, key.default) for path, key in KEYS.items()}
    origins = {path: "given" if path in given else "default" for path in values}
    if batch is not None:
        values.update(zip(TRIAD, batch[:3], strict=True))
        origins.update(zip(TRIAD, batch.origins, strict=True))
    if values["flops_profiler.enabled"] and "wall_clock_breakdown" not in given:
        values["wall_clock_breakdown"], origins["wall_clock_breakdown"] = True, "derived"
    if values["zero_optimization.overlap_comm"] is None:
        values["zero_optimization.overlap_comm"] = values["zero_optimization.stage"] == 3
    derived = {"data_types.grad_accum_dtype": precision.grads, "communication_data_type": precision.reduce}
    for path, value in derived.items():
        if path not in given:
            values[path] = value
    return values, origins
