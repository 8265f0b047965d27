"""Ctrl-C ends the command in one sentence and with status 130, whatever it falls into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardfold import launch
from shardfold.tools import cli
from shardfold.tools.interruption import INTERRUPTION, SENTENCE

PACKAGES = Path(launch.__file__).parents[2]
SWALLOWS = """
import os, signal, time
try:
    {interrupts}
    for _ in range(3000):
        time.sleep(0.01)
except BaseException:
    pass  # as packages do that try others
print("went on", flush=True)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python that finds modules of the folder before all others."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = os.pathsep.join([str(folder), str(PACKAGES)])
    return subprocess.run(
        [sys.executable, "-P", *arguments] if sys.version_info >= (3, 11) else [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": paths}, cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("procs", "interrupts"),
    [("1", "signal.raise_signal(signal.SIGINT)"), ("3", "os.kill(os.getppid(), signal.SIGINT)")],
)
def test_an_import_that_swallows_it_does_not_go_on(tmp_path: Path, procs: str, interrupts: str) -> None:
    """PyTorch is imported, in this process or in ranks whose launcher is interrupted, and would go on."""
    (tmp_path / "torch.py").write_text(SWALLOWS.format(interrupts=interrupts))
    done = run(tmp_path, "-m", "shardfold", "train", "--size", "tiny", "--procs", procs, "--out", "run")
    assert (done.returncode, done.stdout, done.stderr) == (launch.INTERRUPTED, "", SENTENCE)
    assert not (tmp_path / "run").exists()


def test_it_is_held_back_from_ranks_that_have_not_begun(tmp_path: Path) -> None:
    """One that reaches them before Python runs the command is no traceback of Python's own start."""
    start = "import os, signal\nif 'RANK' in os.environ: os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "sitecustomize.py").write_text(start)
    (tmp_path / "torch.py").write_text("print('went on', flush=True)")
    done = run(tmp_path, "-m", "shardfold", "train", "--size", "tiny", "--procs", "2", "--out", "run")
    assert (done.returncode, done.stdout, done.stderr) == (launch.INTERRUPTED, "", SENTENCE)


LATER = """
import contextlib, sys, time
from shardfold.tools.interruption import INTERRUPTION
INTERRUPTION.install()
try:
    import swallows
    while True:
        time.sleep(0.01)
finally:
    print("cleaned up", swallows.__name__)
"""


def test_an_import_in_the_middle_is_waited_for(tmp_path: Path) -> None:
    """What was begun before it is cleaned up: the exception comes behind the import, which sees none."""
    (tmp_path / "swallows.py").write_text(
        SWALLOWS.format(interrupts="signal.raise_signal(signal.SIGINT)").replace("3000", "9")
    )
    done = run(tmp_path, "-c", LATER)
    assert done.stdout == "went on\ncleaned up swallows\n"
    assert done.returncode == -signal.SIGINT and done.stderr.endswith("KeyboardInterrupt\n")


TWICE = """
import signal
from shardfold.tools.interruption import INTERRUPTION
INTERRUPTION.install()
for _ in range(2):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("once")
"""


def test_the_second_ends_at_once(tmp_path: Path) -> None:
    """Also where the first one was swallowed."""
    done = run(tmp_path, "-c", TWICE)
    assert (done.returncode, done.stdout, done.stderr) == (launch.INTERRUPTED, "once\n", SENTENCE)


def test_a_command_says_that_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once, though the parser makes a status of the exception."""

    def interrupt(argv: list[str], procs: int, **_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "launch_local", interrupt)
    monkeypatch.setattr(INTERRUPTION, "received", True)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--out", "run"])
    assert end.value.code == launch.INTERRUPTED
    assert capfd.readouterr() == ("", SENTENCE)
    assert not Path("run").exists()
