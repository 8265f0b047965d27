"""Runs killed without warning, at moments that are drawn, go on elsewhere to the losses of runs that were not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardfold.testing import Ranks, RanksFailed
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = [needs("transformers", "peft"), pytest.mark.soak, pytest.mark.timeout(900)]

STEPS = 12
WINDOW = 4
"""Samples, packs or prompts of a step, however they are shared out."""
LIMIT = 300.0  # seconds in which a run says what is waited for
PACK = {"pack": True, "length": 64}
PROMPTS = {"reward": "contains,ends", "max_tokens": 6, "reference": "adapter", "beta": 0.05}
LIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "pt, packed": ("pt", {"text": PACK}),
    "sft, packed, LoRA": ("sft", {"text": PACK, "adapter": {"rank": 4}}),
    "sft, PiSSA": ("sft", {"adapter": {"rank": 4, "variant": "pissa"}}),
    "sft, codes": ("sft", {"adapter": {"rank": 4}, "base": {"bits": 4}}),
    "sft, prefix": ("sft", {"adapter": {"kind": "prefix", "pre_seq_len": 4, "prefix_projection": True}}),
    "dpo": ("dpo", {}),
    "dpo, DoRA": ("dpo", {"adapter": {"rank": 4, "variant": "dora"}}),
    "kto, packed, OLoRA": ("kto", {"text": PACK, "adapter": {"rank": 4, "variant": "olora"}}),
    "orpo, expanded": ("orpo", {"adapter": {"kind": "expand", "layers": 2}}),
    "reward, last layer": ("reward", {"adapter": {"kind": "freeze", "layers": 1}}),
    "distill": ("distill", {"teacher": "teacher"}),
    "grpo": ("grpo", {**PROMPTS, "n": 2, "adapter": {"rank": 4}}),
    "ppo": ("ppo", {**PROMPTS, "n": 1, "updates": 2, "adapter": {"rank": 4}}),
}
ROWS: dict[str, Any] = {
    "pt": support.texts, "sft": support.chats, "distill": support.chats, "kto": support.labelled,
    "grpo": support.prompts, "ppo": support.prompts,
}  # fmt: skip
WAYS = [(ranks, micro, WINDOW // ranks // micro) for ranks in (1, 2) for micro in (1, 2, 4) if ranks * micro <= WINDOW]
LAYOUTS = ("ddp", "zero1", "zero2", "zero3")


def tuned(folder: str, recipe: str, settings: dict[str, Any]) -> list[float]:
    """Losses of a run, or of the rest of one."""
    from shardfold.tools.tune.config import config_class, resumed_settings
    from shardfold.tools.tune.tuned import tune

    os.chdir(folder)
    kind = config_class(recipe)
    if "resume" in settings:
        settings = resumed_settings(kind, Path(settings["resume"]), settings)
    return tune(kind.load(settings)).losses


def shared_out(draw: random.Random) -> tuple[int, dict[str, Any]]:
    """Ranks, and how they share out a window."""
    ranks, micro, accumulate = draw.choice(WAYS)
    return ranks, {"micro_batch": micro, "accumulate": accumulate, "layout": draw.choice(LAYOUTS)}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def begin_and_kill(folder: Path, recipe: str, settings: dict[str, Any], ranks: int, draw: random.Random) -> str:
    """Start the command, and kill it, its first rank, or all of it, once it has said so many steps and where its latest
    checkpoint is. Returns what was killed."""
    (folder / "start.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", "shardfold", "tune", recipe, "--config=start.json", "--out=killed",
             f"--procs={ranks}"]  # fmt: skip
    said = (folder / "said").open("w")
    run = subprocess.Popen(words, cwd=folder, stdout=said, stderr=said, start_new_session=True)
    metrics, latest = folder / "killed" / "metrics.jsonl", folder / "killed" / "checkpoints" / "latest"
    moment, until = draw.randint(2, STEPS - 4), time.monotonic() + LIMIT
    try:
        while not (latest.exists() and metrics.read_bytes().count(b"\n") >= moment):
            assert run.poll() is None and time.monotonic() < until, (folder / "said").read_text()
        started = children(run.pid) if ranks > 1 else []
        who = draw.choice(["all", "the command", "a rank"]) if started else "all"
        if who == "a rank":
            os.kill(started[0], signal.SIGKILL)
        elif who == "the command":
            run.kill()
        else:
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(LIMIT)
        for pid in started:  # ranks end behind the command
            while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
                pass
        return f"{who}, behind step {moment}"
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        said.close()


@pytest.mark.parametrize("number", range(2 * len(LIVES)))
def test_a_killed_run_goes_on(number: int, ranks: Ranks, tmp_path: Path) -> None:
    """On other ranks, another layout and accumulation: the losses of the rest are those of one rank that ran through,
    from the last checkpoint that was written whole. Every other time nothing is left of what was prepared."""
    draw = random.Random(number)
    name = list(LIVES)[number % len(LIVES)]
    recipe, more = LIVES[name]
    support.model_folder(tmp_path / "base", scale=4.0)
    support.model_folder(tmp_path / "teacher", scale=4.0, seed=1)
    support.write_rows(tmp_path / "rows.jsonl", ROWS.get(recipe, support.pairs)(24))
    common = {"model": "base", "data": "rows.jsonl", "cache": "cache", "lr": 1e-3, "steps": STEPS, **more}
    whole = {**common, "micro_batch": WINDOW, "layout": "ddp", "out": "whole"}
    wanted = ranks.run(tuned, str(tmp_path), recipe, whole, world_size=1, timeout=LIMIT)[0]
    (first, given), (then, other) = shared_out(draw), shared_out(draw)
    started = {**common, **given, "save_every": draw.choice([1, 2]), "keep": 1}
    killed = begin_and_kill(tmp_path, recipe, started, first, draw)
    if draw.random() < 0.5:
        shutil.rmtree(tmp_path / "cache")
    resumed = {"resume": "killed", "out": "rest", **other}
    latest = (tmp_path / "killed" / "checkpoints" / "latest").read_text()
    if f"{STEPS:06}" in latest:  # it was killed behind its last save
        with pytest.raises(RanksFailed, match="leaves none to do"):
            ranks.run(tuned, str(tmp_path), recipe, resumed, world_size=then, timeout=LIMIT)
        return
    rest = ranks.run(tuned, str(tmp_path), recipe, resumed, world_size=then, timeout=LIMIT)[0]
    case = f"{name}: {first} ranks {given}, killed {killed}; {then} ranks {other}"
    assert 0 < len(rest) < STEPS, case
    assert rest == pytest.approx(wanted[-len(rest) :], abs=1e-5, rel=1e-5), case
