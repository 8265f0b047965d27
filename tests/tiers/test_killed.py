"""Training with states on disk that is killed at any moment, and goes on from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KILLS = os.environ.get("SHARDFOLD_TEST_KILLS", "10")


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "ranks"), [("zero2", "2"), ("zero3", "1")])
def test_training_goes_on_behind_a_kill(layout: str, ranks: str) -> None:
    """The last checkpoint loads, all that follows is equal to the bit to a run that nobody killed, other ranks end, and
    neither a file nor space stays behind; see ``tests/support/killing.py``."""
    command = [sys.executable, "-m", "tests.support.killing", "--times", KILLS, "--layout", layout, "--ranks", ranks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60 * int(KILLS) + 120)
    assert done.returncode == 0 and "all equal to a run without kills" in done.stdout, done.stdout + done.stderr
