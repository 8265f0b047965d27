"""`python -m shardfold.testing.simulated PROGRAM`: the device is there, what is found is printed and is the status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardfold.testing.simulated import is_supported

PROGRAM = """
import sys
import torch

side = torch.sim.Stream()
x = torch.ones(4, device="sim")
if sys.argv[1] == "--wait":
    side.wait_stream(torch.sim.current_stream())
with torch.sim.stream(side):
    y = x * 2
print(__name__, sys.argv[1:])
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardfold.testing.simulated", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_a_program_runs_as_it_is_and_its_races_are_its_status(tmp_path: Path) -> None:
    """A script that waits ends well, with its own arguments; as a module and without the wait it ends with 1 and says
    which two lines nothing orders."""
    if not is_supported():
        pytest.skip("this version of PyTorch lacks what the simulated device is made of")
    (tmp_path / "program.py").write_text(PROGRAM)
    right = run("program.py", "--wait", "2", folder=tmp_path)
    assert (right.returncode, right.stdout) == (0, "__main__ ['--wait', '2']\n"), right.stderr
    wrong = run("-m", "program", "now", folder=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (1, "__main__ ['now']\n"), wrong.stderr
    assert "program.py:10" in wrong.stderr and "program.py:6" in wrong.stderr
