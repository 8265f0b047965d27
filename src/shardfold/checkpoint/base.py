"""Frozen parameters that a checkpoint leaves out (``frozen="skip"``): a checksum of each stands for its values.

A fine-tuned adapter is some millionths of its base, which does not change. Whoever loads such a checkpoint has the base
already; the checksums tell whether it is the same one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from shardfold.checkpoint.files import DTYPES
from shardfold.checkpoint.index import Parameter, checksum
from shardfold.errors import ConfigError, UsageError
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.whole_segments import whole_segments
from shardfold.sharding.whole_state import most_precise

__all__ = ["Base", "other_base"]


class Base:
    """An engine's frozen parameters and their checksums, which are made once."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._known: dict[str, str] = {}
        self._version: list[object] = []

    def left_out(self, frozen: str) -> dict[str, str]:
        """Checksums by the names of the parameters that a save leaves out; every rank calls it.

        Raises:
            ConfigError: ``frozen`` is neither ``"keep"`` nor ``"skip"``.
            UsageError: nothing would be left, as the engine has no optimizer, or a rank has a box only of one of them.
        """
        if frozen == "keep":
            return {}
        model = self._model
        if frozen != "skip":
            raise ConfigError(f"engine.save(frozen={frozen!r}): frozen parameters are kept ('keep') or not ('skip').")
        if model.optimizer is None:
            raise UsageError(
                "engine.save(frozen='skip') of an engine without optimizer would leave out every parameter: "
                "use frozen='keep'."
            )
        units = [unit for unit in model.units if any(not s.spec.trainable for s in unit.segments)]
        frozen_slots = [slot for unit in units for s in unit.segments if not s.spec.trainable for slot in s.spec.slots]
        if boxed := next((slot for slot in frozen_slots if slot.box is not None), None):
            raise UsageError(
                f"engine.save(frozen='skip') keeps a checksum of all of {boxed.name!r}, of which this rank has a box "
                f"of shape {boxed.shape} in {boxed.whole}: use frozen='keep'."
            )
        version = [model.followed, *((unit.name, unit.life, unit.version) for unit in units)]
        if model.comm.control([float(version != self._version)], dist.ReduceOp.MAX)[0]:
            self._known = _digests(
                model,
                {
                    slot.name: most_precise(model, segment)[0].dtype
                    for unit in units
                    for segment in unit.segments
                    if not segment.spec.trainable
                    for slot in segment.spec.slots
                },
            )
            self._version = version
        return self._known


def other_base(model: ShardedModel, left_out: Mapping[str, Parameter]) -> tuple[list[str], list[str]]:
    """Which parameters have other values than those that a checkpoint left out; every rank calls it.

    Args:
        model: whose values are compared.
        left_out: what the checkpoint says of them, by the engine's names.

    Returns:
        Names of those that differ, and of those that cannot be compared, as they are kept in fewer digits here or not
        whole.
    """
    if not left_out:
        return [], []
    slots = {s.name: (s, most_precise(model, g)[0]) for u in model.units for g in u.segments for s in g.spec.slots}
    unclear = [
        name
        for name, theirs in left_out.items()
        for slot, kept in [slots[name]]
        if slot.box is not None or torch.promote_types(kept.dtype, DTYPES[theirs.dtype]) != kept.dtype
    ]
    found = _digests(model, {n: DTYPES[p.dtype] for n, p in left_out.items() if n not in unclear})
    return [name for name, digest in found.items() if digest != left_out[name].digest], unclear


def _digests(model: ShardedModel, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Checksums of parameters' values in these dtypes; 16 MiB, or one segment, are whole at a time."""
    segments = [s for unit in model.units for s in unit.segments if any(p.name in dtypes for p in s.spec.slots)]
    shards = [(segment, kept, over) for segment in segments for kept, _, over in [most_precise(model, segment)]]
    found: dict[str, str] = {}
    for segment, flat in whole_segments(model.comm, shards, "checksums of frozen parameters"):
        for slot in segment.spec.slots:
            if slot.name in dtypes:
                values = flat[slot.offset : slot.offset + slot.numel].detach().to(dtypes[slot.name]).cpu()
                found[slot.name] = checksum(values.view(torch.uint8).numpy())
    return found
