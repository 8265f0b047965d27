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
after = len(os.listdir("/proc/self/task"))
with open(f"threads-{engine.rank}", "w") as file:
    file.write(f"{during > after} {after}")
"""


def test_closing_an_engine_ends_the_threads_of_its_groups(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in range(2)] == ["True 1"] * 2
