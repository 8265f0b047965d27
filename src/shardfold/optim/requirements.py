"""What an engine requires of an optimizer: that its update can be done on shards, where states rest and as is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.optim.fused import fused_moments, why_not_fused
from shardfold.optim.parts import PartOptimizer
from shardfold.plan.layout import Layout, Tier
from shardfold.plan.rewrites import Overlap
from shardfold.sharding.unit import Unit
from shardfold.torch_internals import spare_compiler

__all__ = [
    "build",
    "check_compiled",
    "check_copies",
    "check_delayed",
    "check_rounding",
    "check_speculation",
    "check_tier",
]

#: Not element-wise: their update of one element reads others, which may lie on another rank. Some have one of ours.
NOT_ELEMENTWISE = ("LBFGS", "Muon", "Adafactor", "SparseAdam")
OURS = ("Muon", "Adafactor")


def build(optimizer: Any, model: nn.Module, *, empty: bool = False) -> Optimizer:
    """The optimizer object itself, or what a class, a ``partial`` or a function makes of the parameters;
    ``empty``: there may be none that is trained, as on a rank whose stage of the model is frozen.

    Raises:
        ConfigError: it is no optimizer, has stepped already, or its update is not element-wise; or nothing trains.
    """
    spare_compiler()
    parameters = list(model.parameters())
    if not isinstance(optimizer, Optimizer):
        makes = issubclass(optimizer, Optimizer) if isinstance(optimizer, type) else callable(optimizer)
        if not makes:
            raise ConfigError(
                f"optimizer={optimizer!r} is neither a torch.optim.Optimizer nor something that makes one of "
                "parameters: pass e.g. partial(torch.optim.AdamW, lr=3e-4)."
            )
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        try:
            optimizer = optimizer(trainable or ([{"params": []}] if empty else []))
        except ValueError as error:
            if trainable:
                raise
            why = "all its parameters are frozen (requires_grad=False)" if parameters else "it has no parameters"
            raise ConfigError(
                f"optimizer= has nothing to train in this model: {why}; leave optimizer= out, or unfreeze before the "
                "engine is made what is to be trained."
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer= made a {type(optimizer).__name__}, which is not a torch.optim.Optimizer.")
    elif any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad's is made at once, at step 0
        raise ConfigError(
            f"the {type(optimizer).__name__} given as optimizer= has already stepped: "
            "its state belongs to whole parameters; build the engine before the first step."
        )
    known = {id(parameter) for parameter in parameters}
    foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"the {type(optimizer).__name__} given as optimizer= holds {foreign} tensors that are no parameters of the "
            "model: make it of the model's parameters, and update others with an optimizer of their own."
        )
    name = type(optimizer).__name__
    if name in NOT_ELEMENTWISE and not isinstance(optimizer, PartOptimizer):
        instead = "AdamW, Adam, SGD, Adagrad, RMSprop or another element-wise class"
        raise ConfigError(
            f"torch's {name} is not element-wise: its update of a shard would need the other shards; "
            f"use {f'shardfold.optim.{name}, which asks them' if name in OURS else instead}."
        )
    if not isinstance(optimizer, PartOptimizer) and any("update_proj_gap" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"a group of {name} has update_proj_gap, as of an optimizer that projects whole matrices: its update of a "
            "shard would need the other shards; use sf.optim.GaLore, which takes the groups of galore-torch."
        )
    return optimizer


def check_rounding(optimizer: Optimizer) -> None:
    """Whether a bf16 master that this optimizer updates can be rounded stochastically.

    Raises:
        ConfigError: its update is its own.
    """
    if why := why_not_fused(optimizer):
        raise ConfigError(f"rounding='stochastic' works for AdamW, Adam and SGD, but {why}, or set rounding='nearest'.")


def check_tier(optimizer: Optimizer, layout: Layout, device: torch.device) -> None:
    """Whether this optimizer's state can rest in the tier that a table says.

    Raises:
        ConfigError: it keeps its state itself; the message says why, and what would mend it.
    """
    tier = layout.moments.tier
    if tier is Tier.DEVICE or not (why := why_not_fused(optimizer)):
        return
    if layout.updates_on is not tier:  # what a class keeps is where its parameters are
        raise ConfigError(
            f"moments rest in the {tier} tier, which works for AdamW, Adam and SGD, but {why}, or choose the "
            f"{layout.updates_on if layout.master.tier is not Tier.DISK else Tier.HOST} tier."
        )
    if filed := [name for name in ("grads", "master") if layout.cells()[name].tier is Tier.DISK]:
        raise ConfigError(  # a class steps once, over all that it updates
            f"{' and '.join(filed)} rest in the disk tier, from which they come unit by unit: that works for AdamW, "
            f"Adam and SGD, but {why}, or choose the host tier."
        )
    if isinstance(optimizer, PartOptimizer) and accelerator.has_streams(device):
        raise ConfigError(
            f"{type(optimizer).__name__} asks other ranks for parts of its state, which cannot travel from the {tier} "
            "tier: let master and moments rest on the device, or take AdamW, Adam or SGD."
        )


def check_compiled(optimizer: Optimizer, stochastic: int | None) -> None:
    """Whether the compiled pass can stand in for this optimizer's update.

    Raises:
        ConfigError: it cannot.
    """
    if fused_moments(optimizer) != ("exp_avg", "exp_avg_sq") or stochastic is not None:
        what = "rounding='stochastic'" if stochastic is not None else type(optimizer).__name__
        raise ConfigError(
            f"Overlap(compiled_update=True) works for AdamW and Adam without amsgrad, rounded to the nearest, and not "
            f"for {what}: leave compiled_update out."
        )


def check_speculation(optimizer: Optimizer, layout: Layout, *, clamps: bool) -> None:
    """Whether units can be updated before their step.

    Raises:
        ConfigError: not with this optimizer, or where states rest; the message says why, and what would mend it.
    """
    call = "Overlap(speculate=...) updates units in host memory as their gradients come there"
    for name in ("grads", "master", "moments"):
        if (tier := layout.cells()[name].tier) is not Tier.HOST:
            raise ConfigError(f"{call}, but {name} rest in the {tier} tier: give offload='host'.")
    _check_on_host(call, "speculate", optimizer, layout)
    if clamps:
        raise ConfigError(f"{call}, before Clip(value=...) cuts them: clip their norm, or leave speculate out.")


def check_copies(optimizer: Optimizer, overlap: Overlap) -> None:
    """Whether ranks can keep copies of each other's states.

    Raises:
        ConfigError: not with this optimizer, or as updates are overlapped; the message says what would mend it.
    """
    call = "copies of states are updated as the states are"
    if why := why_not_fused(optimizer):
        raise ConfigError(f"{call}, element by element (AdamW, Adam, SGD), but {why}, or leave copies out.")
    given = ("update_thread", "delayed_update", "compiled_update", "speculate")
    if name := next((name for name in given if getattr(overlap, name)), ""):
        raise ConfigError(f"{call}, in one step, on one thread and by one kernel: leave Overlap({name}=...) out.")


def check_delayed(optimizer: Optimizer, layout: Layout, units: Sequence[Unit]) -> None:
    """Whether updates can go on behind their step.

    Raises:
        ConfigError: not with this optimizer, or where states rest; the message says why, and what would mend it.
    """
    call = "Overlap(delayed_update=True) updates in host memory while the next step computes"
    for name in ("grads", "master", "moments"):
        tier = layout.cells()[name].tier
        if name == "grads" and tier is Tier.DISK:
            raise ConfigError(
                f"{call}, but grads rest in the disk tier, where the next backward would need the room of those that "
                "an update still reads: let them rest in host memory, as in offload={'optimizer': 'disk', 'grads': "
                "'host'}."
            )
        if tier is Tier.DEVICE:
            raise ConfigError(
                f"{call}, but {name} rest in the device tier: give offload='host', or offload={{'optimizer': 'disk', "
                "'grads': 'host'}."
            )
    _check_on_host(call, "delayed_update", optimizer, layout)
    for unit in units:
        for segment in unit.trainable:
            if segment.table.params is None or segment.master_is_rest:
                raise ConfigError(
                    f"{call}, which reads params meanwhile: they need a copy apart from master, as zero2 and zero3 "
                    "have on the device; choose one of these, or leave delayed_update out."
                )


def _check_on_host(call: str, option: str, optimizer: Optimizer, layout: Layout) -> None:
    """
    Raises:
        ConfigError: what the update reads and writes is not in host memory for all units, or it is not the fused one.
    """
    if layout.share != 1.0:
        raise ConfigError(
            f"{call}, but with share={layout.share:g} some units' states stay on the device: let all of them rest in "
            f"host memory, as offload='host' does, or leave {option} out."
        )
    if layout.params is not None and layout.params.tier is Tier.DISK:
        raise ConfigError(f"{call}, but params rest in the disk tier: let them rest on the device or in host memory.")
    if why := why_not_fused(optimizer):
        raise ConfigError(f"{call}, which works for AdamW, Adam and SGD, but {why}, or leave {option} out.")
