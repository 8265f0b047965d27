"""Precision, loss scale, layout and overlap: what the sections of a config become as values of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.plan.layout import ITEMSIZE, Precision
from shardfold.plan.rewrites import Overlap

if TYPE_CHECKING:
    from shardfold.numerics.scaling import LossScale

__all__ = ["Scaling", "layout_of", "loss_scale_of", "overlap_of", "precision_of"]

NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
LAYOUTS = ("ddp", "zero1", "zero2", "zero3")

Get = Callable[[str], Any]


class Scaling(NamedTuple):
    """A loss scale as plain numbers, since reading a config must not import torch."""

    dynamic: bool
    initial: float
    interval: int = 1000
    hysteresis: int = 1
    refill: bool = False
    floor: float = 1.0

    def rule(self) -> LossScale:
        """As the engine takes it. A dynamic scale counts as DeepSpeed does: the step after the start or after an
        overflow is not among the ``interval``, and an overflow at the floor ends the run."""
        from shardfold.numerics.scaling import LossScale

        if not self.dynamic:
            return LossScale.static(self.initial)
        return LossScale(
            initial=self.initial,
            interval=self.interval,
            hysteresis=self.hysteresis,
            refill=self.refill,
            delay=1,
            floor=self.floor,
            patience=1,
        )


def precision_of(get: Get, given: Mapping[str, Any], stage: int, notes: list[Note]) -> Precision:
    """The dtypes of every state.

    Raises:
        DeepSpeedConfigError: modes that exclude each other are on, or ``param_dtype`` is of another mode.
    """
    modes = [name for name in ("fp16", "bf16", "torch_autocast") if get(f"{name}.enabled")]
    if len(modes) > 1:
        raise DeepSpeedConfigError(f"{' and '.join(modes)} are both enabled: enable one of them.")
    compute = modes[0] if modes and modes[0] != "torch_autocast" else "fp32"
    autocast = _dtype(get("torch_autocast.dtype")) if modes == ["torch_autocast"] else None
    if (asked := get("data_types.param_dtype")) is not None and _dtype(asked) != compute:
        raise DeepSpeedConfigError(
            f"data_types.param_dtype is {asked!r} but parameters are in {compute}: enable the section of that dtype, "
            "or leave param_dtype out."
        )
    master = _master(get, stage)
    grads, reduce = _travel(given, stage, notes, narrow=master)
    return Precision(
        compute=compute,
        grads=grads,
        reduce=reduce,
        master=master,
        moments=master,
        autocast=autocast,
        buffers=_buffers(get, compute, notes),
        inputs="compute" if compute == "fp16" and get("fp16.auto_cast") else "own",
        outputs="compute",
    )


def _dtype(name: str) -> str:
    name = name.removeprefix("torch.")
    return NAMES.get(name, name)


def _master(get: Get, stage: int) -> str:
    """The dtype of masters and moments."""
    halves = [f"bf16.{name}" for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")]
    narrow = [name for name in halves if get("bf16.enabled") and get(name)]
    if not narrow:
        return "fp32"
    if len(narrow) == 1:
        other = next(name for name in halves if name not in narrow)
        raise DeepSpeedConfigError(
            f"{narrow[0]} is true and {other} is not: masters and moments are updated in one dtype, so set both, or "
            "neither."
        )
    if stage == 0:
        raise DeepSpeedConfigError(f"{halves[0]} is true at stage 0: it needs zero_optimization.stage 1, 2 or 3.")
    return "bf16"


def _travel(given: Mapping[str, Any], stage: int, notes: list[Note], narrow: str) -> tuple[str, str]:
    """In which dtypes gradients accumulate and travel. Where every rank holds all of them, they travel as they lie."""
    asked = given.get("data_types.grad_accum_dtype")
    grads = _dtype(asked) if asked else narrow
    wired = "fp32" if given.get("fp32_allreduce") else given.get("communication_data_type")
    if stage >= 2:
        return grads, wired or ("fp32" if narrow == "fp32" else grads)
    if wired is None or wired == grads:
        return grads, grads
    if asked is None:
        return wired, wired
    wide = max(grads, wired, key=lambda name: (ITEMSIZE[name], name == "fp32"))
    key = "communication_data_type" if wide == grads else "data_types.grad_accum_dtype"
    notes.append(
        Note(key, given.get(key), f"at stage {stage} gradients are reduced where they lie, so both are {wide}")
    )
    return wide, wide


def _buffers(get: Get, compute: str, notes: list[Note]) -> str:
    asked = get("data_types.buffer_dtype")
    if asked is None:
        return "own"
    if _dtype(asked) == compute:
        return "compute"
    notes.append(Note("data_types.buffer_dtype", asked, "buffers keep the dtype they have: cast them in the model"))
    return "own"


def loss_scale_of(get: Get) -> Scaling | None:
    """The loss scale of fp16, with DeepSpeed's defaults; of bf16 with ``check_grad_overflow``, one of 1.

    Raises:
        DeepSpeedConfigError: a number is out of its range.
    """
    if get("torch_autocast.enabled") and _dtype(get("torch_autocast.dtype")) == "fp16":
        return Scaling(dynamic=True, initial=2.0**16, interval=2000, floor=1.0)
    if get("bf16.enabled") and get("bf16.check_grad_overflow"):
        return Scaling(dynamic=False, initial=1.0)
    if not get("fp16.enabled"):
        return None
    if get("fp16.loss_scale"):
        return Scaling(dynamic=False, initial=float(get("fp16.loss_scale")))
    for name in ("loss_scale_window", "min_loss_scale"):
        if get(f"fp16.{name}") <= 0:
            raise DeepSpeedConfigError(
                f"fp16.{name} is {get(f'fp16.{name}')!r}: with a dynamic loss scale it must be > 0."
            )
    initial, floor = 2.0 ** get("fp16.initial_scale_power"), float(get("fp16.min_loss_scale"))
    if floor > initial:
        raise DeepSpeedConfigError(
            f"fp16.min_loss_scale is {floor:g}, more than the first scale 2 ** fp16.initial_scale_power = {initial:g}."
        )
    return Scaling(
        dynamic=True,
        initial=initial,
        interval=get("fp16.loss_scale_window"),
        hysteresis=get("fp16.hysteresis"),
        refill=get("fp16.consecutive_hysteresis"),
        floor=floor,
    )


def layout_of(get: Get, stage: int, ranks: int, notes: list[Note], early: bool) -> tuple[str, dict[str, int] | None]:
    """The preset, and the mesh where it needs one.

    Raises:
        DeepSpeedConfigError: a group size does not divide the ranks.
    """
    groups = {
        "zero_hpz_partition_size": ("hpz", get("zero_optimization.zero_hpz_partition_size")),
        "mics_shard_size": ("hsdp", get("zero_optimization.mics_shard_size")),
    }
    asked = {name: (layout, size) for name, (layout, size) in groups.items() if size > (1 if layout == "hpz" else 0)}
    if len(asked) > 1:
        raise DeepSpeedConfigError(f"zero_optimization has both {' and '.join(asked)}: choose one of them.")
    for name, (layout, size) in asked.items():
        if stage != 3:
            notes.append(Note(f"zero_optimization.{name}", size, f"it is for stage 3, and the stage is {stage}"))
        elif ranks % size and not early:
            raise DeepSpeedConfigError(
                f"zero_optimization.{name} is {size}, which does not divide the {ranks} ranks: choose a divisor."
            )
        else:
            return layout, {"intra": size}
    return LAYOUTS[stage], None


def overlap_of(get: Get) -> Overlap:
    """How far ahead things are done."""
    return Overlap(
        prefetch=1 if get("zero_optimization.stage3_prefetch_bucket_size") else 0,
        reduces_in_flight=0 if get("zero_optimization.overlap_comm") is False else None,
    )
