"""``shardfold.plan.best``, the fastest way to train a model on some devices; and ``largest_batch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan import presets
from shardfold.plan.auto_wire import AutoWire
from shardfold.plan.checks import described, is_flag, is_integer, known_arguments
from shardfold.plan.copies import WORDS
from shardfold.plan.layout import Layout, Precision
from shardfold.planner.candidate import FittingCandidate
from shardfold.planner.choice import largest_of
from shardfold.planner.division import Division, division_of
from shardfold.planner.hardware import cluster, host_bytes
from shardfold.planner.ranking import MODES, layouts_for, rank
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.planner.tracing import MODES as FOLLOWED
from shardfold.planner.tracing import Compute, loss_of

__all__ = ["best", "largest_batch"]


@known_arguments
def best(
    model: nn.Module,
    batch: Any,
    *,
    gpus: str,
    memory: str | None = None,
    host: str | None = None,
    precision: str | Precision = "bf16",
    samples: int | None = None,
    compute: Compute = loss_of,
    layouts: Sequence[str] | None = None,
    modes: Sequence[str] = MODES,
    axes: Sequence[Mapping[str, Any]] = ({},),
    wire: str | AutoWire | None = None,
    survive: str | None = None,
    real: bool | None = None,
) -> FittingCandidate:
    """The fastest way to train a model that fits; nothing is run.

    Args:
        model: with or without memory.
        batch: a micro-batch of two samples or more, with or without memory; the first dimension of its tensors is the
            samples.
        gpus: how many of which device, as ``"8xA100-40G"`` or, nodes first, ``"4x8xH100"``.
        memory: of each device, in place of its own, as ``"20GiB"``.
        host: memory of the host for each rank; None: enough.
        precision: policy.
        samples: of a step of all ranks; None: one micro-batch of each.
        compute: ``compute(model, batch)`` gives the loss.
        layouts: names of those to look at; None: all that differ on these devices.
        modes: of activations to look at; ``host`` and ``disk`` where they are named.
        axes: sizes of axes to look at, as ``({}, {"tensor": 2}, {"pipeline": 4, "order": "gpipe"})``: ``tensor`` with
            ``sequence_parallel``, ``sequence``, ``expert``, and ``pipeline`` with ``order``. Through stages go
            ``samples`` of a step; where these are not given, four micro-batches for each stage.
        wire: formats and hops that parameters and gradients may travel in besides the layouts' own, as
            ``Engine(wire=)`` takes it: ``"auto"`` allows none that loses anything, ``"auto:int8"`` that one. None: only
            what the layouts have.
        survive: who holds the optimizer's states of each rank once more, ``"rank"`` or ``"host"``; None: nobody. What
            copies take of memory, links and updates counts.
        real: True: the model runs on zeros with memory, for a forward that asks for values (``.item()``); None: where
            it has to and model and micro-batch are of at most 1 GiB.

    Returns:
        What was found: ``Engine(model, **found.candidate.engine)`` trains so.

    Raises:
        ConfigError: nothing fits; the message says why. Or an argument names nothing.
    """
    where = cluster(gpus, memory=memory)
    layouts = layouts_for(where) if layouts is None else layouts
    _check(samples, layouts, modes, axes, precision)
    _check_real(real)
    if survive is not None and survive not in WORDS:
        raise ConfigError(
            f"survive= is {described(survive)}: it says who holds copies of states, {' or '.join(map(repr, WORDS))}."
            f"{did_you_mean(str(survive), WORDS)}"
        )
    subject, divisions = Subject(model, batch, compute, real=real), [division_of(each) for each in axes]
    what: dict[str, Any] = {"precision": precision, "layouts": layouts, "modes": modes, "wire": AutoWire.named(wire)}
    what["copies"] = survive or ""
    return rank(subject, where, divisions, batch=samples, host=host_bytes(host), **what).best


def _check(samples: Any, layouts: Any, modes: Any, axes: Any, precision: str | Precision) -> None:
    """
    Raises:
        ConfigError: one of these is of a wrong type, or names nothing.
    """
    if samples is not None and not is_integer(samples, 1):
        raise ConfigError(f"samples= is {described(samples)}: it is a number of samples, 1 or more, or None.")
    for name, given, known in (("layouts", layouts, tuple(presets.PRESETS)), ("modes", modes, FOLLOWED)):
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ConfigError(f"{name}= is {described(given)}: it is a list of names, as ({known[0]!r}, {known[1]!r}).")
        for each in given:
            if each not in known:
                meant = did_you_mean(str(each), known)
                raise ConfigError(f"{name}= has {described(each)}, which is none of {', '.join(known)}.{meant}")
    if not isinstance(axes, Sequence) or not axes or not all(isinstance(each, Mapping) for each in axes):
        raise ConfigError(
            f"axes= is {described(axes)}: it is a list of dicts, each with sizes of axes, as ({{}}, {{'tensor': 2}})."
        )
    Precision.named(precision)


def _check_real(real: Any) -> None:
    """
    Raises:
        ConfigError: it is neither True, False nor None.
    """
    if real is not None and not is_flag(real):
        raise ConfigError(f"real= is {described(real)}: it is True, False or None.")


@known_arguments
def largest_batch(
    model: nn.Module,
    batch: Any,
    *,
    gpus: str,
    layout: str | Layout = "zero3",
    activations: str = "keep",
    memory: str | None = None,
    precision: str | Precision = "bf16",
    accumulate: int = 1,
    compute: Compute = loss_of,
    real: bool | None = None,
) -> int:
    """The most samples of a micro-batch with which no point of a step has more bytes than a device; nothing is run.

    Args:
        model: with or without memory.
        batch: a micro-batch of two samples or more, with or without memory; the first dimension of its tensors is the
            samples.
        gpus: how many of which device, as of :func:`best`.
        layout: a preset's name or a table.
        activations: the mode of all units.
        memory: of each device, in place of its own, as ``"20GiB"``.
        precision: policy.
        accumulate: micro-batches of a step.
        compute: ``compute(model, batch)`` gives the loss.
        real: as of :func:`best`.

    Returns:
        The number of samples; 0: not even one fits.

    Raises:
        ConfigError: an argument names nothing.
    """
    if not is_integer(accumulate, 1):
        raise ConfigError(f"accumulate= is {described(accumulate)}: it is a number of micro-batches, 1 or more.")
    _check_real(real)
    where = cluster(gpus, memory=memory)
    subject = Subject(model, batch, compute, real=real, division=Division(streams=where.device.streams))
    planned = PlannedRank.on(where, precision=precision, micro_batches=accumulate)
    return largest_of([subject], planned, layout, activations).largest
