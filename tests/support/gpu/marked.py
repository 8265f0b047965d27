"""The tests that are marked `gpu`, by pytest, one after the other."""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path
from typing import Any

from tests.support.gpu.day import ROOT
from tests.support.gpu.report import FAILED, PASSED, SKIPPED, Case
from tests.support.gpu.section import Asked, Notes

__all__ = ["marked_files", "run"]

NEEDED = ("pytest", "hypothesis", "psutil")  # what the tests' own set-up imports
SLOW = 60  # seconds that one test has
MARK = re.compile(r"^(pytestmark = |@)pytest\.mark\.gpu\b", re.MULTILINE)


class Recorder:
    """A plugin of pytest: a note per test, and an end when the time is over."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._left: list[str] = []
        self._begun = 0.0

    def pytest_collection_finish(self, session: Any) -> None:
        self._left = [item.nodeid for item in session.items]

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is a failure, as its tests are not known."""
        if report.failed:
            text = report.longreprtext
            says = text.strip().splitlines()[-1]
            self._notes.case(Case(name=report.nodeid, verdict=FAILED, says=says, detail=text))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._begun = time.monotonic()
        self._notes.begins(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test reports its set-up, itself and its clean-up: the first that failed counts, else the test itself."""
        known = report.nodeid in self._left
        if not known or (report.when != "call" and report.passed):
            return
        self._left.remove(report.nodeid)
        verdict = PASSED if report.passed else SKIPPED if report.skipped else FAILED
        text = report.longreprtext
        says = text.strip().splitlines()[-1] if verdict == FAILED and text.strip() else ""
        if verdict == SKIPPED:
            says = str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            self._notes.not_run(report.nodeid, says)
        seconds = {} if verdict == SKIPPED else {"seconds": round(time.monotonic() - self._begun, 1)}
        detail = text if verdict == FAILED else ""
        self._notes.case(Case(name=report.nodeid, verdict=verdict, says=says, figures=seconds, detail=detail))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        if nodeid in self._left:
            self._left.remove(nodeid)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        if self._notes.clock.left <= 0:
            item.session.shouldstop = "the time of the section is over"

    def over(self) -> None:
        """What is left was not reached."""
        clock = self._notes.clock
        why = "pytest ended before" if clock.left > 0 else f"the {clock.seconds:.0f} s of the section were over"
        for nodeid in self._left:
            self._notes.not_run(nodeid, why)


def marked_files() -> list[Path]:
    """Those that have such tests: what other files import may be absent here."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if MARK.search(file.read_text(encoding="utf-8"))]


def run(asked: Asked, notes: Notes) -> None:
    if asked.device == "cpu":
        notes.not_run("all tests", "they need a device")
        return
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        notes.not_run("all tests", f"{', '.join(absent)} is not installed (pip install 'shardfold[dev]')")
        return
    import pytest

    recorder = Recorder(notes)
    command = ["-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--rootdir", str(ROOT)]
    if importlib.util.find_spec("pytest_timeout"):
        command += [f"--timeout={SLOW}"]
    else:  # the settings name options of its own
        command += ["-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]
    status = pytest.main([*command, *map(str, marked_files())], plugins=[recorder])
    recorder.over()
    if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise SystemExit(int(status))
