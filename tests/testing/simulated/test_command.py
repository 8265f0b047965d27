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


ENDS = """
import os
import torch
from shardfold.testing.simulated import simulated


def step():
    x = torch.ones(1, device="sim", requires_grad=True)
    x.mul(2).sum().backward()


with simulated():
    threads = {open(f"/proc/self/task/{each}/comm").read().strip(): int(each) for each in os.listdir("/proc/self/task")}
    autograd = next(thread for name, thread in threads.items() if name.startswith("pt_autograd"))
    for thread in (0, autograd):
        os.sched_setaffinity(thread, [min(os.sched_getaffinity(0))])
    step()
    os.sched_setscheduler(autograd, os.SCHED_IDLE, os.sched_param(0))
    step()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux schedules single threads")
def test_a_program_may_end_right_behind_its_backward(tmp_path: Path) -> None:
    """Autograd's thread runs only when nothing else does, and so is still behind its last backward when the
    interpreter ends: without a wait for it, some of such processes end by SIGABRT."""
    if not is_supported():
        pytest.skip("this version of PyTorch lacks what the simulated device is made of")
    (tmp_path / "ends.py").write_text(ENDS)
    for _ in range(4):
        ended = subprocess.run([sys.executable, "ends.py"], cwd=tmp_path, capture_output=True, check=False, timeout=120)
        assert ended.returncode == 0, ended.stderr.decode()
