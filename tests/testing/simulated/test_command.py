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


@pytest.mark.soak
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


@pytest.mark.soak
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


FORKS = """
import os
import sys
import torch
from shardfold.testing.simulated import simulated

with simulated(sys.argv[1], lag=1000):
    x = torch.ones(4, device="sim")
    for _ in range(100):
        x = x + 1
    child = os.fork()
    if not child:
        torch.manual_seed(0)
        print((torch.ones(1) * 2).item(), flush=True)  # the CPU is there
        x[0].item()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), x[0].item())
"""


@pytest.mark.soak
@pytest.mark.parametrize("mode", [pytest.param("check", marks=pytest.mark.soak), "lazy"])
def test_a_forked_process_is_refused(tmp_path: Path, mode: str) -> None:
    """It is told in one sentence, ends with its own traceback only, and does not hang; the CPU is there for it, and
    its parent goes on."""
    if not is_supported():
        pytest.skip("this version of PyTorch lacks what the simulated device is made of")
    (tmp_path / "forks.py").write_text(FORKS)
    command = [sys.executable, "forks.py", mode]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "2.0\n1 101.0\n", done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "UsageError: The simulated device cannot be used in a forked process" in done.stderr


@pytest.mark.soak
def test_wrong_arguments_get_a_sentence(tmp_path: Path) -> None:
    """A file that is not there, and a lag below 1; nothing is started."""
    for arguments, said in ((("gone.py",), "there is no file gone.py"), (("--lag", "0", "x.py"), "--lag 0: it is")):
        done = run(*arguments, folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
