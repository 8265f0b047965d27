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
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.support.gpu.report import SKIPPED, Case, Day, NotRun, Section, judged
from tests.support.gpu.section import Asked, Part

__all__ = ["GRACE", "ROOT", "day", "run_section"]

ROOT = Path(__file__).parents[3]
GRACE = 20.0  # seconds that a section has beyond its time to end what it is in; then its processes are killed
OFTEN = 5.0  # seconds after which what a section has found so far is told
UNDER_WAY = "under way when this was written"
LAST_LINES = 25  # of the standard error of a section that died

#: Before CUDA starts: without it, asking whether there is a device makes a process unfit to be forked.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: So that products on several streams are the same in every run.
SAME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}


def day(
    parts: Mapping[str, Part], *, title: str, command: str, device: str, ranks: int, limit: float, small: bool,
    out: Path, only: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    told: Callable[[str], object] = print, kept: Callable[[Day], object] = lambda _: None,
) -> Day:  # fmt: skip
    """Runs the sections one after the other.

    Args:
        parts: the sections.
        title, command: for the report.
        device: type of the devices.
        ranks: processes.
        limit: seconds for all; what a section does not use, the later ones have.
        small: whether sizes are those of a rehearsal.
        out: folder of the report, in which sections may leave pictures.
        only: names of sections; none: all.
        environment: of their processes, besides :data:`ENVIRONMENT`; None: :data:`SAME`.
        told: is given a line as each ends.
        kept: is given what there is so far every few seconds, and at the end of each, so that a run that is cut short
            leaves a report.
    """
    begun, date = time.monotonic(), datetime.now().astimezone().isoformat(timespec="minutes")
    names = [name for name in parts if not only or name in only]
    sections: list[Section] = []

    def so_far(more: Iterable[Section] = ()) -> Day:
        return Day(title=title, command=command, date=date, seconds=time.monotonic() - begun, limit=limit,
                   sections=(*sections, *more))  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="shardfold-gpu-") as folder:
        for place, name in enumerate(names):
            left = limit - (time.monotonic() - begun)
            rest = sum(parts[each].share for each in names[place:])
            share = max(0.0, left - GRACE) * parts[name].share / rest
            asked = Asked(
                device=device, ranks=ranks, seconds=share, folder=folder, small=small, out=str(out), name=name
            )
            section = run_section(
                name, parts[name], asked, environment=SAME if environment is None else environment,
                meanwhile=lambda found: kept(so_far([found])),
            )  # fmt: skip
            sections.append(section)
            kept(so_far())
            told(f"{section.title}: {section.verdict} in {section.seconds:.0f} s. {section.says}")
    left_out = tuple(NotRun(what=parts[name].title, why="not asked for") for name in parts if name not in names)
    if left_out:
        sections.append(
            judged("others", "Other sections", [{"not_run": vars(each)} for each in left_out], ended=None, said="",
                   seconds=0.0, share=0.0)
        )  # fmt: skip
    return so_far()


def run_section(
    name: str, part: Part, asked: Asked, *, command: Sequence[str] | None = None, grace: float = GRACE,
    environment: Mapping[str, str] = SAME, meanwhile: Callable[[Section], object] = lambda _: None,
) -> Section:  # fmt: skip
    """Runs one section in a process and a session of its own, all of which is gone afterwards.

    Args:
        name, part: of it.
        asked: what it is asked.
        command: to start it; None: that of this package.
        grace: seconds beyond its time until it is killed.
        environment: of its process.
        meanwhile: is given what it has found so far every few seconds.
    """
    start = "from tests.support.gpu.section import main; main()"
    command = command or [sys.executable, "-c", start, part.module or name]
    begun = time.monotonic()
    file = Path(asked.folder) / f"{name}.jsonl"

    def section(ended: str | None, said: str, *more: Mapping[str, Any]) -> Section:
        return judged(name, part.title, [*_read(file), *more], ended=ended, said=said,
                      seconds=time.monotonic() - begun, share=asked.seconds)  # fmt: skip

    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment({**os.environ, **environment}, asked.device), stdin=subprocess.PIPE,
            stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip
        ended: str | None = None
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as asking:
                asking.write(json.dumps(asked.as_json()).encode())
            while (left := begun + asked.seconds + grace - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(OFTEN, left))
                    break
                meanwhile(section(None, "", {"case": vars(Case(name="the rest", verdict=SKIPPED, says=UNDER_WAY))}))
            late = f"did not end {grace:.0f} s beyond its {asked.seconds:.0f} s, and was killed"
            ended = late if process.poll() is None else _how(process.returncode)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started ends with it
            process.wait()
        errors.seek(0)
        said = "\n".join(errors.read().decode(errors="replace").splitlines()[-LAST_LINES:])
    return section(ended, said)


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
