"""What `shardfold plan` does with its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from rich.console import Console

from shardfold.errors import ConfigError, ModelError
from shardfold.plan.auto_wire import AutoWire
from shardfold.plan.checks import parse_bytes
from shardfold.plan.layout import Layout
from shardfold.planner.choice import options
from shardfold.planner.division import UNDIVIDED, Division
from shardfold.planner.given import GIVE
from shardfold.planner.hardware import Cluster, cluster, host_bytes
from shardfold.planner.inference import Served, activation_bytes, cache_bytes, generating, sizes_of, streamed_part
from shardfold.planner.ranking import Ranking, rank
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.planner.staged import usual_count
from shardfold.tools.answering.open_config import table_of_weights
from shardfold.tools.observe.working_line import WorkingLine, working
from shardfold.tools.planning import show
from shardfold.tools.planning._plan_page import plan_page
from shardfold.tools.planning.known_models import Planned, planned_model
from shardfold.tools.recipes.train_config import SIZES

__all__ = ["print_inference", "print_plan", "write_plan_page"]


def print_plan(
    model: str | Callable[[Division], Planned],
    gpus: str,
    *,
    memory: str | None,
    precision: str,
    micro_batch: int | str | None,
    accumulate: int,
    length: int | None,
    tables: Mapping[str, Layout],
    modes: Sequence[str],
    batch: int | None = None,
    host: str | None = None,
    divisions: Sequence[Division] = (UNDIVIDED,),
    wire: AutoWire | None = None,
    real: bool | None = None,
    price: float | None = None,
    optimizer: str = "adamw",
    galore_rank: int = 16,
    survive: str | None = None,
    exact: bool = False,
) -> bool:
    """Plans and prints: what a micro-batch, or the largest of each, needs under each layout, or else the fastest way to
    train that fits; returns whether anything fits. ``model``: a name, or what makes it for a division."""
    where, room = cluster(gpus, memory=memory), host_bytes(host)
    searched: dict[str, Any] = {"precision": precision, "layouts": tables, "modes": modes, "batch": batch, "wire": wire}
    searched |= {"host": room, "copies": survive or "", "exact": exact}

    def make(division: Division | None = None) -> Planned:
        with _making(model if isinstance(model, str) else "a model"):
            if not isinstance(model, str):
                return model(division or Division())
            kept: dict[str, Any] = {"optimizer": optimizer, "galore_rank": galore_rank}
            return planned_model(model, length=length, samples=2, division=division, real=real, **kept)

    name = model if isinstance(model, str) else ""
    if len(divisions) > 1:
        planned = make()
        print(show.head(planned, where, precision))
        print(flush=True)
        with _traced(planned) as tick:
            found = rank(planned.subject, where, divisions, tick=tick, **searched)
        found = replace(found, refused=[replace(r, why=_by_command(r.why, planned)) for r in found.refused])
        return _print_found(found, where, precision, name, price, show.lost(planned, tables, where.mesh, precision))
    division = replace(divisions[0], streams=where.device.streams)
    mesh = division.over(where.mesh)
    planned = make(division)
    print(show.head(planned, where, precision, mesh))
    print(flush=True)
    if micro_batch is None:
        with _traced(planned) as tick:
            found = rank(planned.subject, where, tick=tick, **searched)
        return _print_found(found, where, precision, name, price, show.lost(planned, tables, mesh, precision))
    on = PlannedRank.on(where, division, precision=precision, micro_batches=accumulate, host=room)
    size = micro_batch if isinstance(micro_batch, int) else None
    with _traced(planned) as tick:
        each = options(planned.subject.ranks, on, tables, modes, size, tick)
    if division.pipeline > 1:
        print(show.stages(division))
        print()
    print(show.table(each))
    fitting = [one for one in each if one.fits]
    best = max(fitting, key=lambda one: one.largest) if fitting else min(each, key=lambda one: one.plan.peak)
    print()
    print(show.detail(best))
    if not fitting:
        print(f"Nothing fits: {best.why}")
    _print_notes(show.lost(planned, tables, mesh, precision))
    _print_notes(show.notes((one.plan.zeros for one in each), (one.loss for one in each), where, precision))
    return bool(fitting)


def _print_found(found: Ranking, where: Cluster, precision: str, model: str, price: float | None, lost: str) -> bool:
    """Prints what a search found, and what of it is ``lost`` with a rank; returns whether anything fits."""
    print(show.ranking(found, where, precision, model if model in SIZES else "", price))
    ways = found.found
    _print_notes(lost)
    _print_notes(show.notes((one.zeros for one in ways), (one.loss for one in ways), where, precision))
    return bool(found.found)


def _making(model: str) -> AbstractContextManager[WorkingLine]:
    return working(f"making {model} without memory", console=Console(stderr=True))


@contextmanager
def _traced(planned: Planned) -> Iterator[Callable[[str], None]]:
    """While a model runs without memory: packages say nothing in between, and a micro-batch that the command made is
    not blamed on who gave the model. What it gives takes what is looked at next, for a line on a terminal."""
    log = getLogger("transformers")
    before = log.level
    log.setLevel(ERROR)
    try:
        with working(f"planning {planned.name}", console=Console(stderr=True)) as line:
            yield line.now
    except ModelError as error:
        raise ModelError(_by_command(str(error), planned)) from error
    finally:
        log.setLevel(before)


def _by_command(said: str, planned: Planned) -> str:
    """A sentence that blames a micro-batch, of one that the command made."""
    if not planned.made:
        return said
    return said.replace(
        GIVE,
        "The command made it by what the model's class and configuration say: give your own by --model "
        "module:function, whose function gives (model, micro-batch)",
    )


def _print_notes(notes: str) -> None:
    if notes:
        print(f"\n{notes}")


def print_inference(
    model: str,
    gpus: str,
    *,
    memory: str | None,
    length: int | None,
    sequences: int,
    division: Division = UNDIVIDED,
    real: bool | None = None,
    precision: str = "bf16",
    weights: str = "memory",
    bits: int | None = None,
    stays: str | None = None,
    page: int = 16,
) -> bool:
    """Prints what serving a model needs, on all devices or on each of those that share it, and training it, by
    dtype; and what a generation takes of each device, with ``weights`` in memory, host or disk, in ``bits``, of which
    so many bytes stay in memory; returns whether any dtype fits."""
    where = cluster(gpus, memory=memory)
    _ = division.over(where.mesh)
    with _making(model):
        planned = planned_model(model, length=length, samples=2, division=division, real=real)
    with _traced(planned):
        cache = cache_bytes(planned.subject, 1)
        each = cache or activation_bytes(planned.subject, 1)
    served = Served(each, sequences, show.served_by(planned, where))
    sizes = sizes_of(planned.subject)
    print(show.serving(planned, where, sizes, served, what="cache" if cache else "activations"))
    if cache and planned.length:
        subject, share = planned.subject, 1.0
        if stays is not None:
            table = table_of_weights("ddp", bits, weights)
            share = streamed_part(subject, table, precision, parse_bytes(stays) or 0, {"intra": 1})
        table = table_of_weights("ddp", bits, weights, share)
        with _traced(planned):
            found = generating(
                subject, table, precision, where.device, rows=sequences, length=planned.length, page=page
            )
        print(show.generation(found, precision, planned.length, page, bits, where.device))
    return any(served.fits(size) for size in sizes)


def write_plan_page(
    path: Path,
    model: str,
    gpus: str,
    *,
    memory: str | None,
    precision: str,
    length: int | None,
    layouts: Sequence[str],
    modes: Sequence[str],
    samples: int,
    divisions: Sequence[Division] = (UNDIVIDED,),
    real: bool | None = None,
    accumulate: int | None = None,
) -> None:
    """Writes the page of a plan; ``accumulate``: micro-batches of a step that goes through stages.

    Raises:
        ConfigError: it cannot be written.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--html {path} cannot be written: there is no folder {str(path.parent)!r}.")
    where = cluster(gpus, memory=memory)
    models: dict[str, tuple[Planned, Subject | None]] = {}
    with _making(model):
        for each in divisions:
            _ = each.over(where.mesh)
            for division in _ranks_of(replace(each, streams=where.device.streams), accumulate):
                planned = planned_model(model, length=length, samples=2, division=division, real=real)
                half, shorter = planned.length // 2, None
                if half:
                    shorter = planned_model(model, length=half, samples=2, division=division, real=real).subject
                models[_said(division, planned.subject)] = planned, shorter
    with _traced(next(iter(models.values()))[0]):
        text = plan_page(models, where, layouts=layouts, modes=modes, precision=precision, samples=samples)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}.") from error
    print(f"Written to {path}.")


def _ranks_of(division: Division, accumulate: int | None) -> list[Division]:
    """Of each rank that has stages; itself, where there are none."""
    if division.pipeline == 1:
        return [division]
    count = accumulate or usual_count(division.order, division.pipeline)
    return [replace(division, stage=place, micro_batches=count) for place in range(division.pipeline)]


def _said(division: Division, subject: Subject) -> str:
    """How ranks share the model, and of stages which ones a rank has, of a step of how many micro-batches."""
    if not subject.staged:
        return str(division) or "data alone"
    return f"{division}, {subject.staged}, {division.micro_batches} micro-batches"
