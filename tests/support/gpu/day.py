"""Runs the sections, each in a process of its own and in its time, and gives the report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.support.gpu.report import Day, NotRun, Section, judged
from tests.support.gpu.section import SECTIONS, Asked

__all__ = ["GRACE", "ROOT", "day", "run_section"]

ROOT = Path(__file__).parents[3]
GRACE = 20.0  # seconds that a section has beyond its time to end what it is in; then its processes are killed
LAST_LINES = 25  # of the standard error of a section that died

#: Before CUDA starts: without the first, asking whether there is a device makes a process unfit to be forked; with the
#: second, products on several streams are the same in every run.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}


def day(
    *, title: str, command: str, device: str, ranks: int, limit: float, small: bool, only: Sequence[str] = (),
    told: Callable[[str], object] = print,
) -> Day:  # fmt: skip
    """Runs the sections one after the other.

    Args:
        title, command: for the report.
        device: type of the devices.
        ranks: processes.
        limit: seconds for all; what a section does not use, the later ones have.
        small: whether sizes are those of a rehearsal.
        only: names of sections; none: all.
        told: is given a line as each ends.
    """
    begun, date = time.monotonic(), datetime.now().astimezone().isoformat(timespec="minutes")
    names = [name for name in SECTIONS if not only or name in only]
    sections: list[Section] = []
    with tempfile.TemporaryDirectory(prefix="shardfold-gpu-") as folder:
        for place, name in enumerate(names):
            left = limit - (time.monotonic() - begun)
            rest = sum(SECTIONS[each][1] for each in names[place:])
            share = max(0.0, left - GRACE) * SECTIONS[name][1] / rest
            asked = Asked(device=device, ranks=ranks, seconds=share, folder=folder, small=small)
            section = run_section(name, SECTIONS[name][0], asked)
            sections.append(section)
            told(f"{section.title}: {section.verdict} in {section.seconds:.0f} s. {section.says}")
    left_out = tuple(NotRun(what=SECTIONS[name][0], why="not asked for") for name in SECTIONS if name not in names)
    if left_out:
        sections.append(
            judged("others", "Other sections", [{"not_run": vars(each)} for each in left_out], ended=None, said="",
                   seconds=0.0, share=0.0)
        )  # fmt: skip
    seconds = time.monotonic() - begun
    return Day(title=title, command=command, date=date, seconds=seconds, limit=limit, sections=tuple(sections))


def run_section(
    name: str, title: str, asked: Asked, *, command: Sequence[str] | None = None, grace: float = GRACE
) -> Section:
    """Runs one section in a process and a session of its own, all of which is gone afterwards.

    Args:
        name, title: of it.
        asked: what it is asked.
        command: to start it; None: that of this package.
        grace: seconds beyond its time until it is killed.
    """
    command = command or [sys.executable, "-c", "from tests.support.gpu.section import main; main()", name]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(os.environ, asked.device), stdin=subprocess.PIPE,
            stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip
        ended: str | None = None
        try:
            process.communicate(json.dumps(asked.as_json()).encode(), timeout=asked.seconds + grace)
            ended = _how(process.returncode)
        except subprocess.TimeoutExpired:
            ended = f"did not end {grace:.0f} s beyond its {asked.seconds:.0f} s, and was killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started ends with it
            process.wait()
        errors.seek(0)
        said = "\n".join(errors.read().decode(errors="replace").splitlines()[-LAST_LINES:])
    notes = _read(Path(asked.folder) / f"{name}.jsonl")
    seconds = time.monotonic() - begun
    return judged(name, title, notes, ended=ended, said=said, seconds=seconds, share=asked.seconds)


def _environment(given: Mapping[str, str], device: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    return {**given, **ENVIRONMENT, "PYTHONPATH": path, "SHARDFOLD_TEST_DEVICE": device}


def _how(status: int) -> str | None:
    if status == 0:
        return None
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _read(file: Path) -> list[dict[str, Any]]:
    """The notes; the last line of a process that was killed may be torn."""
    found: list[dict[str, Any]] = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found
