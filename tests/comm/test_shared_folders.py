"""What ranks have in shared memory is there as long as they are, and no longer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardfold.comm.launcher_notes import MARK
from shardfold.comm.shared_folders import SharedFolder, remove_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux")

HOLDS = """
import sys, time
from shardfold.comm.shared_folders import SharedFolder
shared = SharedFolder.with_room(1)
(shared.path / "states").write_text("of this rank")
print(shared.path, flush=True)
time.sleep(600)
"""
LAUNCHES = f"""
import os, subprocess, sys, time
from shardfold.launch.leftovers import Leftovers
leftovers = Leftovers()
subprocess.Popen([sys.executable, "-c", {HOLDS!r}], env={{**os.environ, {MARK!r}: leftovers.mark}})
time.sleep(600)
"""


def begun(code: str) -> tuple[subprocess.Popen[str], Path]:
    """A process, and a folder that it, or one that it has started, has."""
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    return running, Path(running.stdout.readline().strip())


def test_what_is_left_is_removed_and_what_is_in_use_is_not() -> None:
    own = SharedFolder.with_room(1)
    running, folder = begun(HOLDS)
    try:
        remove_left()
        assert own.path.is_dir() and (folder / "states").read_text() == "of this rank"
        running.kill()
        running.wait()
        assert folder.is_dir()
        remove_left()
        assert own.path.is_dir() and not folder.exists()
    finally:
        running.kill()
        running.communicate()
        own.drop()
    assert not own.path.exists()


def test_a_folder_goes_with_a_launcher_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever waits for the launcher's end removes it, once the rank is gone."""
    monkeypatch.delenv(MARK, raising=False)
    running, folder = begun(LAUNCHES)
    try:
        assert folder.is_dir() and folder.stat().st_mode & 0o77 == 0
        running.kill()
        running.wait()
        deadline = time.monotonic() + 30
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not folder.exists()
    finally:
        running.kill()
        running.communicate()
