"""The study: five ways to split a face model's states, each with the largest batch that fits a memory budget.

The report that it follows trained on 10 cards with 16,150 MB each. Here a budget is a number of bytes of the device on
each rank: what the plain data-parallel model takes with few images. The planner says what each setting takes of it for
any batch, and so the largest that fits; training with it is timed, once with the head on every rank and once with its
classes split over them. All train on the same number of images.

Rank 0 writes study.json after every training, so that a study that was stopped goes on where it was: `--resume`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from torch import Tensor

from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.tools.bench.planned import measured_peak
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.readable import format_duration
from shardfold.tools.recipes.face._study_page import Study, write_page
from shardfold.tools.recipes.face.cards import on_cards
from shardfold.tools.recipes.face.drawn import DrawnFaces
from shardfold.tools.recipes.face.face_config import DEFAULT_WARMUP, STUDY_CHOOSES, FaceConfig
from shardfold.tools.recipes.face.images import Drawn, ImageSource, sources
from shardfold.tools.recipes.face.needs import SETTINGS, Need, Needs
from shardfold.tools.recipes.face.remarks import here
from shardfold.tools.recipes.face.row import StudyRow
from shardfold.tools.recipes.face.train import FaceRun, pca
from shardfold.tools.recipes.face.verification import PairVerification, cosine_scores, verify
from shardfold.tools.recipes.folder import claimed, claimed_by_launcher

__all__ = ["BUDGETS", "HEADS", "held_out_sets", "needs_of", "study"]

HEADS = ("replicated", "sharded")
BUDGETS = {"large": 48, "small": 16}
"""Images that fit beside the base with a replicated head; the report's pools of cards had 16 and 11 GB."""

SETS = {"as trained": None, "portraits": 0.2, "surveillance": 0.8}
"""Held-out sets of drawn faces: the same identities, by how hard their images are."""

POINTS = 60  # of a curve of losses
NOT_COMPARED = {"out", "resume", *STUDY_CHOOSES}


class StudyCase(NamedTuple):
    """What is trained."""

    budget: str
    name: str
    head: str
    allowed: int
    need: Need


