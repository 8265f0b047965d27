"""The study: five ways to split a face model's states, each with the largest batch that fits a memory budget.

The report that it follows trained on 10 cards with 16,150 MB each. Here a budget is a number of bytes of the device on
each rank, which is bound to fit the plain data-parallel model with few images; what a setting takes is

    states            `engine.memory()`: parameters, gradients and optimizer states of the device tier
    whole units       what is gathered for a while, where parameters are split: the two largest units
    activations       what autograd keeps for one image, counted by `engine.activations()`, times the batch

The largest batch follows, and training with it is timed, once with the head on every rank and once with its classes
split over them. Settings take turns; all train on the same number of images.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from shardfold.errors import ConfigError
from shardfold.plan.layout import Tier
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.recipes.face.config import FaceConfig
from shardfold.tools.recipes.face.images import Source, sources
from shardfold.tools.recipes.face.page import write_page
from shardfold.tools.recipes.face.row import Row
from shardfold.tools.recipes.face.train import FaceRun
from shardfold.tools.recipes.folder import claimed, claimed_by_launcher

__all__ = ["SETTINGS", "Need", "largest_batch", "need_of", "study"]

SETTINGS: dict[str, tuple[str, str | None]] = {
    "base": ("ddp", None),
    "stage 2": ("zero2", None),
    "stage 2 + offload": ("zero2", "host"),
    "stage 3 + offload": ("zero3", "params=host,grads=host,optimizer=host"),
    "stage 3": ("zero3", None),
}
"""The report's five configurations, as layouts and what rests in host memory."""

BUDGETS = {"large": 48, "small": 16}
"""Images that fit beside the base with a replicated head; the report's pools of cards had 16 and 11 GB."""

PROBES = (4, 12)  # images of the two steps from which activations of one are known
MOST = 512  # images per rank


@dataclass(frozen=True)
class Need:
    """What a setting takes of the device on a rank."""

    fixed: int
    """Bytes, whatever the batch."""
    each: int
    """Bytes of activations of one image."""

    def of(self, batch: int) -> int:
        """Bytes with so many images."""
        return self.fixed + self.each * batch


def largest_batch(need: Need, allowed: int, most: int = MOST) -> int:
    """The most images of which a step fits; 0: not even one does."""
    return max(min((allowed - need.fixed) // max(need.each, 1), most), 0)


def study(config: FaceConfig) -> int:
    """Run all settings on this rank, together with the others; rank 0 writes tables and a page."""
    leads = int(os.environ.get("RANK", "0")) == 0
    mine = claimed(config.out) if leads and not claimed_by_launcher(config.out) else nullcontext(config.out)
    with mine as folder:
        out = folder or Path("runs", "study")
        console = lenient_console()
        images = sources(config)
        needs = {(name, head): need_of(config, images, name, head) for name in SETTINGS for head in _HEADS}
        rows: list[Row] = []
        for budget, number in BUDGETS.items():
            allowed = needs["base", "replicated"].of(number)
            for head in _HEADS:
                for name in SETTINGS:
                    row = _measure(config, images, name, head, budget, allowed, needs[name, head])
                    rows.append(row)
                    if leads:
                        console.print(
                            f"{budget:<6} {head:<11} {name:<18} batch {row.batch:>4}  {row.images_per_s:7.0f} images/s"
                            f"  {row.used / 2**20:6.1f} of {row.allowed / 2**20:.1f} MiB",
                            highlight=False,
                        )
        if leads:
            (out / "config.json").write_text(config.model_dump_json(exclude={"out"}, exclude_none=True) + "\n")
            (out / "study.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
            write_page(out, rows, config, images[1])
            console.print(f"Written to {out}: study.html, study.md, study.json", highlight=False)
    return 0


_HEADS = ("replicated", "sharded")


def _config(config: FaceConfig, name: str, head: str, batch: int, steps: int) -> FaceConfig:
    layout, offload = SETTINGS[name]
    changes = {"layout": layout, "offload": offload, "head": head, "batch": batch, "steps": steps, "warmup": steps // 5}
    return FaceConfig.load({**config.model_dump(exclude={"out", "far", "resume"}), "far": config.far, **changes})


def need_of(config: FaceConfig, images: tuple[Source, Source], name: str, head: str) -> Need:
    saved: list[int] = []
    run = FaceRun(_config(config, name, head, PROBES[1], 1), images)
    batch, labels = next(run.batches())
    for number in PROBES:
        with run.engine.activations() as report:
            run.engine.backward(run.engine(batch[:number], labels[:number]))
        saved.append(report.device)
        run.engine.zero_grad()
    memory = run.engine.memory()
    states = sum(row.held for row in memory.rows if row.tier == Tier.DEVICE)
    away = [unit for unit in run.engine.units if unit.split]
    sizes = sorted((sum(s.spec.length * s.flat.element_size() for s in unit.segments) for unit in away), reverse=True)
    each = -(-(saved[1] - saved[0]) // (PROBES[1] - PROBES[0]))
    fixed = states + sum(sizes[:2]) + max(saved[0] - each * PROBES[0], 0)
    most = run.engine.agree([float(fixed), float(each)])  # of any rank: classes need not divide
    run.engine.close()
    return Need(int(most[0]), int(most[1]))


def _measure(
    config: FaceConfig, images: tuple[Source, Source], name: str, head: str, budget: str, allowed: int, need: Need
) -> Row:
    """
    Raises:
        ConfigError: fewer than two images fit.
    """
    batch = largest_batch(need, allowed)
    if batch < 2:
        raise ConfigError(f"{name} with a {head} head does not fit the budget {budget} of {allowed} bytes.")
    began = perf_counter()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    steps = max(config.steps * config.batch // batch, 4)
    chosen = _config(config, name, head, batch, steps)
    run = FaceRun(chosen, images)
    batches = run.batches()
    for _ in range(steps):
        run.step(batches)
    found = run.verify()
    rate, losses = run.images_per_s(), run.losses[-max(steps // 10, 1) :]
    run.engine.close()
    layout, offload = SETTINGS[name]
    command = f"shardfold train face --procs {ranks} --layout {layout} --head {head} --batch {batch} --steps {steps}"
    command += f" --offload {offload}" if offload else ""
    precision = {f"{r:g}": a for r, a in zip(found.rates, found.accepted, strict=True)}
    return Row(
        name, head, budget, allowed, need.of(batch), batch, rate, steps, sum(losses) / len(losses), precision,
        perf_counter() - began, command,
    )  # fmt: skip
