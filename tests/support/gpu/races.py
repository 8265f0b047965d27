"""Trainings whose streams are delayed at random, beside the same on one stream: a synchronization that is missing shows
in the losses. On the simulated device the order itself is checked, and the random order is the device's own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.utils.deterministic

from shardfold import accelerator
from tests.support.gpu.ranks import Field, Here, how_many
from tests.support.gpu.scenes import SCENES, Scene, losses_of
from tests.support.gpu.section import Asked, Notes, Outcome
from tests.support.gpu.setting import Setting, rank_settings
from tests.support.gpu.watched import delayed, on_one_stream, sleep

__all__ = ["run", "worst"]

STEPS = 4
LEAST, MOST, REHEARSED = 2, 20, 2  # delayed runs of a scene on a device, and on the simulated one
LONG = 200_000_000  # cycles, a tenth of a second: what the control's stream is late by
NEEDS = 6.0  # seconds that a scene is begun with
SHOWN = 5  # races


def run(asked: Asked, notes: Notes) -> None:
    if asked.device == "cpu":
        notes.not_run("all scenes", "the CPU has no streams")
        return
    settings = rank_settings(asked.device, asked.ranks, how_many(asked.device))
    fitting: list[tuple[Scene, Setting]] = []
    for scene, setting in [(scene, setting) for scene in SCENES for setting in settings]:
        if setting.ranks < scene.ranks:
            notes.not_run(f"{scene.name} ({setting})", f"needs {scene.ranks} ranks")
        else:
            fitting.append((scene, setting))
    with Field(asked.device, notes.clock) as field:
        notes.attempt("control: what nobody waits for is seen", lambda: _control(field, settings[0]))
        for place, (scene, setting) in enumerate(fitting):
            seconds = notes.clock.left / (len(fitting) - place)
            name = f"{scene.name} ({setting})"
            notes.attempt(name, lambda s=scene, at=setting, left=seconds: _compared(field, at, s, left), needs=NEEDS)


def _control(field: Field, setting: Setting) -> tuple[str, dict[str, Any]]:
    seen = field.run(setting, _late_read)
    if not all(seen):
        raise Outcome("a read that nothing orders was not noticed: the other cases show nothing here")
    return "a read without a wait differs, or is reported", {}


def _late_read(here: Here) -> bool:
    """Whether a read of what another stream has yet to write is noticed."""
    side, value = accelerator.new_stream(here.device), torch.zeros(1024, device=here.device)
    accelerator.synchronize(here.device)
    with accelerator.on(side):
        if here.sim is None:
            sleep(here.device, LONG)
        value.fill_(1.0)
    read = value.clone()
    accelerator.synchronize(here.device)
    return bool((read != 1).any()) if here.sim is None else bool(here.sim.take().races)


def _compared(field: Field, setting: Setting, scene: Scene, seconds: float) -> tuple[str, dict[str, Any]]:
    """``seconds`` are for this scene: what the run on one stream took says how many delayed ones there are."""
    begun = time.monotonic()
    expected = field.run(setting, _on_one_stream, scene)
    took = time.monotonic() - begun
    repeats = max(LEAST, min(MOST, int((seconds - took) / took))) if setting.is_real else REHEARSED
    modes = ["check"] if setting.is_real else ["check", *["lazy"] * repeats]
    found: list[list[list[float]]] = []  # by run, by rank
    races: list[str] = []
    for seed, mode in enumerate(modes):
        answers = field.run(setting, _delayed, scene, seed, repeats, mode=mode, seed=100 * seed)
        found += [[answer[0][n] for answer in answers] for n in range(len(answers[0][0]))]
        races += [race for answer in answers for race in answer[1]]
    away = max(worst(one, losses) for each in found for one, losses in zip(expected, each, strict=True))
    figures = {"runs": len(found), "largest difference": away, "races": len(races)}
    if races:
        raise Outcome(f"{len(races)} races", "\n".join(dict.fromkeys(races[:SHOWN])), **figures)
    if away > scene.tolerance:
        raise Outcome(f"losses differ from those on one stream by {away:.1e}", _table(expected, found), **figures)
    return "", figures


def _on_one_stream(here: Here, scene: Scene) -> list[float]:
    with _same_kernels(), on_one_stream(here.device):
        return losses_of(here, scene, steps=STEPS)


def _delayed(here: Here, scene: Scene, seed: int, repeats: int) -> tuple[list[list[float]], list[str]]:
    """Losses of each run, and races."""
    with _same_kernels():
        if here.sim is not None:
            losses = losses_of(here, scene, steps=STEPS)
            return [losses], [str(race) for race in here.sim.take().races]
        found: list[list[float]] = []
        for number in range(repeats):
            with delayed(here.device, 1000 * number + int(os.environ["RANK"])):
                found.append(losses_of(here, scene, steps=STEPS))
        return found, []


def _same_kernels() -> ExitStack:
    """Kernels that add in the same order in every run, where there are such."""
    held = ExitStack()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would order what is not ordered otherwise
    held.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
    held.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", filled)
    return held


def worst(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference; infinite where one is not finite or the lengths differ."""
    if len(expected) != len(found) or not all(map(math.isfinite, [*expected, *found])):
        return math.inf
    return max((abs(a - b) / max(abs(a), 1e-30) for a, b in zip(expected, found, strict=True)), default=0.0)


def _table(expected: list[list[float]], found: list[list[list[float]]]) -> str:
    """Losses by rank: on one stream, then of each run."""
    lines = [f"rank {rank}, one stream: {losses}" for rank, losses in enumerate(expected)]
    lines += [f"rank {rank}, run {n}: {losses}" for n, each in enumerate(found) for rank, losses in enumerate(each)]
    return "\n".join(lines)
