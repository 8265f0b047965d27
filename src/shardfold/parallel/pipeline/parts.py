"""Which units of a rank each of its stages has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.stages import Stages
from shardfold.plan.walk import Part

__all__ = ["parts_of"]


def parts_of(
    stages: Stages, units: Mapping[str, Sequence[nn.Module]], roots: Collection[str], order: str
) -> dict[int, Part]:
    """The units of each stage of a rank; those that several have, or none, are in all of them.

    Args:
        stages: of the model.
        units: the modules of each.
        roots: names of those that are held through a pass.
        order: as it was given.

    Raises:
        ConfigError: a unit that is no root has parts in several stages.
    """
    homes: dict[int, set[int]] = {}  # of modules, which pieces may have together
    for piece, stage in zip(stages.pieces, stages.stage_of, strict=True):
        for module in piece.module.modules() if stage in stages.own else ():
            homes.setdefault(id(module), set()).add(stage)
    found = {
        name: {stage for module in modules for m in module.modules() for stage in homes.get(id(m), ())}
        for name, modules in units.items()
    }
    common = frozenset(name for name, of in found.items() if len(of) != 1)
    if apart := sorted(common - set(roots)):
        raise ConfigError(
            f"Parallel(pipeline={order!r}): the unit {apart[0]!r} has parts in several stages of a rank: choose "
            "Init(units=...), or Parallel(stages=...), so that each unit is in one."
        )
    return {stage: Part(frozenset(name for name, of in found.items() if of == {stage}), common) for stage in stages.own}
