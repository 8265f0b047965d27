"""`shardfold bench` of each job: the layouts beside a plain loop and the peers that are installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardfold.plan.checks import human
from shardfold.tools.extras import EXTRAS
from tests.support.gpu.day import ROOT
from tests.support.gpu.report import FAILED, PASSED, Case
from tests.support.gpu.section import Asked, Notes, Outcome
from tests.support.gpu.setting import SIM

__all__ = ["JOBS", "cases", "run"]

LEAST = 15.0  # seconds that a job is begun with
LAST_LINES = 30

REAL = ["--rounds", "3", "--steps", "5", "--warm", "3"]
REHEARSED = ["--rounds", "1", "--steps", "2", "--warm", "1"]

#: Name, the command's arguments, those of a rehearsal, share of what time is left.
JOBS = (
    ("gpt, fp32", ["gpt", "--params", "100e6", "--rows", "8", "--context", "512"],
     ["gpt", "--params", "2e5", "--rows", "1", "--context", "16"], 0.45),
    ("tensors, fp32", ["tensors"], ["tensors"], 0.6),
    ("gpt, bf16", ["gpt", "--params", "100e6", "--rows", "8", "--context", "512", "--precision", "bf16"],
     ["gpt", "--params", "2e5", "--rows", "1", "--context", "16", "--precision", "bf16"], 1.0),
)  # fmt: skip
VARIANTS = "bare-*,torch-fsdp2-keep"  # of contenders, which say nothing of a device


def run(asked: Asked, notes: Notes) -> None:
    lacking = [name for name, extra in EXTRAS.items() if extra == "cli" and importlib.util.find_spec(name) is None]
    if lacking:
        notes.not_run("all jobs", f"{', '.join(lacking)} is not installed (pip install 'shardfold[cli]')")
        return
    for name, real, rehearsed, share in JOBS:
        arguments = [*rehearsed, *REHEARSED] if asked.small else [*real, *REAL]
        seconds = notes.clock.left * share
        notes.attempt(name, lambda a=arguments, s=seconds, n=name: _job(asked, notes, n, a, s), needs=LEAST)


def _job(asked: Asked, notes: Notes, name: str, arguments: list[str], seconds: float) -> tuple[str, dict[str, Any]]:
    file = Path(asked.folder) / f"bench-{name.replace(', ', '-')}.json"
    command = [
        sys.executable, "-m", "shardfold", "bench", *arguments, "--device", asked.device, "--ranks", str(asked.ranks),
        "--json", str(file), "--markdown", "--within", f"{seconds:.0f}", "--timeout", f"{max(seconds, LEAST):.0f}",
        "--without", "deepspeed-*,torch-*," + VARIANTS if asked.device == SIM else VARIANTS,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not file.exists():
        said = (done.stdout + done.stderr).splitlines()[-LAST_LINES:]
        raise Outcome(f"the command ended with status {done.returncode}", "\n".join(said))
    if asked.device == SIM:
        notes.not_run(f"{name}: the peers", "they are not run on the simulated device")
    record = json.loads(file.read_text(encoding="utf-8"))
    for case in cases(name, record):
        notes.case(case)
    for who in record["not_started"]:
        notes.not_run(f"{name}: {who}", f"not started, as three quarters of its {seconds:.0f} s were over")
    for who, why in record["left_out"].items():
        notes.not_run(f"{name}: {who}", why)
    loss = record["loss"]
    figures = {"largest difference": loss["largest_relative_difference"]} if loss else {}
    if done.returncode:
        said = done.stdout.splitlines()[-LAST_LINES:]
        raise Outcome("the losses disagree, or nothing ran to its end", "\n".join(said), **figures)
    return "losses compared" if loss else "", figures


def cases(job: str, record: dict[str, Any]) -> list[Case]:
    """A case per contender: ours must run, a peer that does not is no failure of ours and is noted as it is."""
    from shardfold.tools.bench.contenders import find

    found = [
        Case(
            name=f"{job}: {row['name']}", verdict=PASSED,
            figures={
                "step, ms": round(1e3 * row["step"], 2), "ratio": round(row["ratio"], 3),
                **{name: human(row[name]) for name in ("held", "peak") if row[name] is not None},
            },
            says=f"ratios to {record['reference']}" if row["name"] == record["reference"] else "",
        )
        for row in record["rows"]
    ]  # fmt: skip
    for name, failure in record["failures"].items():
        verdict = FAILED if find(name).ours else "skipped"
        found.append(Case(name=f"{job}: {name}", verdict=verdict, says=failure["reason"], detail=failure["said"]))
    return found
