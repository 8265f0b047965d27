"""How often a step stops the host, from the third on: not at all, or as often as is named here, with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import shardfold as sf
from tests.support.gpu.ranks import Field, Here, how_many
from tests.support.gpu.scenes import ADAMW, SCENES, SGD, TOKENS, VOCAB, Block, Model, Scene
from tests.support.gpu.section import Asked, Notes, Outcome
from tests.support.gpu.setting import Setting, rank_settings
from tests.support.gpu.watched import waits
from tests.support.options import grouped

__all__ = ["run"]

STEPS, FIRST = 6, 3  # steps are counted from 1; the first ones find the order of units and fill caches
NEEDS = 4.0  # seconds that a case is begun with


@dataclass(frozen=True, kw_only=True)
class Case:
    """A scene, and how many waits of a step are known and needed, with the reason."""

    scene: Scene
    needed: int = 0
    because: str = ""


SCALED = "whether gradients overflowed is read once per step, as GradScaler does"
LAYOUTS = ("ddp", "zero1", "zero2", "zero3")
# What a thread reads from a file, it waits for, and so does the host for what it updates itself: these are no stalls.
OF_TIERS = ("on disk", "updated in host memory", "update is in host memory", "come from host memory")
# debug=True compares what it frees with what rests, and reads the result.

CASES = (
    *(Case(scene=Scene(name=f"{layout}, fp32, clipped", layout=layout, engine={"optimizer": ADAMW, "clip_norm": 1.0}))
      for layout in LAYOUTS),
    *(Case(scene=Scene(name=f"{layout}, bf16", layout=layout, engine={"optimizer": ADAMW, "precision": "bf16"}))
      for layout in (*LAYOUTS, "fsdp2")),
    *(Case(scene=Scene(name=f"{layout}, fp16", layout=layout, engine={"optimizer": SGD, "precision": "fp16"}),
           needed=1, because=SCALED) for layout in ("ddp", "zero2", "zero3")),
    *(Case(scene=scene) for scene in SCENES
      if not scene.besides and "debug" not in scene.engine and not any(word in scene.name for word in OF_TIERS)),
)  # fmt: skip


def run(asked: Asked, notes: Notes) -> None:
    if asked.device == "cpu":
        notes.not_run("all cases", "the CPU computes as it is asked: there is nothing to wait for")
        return
    settings = [each for each in rank_settings(asked.device, asked.ranks, how_many(asked.device)) if not each.shared]
    if not settings:
        notes.not_run("all cases", "over Gloo the host waits for every collective")
        return
    setting = settings[0]
    with Field(asked.device, notes.clock) as field:
        for case in CASES:
            if setting.ranks < case.scene.ranks:
                notes.not_run(case.scene.name, f"needs {case.scene.ranks} ranks")
                continue
            notes.attempt(case.scene.name, lambda c=case: _counted(field, setting, c), needs=NEEDS)


def _counted(field: Field, setting: Setting, case: Case) -> tuple[str, dict[str, Any]]:
    places: Counter[str] = Counter()
    most = 0.0
    for found in field.run(setting, _steps, case.scene):
        per_step = sum(found.values()) / (STEPS - FIRST + 1)
        most = max(most, per_step)
        places |= found
    figures = {"waits of a step": most}
    named = "; ".join(f"{times} x {place}" for place, times in places.items())
    named = f"in {STEPS - FIRST + 1} steps {named}" if named else ""
    if most > case.needed:
        raise Outcome(f"{most:g} waits of a step, {case.needed} are needed: {named}", **figures)
    return f"{named}: {case.because}" if named else "", figures


def _steps(here: Here, scene: Scene) -> Counter[str]:
    """The waits of this rank in the steps from ``FIRST`` on."""
    torch.manual_seed(7)
    engine = sf.Engine(
        Model(32, **scene.model),
        **grouped(layout=scene.layout, device=here.device, units=[Block], **{"optimizer": SGD, **scene.engine}),
        accumulate=scene.accumulate,
    )
    try:
        text = torch.randint(VOCAB, (4, TOKENS + 1)).to(engine.device)

        def step() -> None:
            for _ in range(scene.accumulate):
                engine.backward(engine(text[:, :-1], text[:, 1:]))
            engine.step()

        for _ in range(FIRST - 1):
            step()
        with waits(here.device, here.sim) as found:
            for _ in range(STEPS - FIRST + 1):
                step()
        return Counter(found)
    finally:
        engine.close()
