"""What a run takes, before it starts: whether it fits, how long it takes, which layout is faster. Imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError
from shardfold.planner.candidate import FittingCandidate
from shardfold.planner.division import Division
from shardfold.planner.hardware import Cluster, cluster
from shardfold.planner.ranking import layouts_for, rank
from shardfold.planner.setting import Subject
from shardfold.tools.board.board_config import machine_profile
from shardfold.tools.observe.readable import format_bytes, format_duration
from shardfold.tools.recipes.largest import subjects_of
from shardfold.tools.recipes.train_config import RecipeSettings, TrainConfig
from shardfold.tools.tune.config import TuneConfig

__all__ = ["planned"]


def planned(settings: RecipeSettings, gpus: str | None) -> dict[str, Any]:
    """
    Args:
        settings: of the run.
        gpus: a device that plans know, or the file of ``shardfold doctor --measure``; None: this machine, which is
            measured the first time.

    Returns:
        ``text``, a sentence or two; whether the run ``fits``; and of each layout, the fastest first, whether it
        ``fits``, the ``bytes`` of a rank at its peak and the ``seconds`` of all steps.

    Raises:
        ConfigError: there are no plans of such runs.
    """
    if not isinstance(settings, TrainConfig | TuneConfig):
        raise ConfigError("there are no plans of face recognition: shardfold train face --study runs every layout.")
    if settings.pipeline > 1:
        raise ConfigError("stages are planned at the command line: shardfold plan --pipeline.")
    where = cluster(f"{settings.procs}x{gpus or _this_machine()}")
    samples = settings.procs * max(1, settings.micro_batch) * settings.accumulate
    names = list(dict.fromkeys([settings.layout, *layouts_for(where)]))
    most: dict[str, Any] = {"most": settings.micro_batch} if settings.micro_batch else {}
    found = rank(
        _subject(settings, where),
        where,
        precision=settings.precision,
        layouts=names,
        modes=[settings.activations],
        batch=samples,
        **most,
    )
    best: dict[str, FittingCandidate] = {}
    for each in found.found:
        best.setdefault(each.candidate.layout, each)
    steps = settings.steps or 0
    rows: list[dict[str, Any]] = [
        {"layout": name, "fits": True, "bytes": each.peak, "seconds": each.seconds.step * steps if steps else None}
        for name, each in best.items()
    ]
    why = {each.layout: each.why for each in found.refused}
    rows += [{"layout": name, "fits": False, "bytes": None, "seconds": None} for name in why if name not in best]
    return {"text": _told(settings, best, why, steps), "fits": settings.layout in best, "layouts": rows}


def _subject(settings: TrainConfig | TuneConfig, where: Cluster) -> Subject:
    if isinstance(settings, TrainConfig):
        return subjects_of(settings, streams=where.device.streams)[0]
    from shardfold.tools.tune.tuning_plan import planned_tuning

    division = Division(
        tensor=settings.tensor,
        sequence_parallel=settings.sequence_parallel,
        sequence=settings.sequence,
        attention=None if settings.attention == "auto" else settings.attention,
        streams=where.device.streams,
    )
    return planned_tuning(settings, division).subject


def _told(
    settings: TrainConfig | TuneConfig, best: dict[str, FittingCandidate], why: dict[str, str], steps: int
) -> str:
    name = settings.layout
    if name not in best:
        return f"{name} does not fit: {why.get(name, 'there is no plan of it')}"
    own, first = best[name], next(iter(best))
    took = f", {format_duration(own.seconds.step * steps)} for {steps} steps" if steps else ""
    said = f"{name} fits: {format_bytes(own.peak)} on each rank at its peak{took}."
    if settings.micro_batch and own.candidate.micro_batch < settings.micro_batch:
        said += (
            f" It takes micro-batches of {own.candidate.micro_batch}; {settings.micro_batch} are slower or too many."
        )
    if first != name:
        gain = own.seconds.step / best[first].seconds.step
        said += f" {first} would take {format_duration(best[first].seconds.step * steps)}, {gain:.2f} times as fast."
    elif len(best) > 1:
        said += " No other layout is faster."
    if settings.offload:
        said += " What --offload moves is not counted."
    return said


def _this_machine() -> Path:
    """Its profile, measured if nobody has."""
    path = machine_profile()
    if not path.is_file():
        from shardfold.tools.doctor.doctor import doctor

        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.json")
        doctor(part, as_json=False)
        part.replace(path)
    return path
