"""``shardfold.plan.best``: the fastest way to train a model on some devices, by a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardfold.plan.arguments import known_arguments
from shardfold.plan.layout import Precision
from shardfold.plan.sizes import parse_bytes
from shardfold.planner.hardware import cluster
from shardfold.planner.search import LAYOUTS, MODES, Found, search
from shardfold.planner.setting import Subject
from shardfold.planner.tracing import Compute, loss_of

__all__ = ["best"]


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
    layouts: Sequence[str] = LAYOUTS,
    modes: Sequence[str] = MODES,
) -> Found:
    """The fastest way to train a model that fits; nothing is run.

    Args:
        model: with or without memory.
        batch: a micro-batch of two samples or more, with or without memory.
        gpus: how many of which device, as ``"8xA100-40G"`` or, nodes first, ``"4x8xH100"``.
        memory: of each device, in place of its own, as ``"20GiB"``.
        host: memory of the host for each rank; None: enough.
        precision: policy.
        samples: of a step of all ranks; None: one micro-batch of each.
        compute: ``compute(model, batch)`` gives the loss.
        layouts: names of those to look at.
        modes: of activations to look at.

    Returns:
        What was found: ``Engine(model, **found.candidate.engine)`` trains so.

    Raises:
        ConfigError: nothing fits; the message says why. Or an argument names nothing.
    """
    room = float(parse_bytes(host) or 0) if host is not None else float("inf")
    subject = Subject(model, batch, compute)
    found = search(
        subject, cluster(gpus, memory=memory), precision=precision, layouts=layouts, modes=modes, batch=samples,
        host=room,
    )  # fmt: skip
    return found.best
