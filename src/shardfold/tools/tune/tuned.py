"""A tuning from its settings to what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError
from shardfold.tools.observe import tables
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.progress import Progress
from shardfold.tools.observe.readable import format_count, format_duration
from shardfold.tools.observe.run_folder import Run
from shardfold.tools.observe.run_page import write_page
from shardfold.tools.observe.trackers import tracker_names
from shardfold.tools.observe.working_line import working
from shardfold.tools.recipes.folder import claimed, claimed_by_launcher
from shardfold.tools.run_attempts import check_spare
from shardfold.tools.tune._written import write_model
from shardfold.tools.tune.config import TuneConfig
from shardfold.tools.tune.data.show_data import left_out
from shardfold.tools.tune.run import TuneRun

__all__ = ["TuneResult", "tune"]


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a run came to; the same on every rank."""

    steps: int
    losses: list[float]
    """Of each step of this run."""
    figures: dict[str, float]
    """Of the last step."""
    held_out: dict[str, float]
    """Loss and figures on ``eval_data``; empty without it."""
    seconds: float
    interrupted: int
    """The number of the signal that ended it early; 0: none."""
    out: Path

    @property
    def exit_status(self) -> int:
        return 128 + self.interrupted if self.interrupted else 0

    def save_adapter(self, folder: str | Path) -> None:
        """Copy the adapter, in peft's format, to a new folder.

        Raises:
            ConfigError: the run trained no adapter, or the folder is there.
        """
        if not (self.out / "adapter").is_dir():
            raise ConfigError(f"the run in {str(self.out)!r} trained no adapter: its model is in {self.out / 'model'}.")
        if Path(folder).exists():
            raise ConfigError(f"{str(folder)!r} is there: give another folder.")
        shutil.copytree(self.out / "adapter", folder)


