"""A closed engine leaves no thread of a process group behind: one that outlives the interpreter may abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
from functools import partial
import torch
import shardfold as sf

engine = sf.Engine(torch.nn.Linear(4, 4), optimizer=partial(torch.optim.AdamW, lr=0.1), mesh={"inter": 2, "intra": 1})
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
during = len(os.listdir("/proc/self/task"))
engine.close()
print("threads", during > len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/task")))
"""


def test_closing_an_engine_ends_the_threads_of_its_groups(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        check=False, capture_output=True, text=True, timeout=120, env=None,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("threads True 1") == 2, run.stdout