def study(config: FaceConfig) -> int:
    """Run all settings on this rank, together with the others; rank 0 writes tables and a page.

    Raises:
        ConfigError: a setting does not fit its budget, or `resume` is no such study.
    """
    config.check_study()
    before = earlier_rows(config)
    leads = int(os.environ.get("RANK", "0")) == 0
    mine = claimed(config.out) if leads and not claimed_by_launcher(config.out) else nullcontext(config.out)
    with mine as folder:
        out = folder or Path("runs", "study")
        out.mkdir(parents=True, exist_ok=True)
        console = lenient_console()
        images = sources(config)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        places = plan(config, len(images[0].names), ranks)
        if leads:
            written = config.model_dump(mode="json", exclude={"out", *STUDY_CHOOSES}, exclude_none=True)
            written["procs"] = ranks
            (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
            introduce(console, config, places, len(before), out)
        rows, base = measure_all(config, images, places, before, out if leads else None, console)
        if leads:
            found = Study(
                rows,
                base,
                [place_of(each) for each in ten_ranks(config, len(images[0].names))],
                {head: on_cards(head) for head in HEADS},
                ranks,
                here(config, len(images[0].names), ranks, BUDGETS["small"]),
            )
            write(out, found)
            write_page(out, found, config, images[1])
            console.print(
                f"Written to {out}: study.html, study.md, study.json", highlight=False, markup=False, soft_wrap=True
            )
    return 0


def earlier_rows(config: FaceConfig) -> list[StudyRow]:
    """Of the study in `resume`, which must have had the same settings.

    Raises:
        ConfigError: there is none, or it had others.
    """
    if config.resume is None:
        return []
    folder = config.resume.expanduser()
    try:
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        said = folder / "study.json"
        rows = json.loads(said.read_text(encoding="utf-8"))["rows"] if said.exists() else []
        found = [StudyRow(**row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a study: --study --resume takes the --out of one that was stopped."
        ) from None
    ours = config.model_dump(mode="json", exclude_none=True)
    ours["procs"] = int(os.environ.get("WORLD_SIZE", "1"))
    for name in sorted((ours.keys() | theirs.keys()) - NOT_COMPARED):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"the study in {str(folder)!r} has {name} {theirs.get(name)}, so it cannot go on with "
                f"{ours.get(name)}: give the settings that it began with (--config {folder / 'config.json'})."
            )
    return found


def needs_of(config: FaceConfig, classes: int, ranks: int, *, streams: bool = False) -> dict[tuple[str, str], Need]:
    """What each setting takes, by (setting, head)."""
    found: dict[tuple[str, str], Need] = {}
    for head in HEADS:
        needs = Needs(changed(config, head=head), classes, ranks, streams=streams)
        found |= {(name, head): needs.of(name) for name in SETTINGS}
    return found


def plan(config: FaceConfig, classes: int, ranks: int) -> list[StudyCase]:
    """All that is trained, in order.

    Raises:
        ConfigError: fewer than two images fit.
    """
    device = accelerator.found()
    needs = needs_of(config, classes, ranks, streams=device is not None and accelerator.has_streams(device))
    found: list[StudyCase] = []
    for budget, number in BUDGETS.items():
        allowed = needs["base", "replicated"].of(number)
        for name in SETTINGS:
            for head in HEADS:
                need = needs[name, head]
                if need.largest(allowed) < 2:
                    raise ConfigError(
                        f"{name} with a {head} head does not fit the {budget} budget of {allowed:,} bytes, which is "
                        f"what the base takes with {number} images: give the model fewer --identities or more --layers."
                    )
                found.append(StudyCase(budget, name, head, allowed, need))
    return found


def ten_ranks(config: FaceConfig, classes: int) -> list[StudyCase]:
    """This model on as many ranks as the report had, computed: for the order of the settings."""
    needs = needs_of(config, classes, 10)
    allowed = needs["base", "replicated"].of(BUDGETS["large"])
    return [StudyCase("large", name, head, allowed, need) for (name, head), need in needs.items()]


def place_of(place: StudyCase) -> tuple[str, str, int]:
    """Setting, head and the largest batch."""
    return place.name, place.head, place.need.largest(place.allowed, most=10**6)


def introduce(console: Console, config: FaceConfig, places: list[StudyCase], done: int, out: Path) -> None:
    """Say what is about to be trained."""
    console.print(
        f"{len(places)} trainings of {config.steps * config.batch:,} images on each rank, "
        f"{'drawn faces' if config.data is None else config.data}; largest batches by the planner\n"
        + (f"{done} of them are taken from {config.resume}\n" if done else "")
        + f"Ctrl-C stops; shardfold train face --study --config {out / 'config.json'} --resume {out} goes on in a new "
        "folder.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def measure_all(
    config: FaceConfig,
    images: tuple[ImageSource, ImageSource],
    places: list[StudyCase],
    before: list[StudyRow],
    out: Path | None,
    console: Console,
) -> tuple[list[StudyRow], dict[str, dict[str, float]]]:
    """The rows, and Precision of what was not trained; `out`: where rank 0 keeps them."""
    had = {(row.budget, row.setting, row.head): row for row in before}
    held = held_out_sets(config, images[1])
    base = baselines(config, images, held)
    rows: list[StudyRow] = []
    began, trained = perf_counter(), 0
    for number, place in enumerate(places, 1):
        row = had.get((place.budget, place.name, place.head))
        if row is None:
            row, trained = measure(config, images, held, place), trained + 1
        rows.append(row)
        if out is not None:
            write(out, Study(rows, base, [], {}, 0))
            left = sum((p.budget, p.name, p.head) not in had for p in places[number:])
            rest = (perf_counter() - began) / max(trained, 1) * left
            console.print(
                f"{number:>2} of {len(places)}  {place.budget:<6} {place.name:<18} {place.head:<11} batch "
                f"{row.batch:>4}  {row.images_per_s:6.0f} images/s  {row.used / 2**20:6.2f} of "
                f"{row.allowed / 2**20:.2f} MiB" + (f"  about {format_duration(rest)} left" if left else ""),
                highlight=False,
                soft_wrap=True,
            )
    return rows, base


def write(out: Path, found: Study) -> None:
    """study.json, whole or not at all."""
    part = out / "study.json.part"
    part.write_text(json.dumps(found.values(), indent=1) + "\n", encoding="utf-8")
    part.replace(out / "study.json")


def held_out_sets(config: FaceConfig, held: ImageSource) -> dict[str, ImageSource]:
    """Images of identities that are kept apart: of a folder one set, of drawn faces several."""
    if config.data is not None:
        return {"kept apart": held}
    found: dict[str, ImageSource] = {}
    for name, hard in SETS.items():
        made = DrawnFaces(
            config.held_out,
            config.shots,
            size=config.image_size(),
            channels=config.channels,
            seed=config.seed,
            first=10**8,
            hard=hard or 0.0,
        )
        found[name] = held if hard is None else Drawn(made)
    return found


def told(found: PairVerification) -> dict[str, float]:
    return {f"{rate:g}": accepted for rate, accepted in zip(found.rates, found.accepted, strict=True)}


def baselines(
    config: FaceConfig, images: tuple[ImageSource, ImageSource], held: Mapping[str, ImageSource]
) -> dict[str, dict[str, float]]:
    """Precision on the first set of pixels' PCA and of a model that was not trained."""
    first = next(iter(held.values()))
    some = list(range(0, len(images[0].labels), max(len(images[0].labels) // 2000, 1)))
    pixels = first.read(range(len(first.labels)))
    found = {"PCA of pixels": verify(cosine_scores(pca(images[0].read(some), pixels)), first.labels, config.rates())}
    run = FaceRun(changed(config, layout="ddp", offload=None, steps=1, warmup=0), (images[0], first))
    found["untrained"] = run.verify()
    run.engine.close()
    return {name: told(each) for name, each in found.items()}


def changed(config: FaceConfig, **changes: Any) -> FaceConfig:
    """These settings, but for the changes; where a run is and goes on from is not taken over."""
    return FaceConfig.load({**config.model_dump(exclude={"out", "resume"}), **changes})


def measure(
    config: FaceConfig, images: tuple[ImageSource, ImageSource], held: Mapping[str, ImageSource], place: StudyCase
) -> StudyRow:
    """Train and evaluate one."""
    batch = place.need.largest(place.allowed)
    began = perf_counter()
    steps = max(config.steps * config.batch // batch, 4)
    layout, offload = SETTINGS[place.name]
    warmup = steps // 5 if config.warmup == DEFAULT_WARMUP else steps * config.warmup // config.steps
    chosen = changed(config, layout=layout, offload=offload, head=place.head, batch=batch, steps=steps, warmup=warmup)
    run = FaceRun(chosen, images)
    batches = run.batches()
    for _ in range(steps):
        run.step(batches)
    found: dict[str, PairVerification] = {}
    for name, source in held.items():
        scores = cosine_scores(run.embeddings(source))
        found[name] = verify(scores, source.labels, config.rates())
    rate, losses, each = run.images_per_s(), run.losses, run.sampler.global_batch
    seconds = perf_counter() - began
    peak = watched(run, next(batches))
    run.engine.close()
    some = np.unique(np.linspace(0, steps - 1, min(POINTS, steps)).astype(int))
    first = next(iter(found.values()))
    return StudyRow(
        setting=place.name,
        head=place.head,
        budget=place.budget,
        allowed=place.allowed,
        used=place.need.of(batch),
        at_base=place.need.of(BUDGETS[place.budget]),
        host=place.need.host,
        measured=peak,
        batch=batch,
        images_per_s=rate,
        steps=steps,
        seconds=seconds,
        loss=float(np.mean(losses[-max(steps // 10, 1) :])),
        losses=[(float((i + 1) * each), losses[i]) for i in some],
        precision={name: told(value) for name, value in found.items()},
        curve=[(float(x), float(y)) for x, y in first.curve[::4]],
        command=command_of(chosen, int(os.environ.get("WORLD_SIZE", "1"))),
    )


def watched(run: FaceRun, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes at the peak of a step of this rank."""
    device = run.engine.device
    on_device = tuple(each.to(device) for each in batch)
    if accelerator.has_streams(device):
        return accelerator.peak(device) or 0
    return measured_peak(run.engine, on_device, lambda engine, each: engine(*each), steps=2)


def command_of(config: FaceConfig, ranks: int) -> str:
    """The command line that has these settings."""
    words = ["shardfold", "train", "face"]
    values = {**config.model_dump(mode="json", exclude={"out", "resume"}), "procs": ranks}
    for name, value in values.items():
        option, default = name.replace("_", "-"), FaceConfig.model_fields[name].default
        if value == default:
            continue
        words += (
            [f"--{option}" if value else f"--no-{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
        )
    return shlex.join(words)