def tune(config: TuneConfig) -> TuneResult:
    """Train on this rank, together with the others if a launcher started several.

    Raises:
        ConfigError: the run folder is not empty, there is none for ranks of a launcher, or model, data and settings do
            not go together; nothing is left behind.
        ShardfoldError: the checkpoint to go on from does not fit, or the loss is no longer finite.
    """
    if config.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("ranks of a launcher of its own write one run together: give --out one folder.")
    leads = int(os.environ.get("RANK", "0")) == 0
    check_spare(config.out, config.micro_batch)
    tracker_names(config.track, installed=leads)  # refused before anything is loaded
    mine = claimed(config.out) if leads and not claimed_by_launcher(config.out) else nullcontext(config.out)
    with mine as folder:
        run = TuneRun(config, lenient_console())
        out = folder or config.out
        assert out is not None  # a run of one rank has claimed a folder
        joined = run.attempts.joined  # with what the others have
        resumed = run.resume(config.resume) if config.resume is not None and not joined else None
        run.recipe.begin(run)
        facts = _facts(run) if run.leads else {}  # which reads the data: what is wrong in them is said first
        if run.leads:
            (out / "config.json").write_text(json.dumps(resolved(run), indent=2) + "\n", encoding="utf-8")
            (out / "data.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        notes = [f"{which}: {'; '.join(words)}" for which, each in facts.items() if (words := left_out(each))]
        with run.attempts.begin_run(out, steps=run.total, track=config.track) as written:
            return _whole(run, written, [*notes, *([resumed] if resumed else [])])


def resolved(run: TuneRun) -> dict[str, Any]:
    """Return the settings with nothing left to choose: a config file for the same run, and what it came to."""
    settings = run.config.plain()
    for name in ("out", "resume", *run.config.idle()):
        settings.pop(name, None)
    for name in ("model", "teacher", "cache"):
        if settings.get(name) is not None:
            settings[name] = os.path.abspath(Path(settings[name]).expanduser())
    for name in ("data", "eval_data"):
        settings[name] = [
            {**each, "path": os.path.abspath(Path(each["path"]).expanduser())} for each in settings.get(name, ())
        ]
    settings["procs"] = run.engine.world_size
    settings["derived"] = {
        "steps": run.total,
        "world_size": run.engine.world_size,
        "device": str(run.engine.device),
        "parameters": sum(run.numel.values()),
        "trained": sum(count for name, count in run.numel.items() if name in run.trained),
    }
    return settings


def _facts(run: TuneRun) -> dict[str, Any]:
    with run.rows.telling():
        found = {"train": {**run.rows.facts, "fingerprint": run.rows.fingerprint}}
    if run.held_out is not None:
        found["eval"] = {**run.held_out.facts, "fingerprint": run.held_out.fingerprint}
    return found


def _whole(run: TuneRun, written: Run, notes: Sequence[str]) -> TuneResult:
    """Train, write what was trained, evaluate, and only then print."""
    with Progress(run.total, console=run.console, enabled=run.leads) as progress:
        for note in (introduction(run), *notes):
            progress.note(note)
        run.train(progress, written)
    last, out = run.last, written.folder
    with written.during("saving"), working("saving"):
        model = run.attempts.whole(lambda: write_model(run, out))
    with written.during("evaluating"):
        held_out = run.attempts.whole(run.evaluate) if run.held_out is not None else {}
    if run.leads:
        with written.during("saving"):
            _write_summary(run, out, held_out)
            write_page(out)
        _show(run, out, held_out, model)
    run.recipe.close()
    run.engine.close()
    run.stop.release()
    written.close("stopped" if run.interrupted else "done")
    return TuneResult(
        steps=run.done,
        losses=[each.loss for each in run.history],
        figures=dict(last.figures),
        held_out=held_out,
        seconds=last.seconds,
        interrupted=run.interrupted,
        out=out,
    )


def introduction(run: TuneRun) -> str:
    """Return who trains on what, in two lines."""
    config = run.config
    whole = sum(run.numel.values())
    trained = sum(count for name, count in run.numel.items() if name in run.trained)
    part = "all" if trained == whole else f"{format_count(trained)} ({trained / whole:.2%})"
    ranks = f"{run.engine.world_size} rank{'s' * (run.engine.world_size > 1)}"
    size = config.accumulate * config.micro_batch * run.engine.data_ranks
    return (
        f"{config.recipe} of {config.model}, {format_count(whole)} parameters, {part} trained; {config.layout} over "
        f"{ranks} on {run.engine.device.type}, {config.precision}\n"
        f"{len(run.rows):,} rows, {run.total:,} steps of {size} "
        f"{'sequences' if config.text.pack else 'samples'}"
    )


def _write_summary(run: TuneRun, out: Path, held_out: dict[str, float]) -> None:
    memory, traffic, last = run.engine.memory(), run.engine.traffic(), run.last
    summary = {
        "recipe": run.config.recipe,
        "steps": run.done,
        "skipped_steps": run.engine.stats().skipped,
        "interrupted": bool(run.interrupted),
        "seconds": round(last.seconds, 3),
        "resumed_at": run.begun_at,
        "num_parameters": sum(run.numel.values()),
        "world_size": run.engine.world_size,
        "loss": last.loss,
        "figures": dict(last.figures),
        **({"held_out_loss": held_out["loss"], "held_out": held_out} if held_out else {}),
        "memory": [row._asdict() for row in memory.rows],
        "traffic": [row._asdict() for row in traffic.rows],
        "moved": [row._asdict() for row in traffic.moved],
        "control_bytes": traffic.control,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (out / "program.txt").write_text(run.engine.explain() + "\n", encoding="utf-8")


def _show(run: TuneRun, out: Path, held_out: dict[str, float], written: str) -> None:
    console, memory, traffic = run.console, run.engine.memory(), run.engine.traffic()
    last = run.last
    console.print(f"\n{len(run.history)} steps in {format_duration(last.seconds)}", highlight=False)
    for where, found in (("last step", {"loss": last.loss, **last.figures}), ("held out", held_out)):
        if found:
            words = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
            console.print(f"{where}: {words}", highlight=False, soft_wrap=True)
    tables.print_whole(
        console,
        tables.memory_table(memory.rows),
        tables.traffic_table(traffic.rows, traffic.control),
        *([tables.moved_table(traffic.moved)] if traffic.moved else []),
    )
    names = [each.name + "/" * each.is_dir() for each in sorted(out.iterdir(), key=lambda each: (each.is_dir(), each))]
    console.print(
        f"\nThe {written} is in {out / written}. Written to {out}: {', '.join(names)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
