"""How processes end: a closed engine leaves no thread of a process group behind, as one that outlives the interpreter
may abort it; and where ranks cannot go on together, all of them end, with status 1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
from functools import partial
import torch
import shardfold as sf

adamw = partial(torch.optim.AdamW, lr=0.1)
engine = sf.Engine(torch.nn.Linear(4, 4), optimizer=adamw, parallel={"inter": 2, "intra": 1})
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
during = len(os.listdir("/proc/self/task"))
engine.close()
after = len(os.listdir("/proc/self/task"))
with open(f"threads-{engine.rank}", "w") as file:
    file.write(f"{during > after} {after}")
"""


@pytest.mark.soak
def test_closing_an_engine_ends_the_threads_of_its_groups(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in range(2)] == ["True 1"] * 2


ALONE = """
import os, sys, time
from functools import partial
from pathlib import Path
import torch
import torch.distributed as dist
import shardfold as sf

here, layout, starts, catches, what = Path(sys.argv[1]), *sys.argv[2:]
if starts == "script":
    dist.init_process_group("gloo")
engine = sf.Engine(
    torch.nn.Linear(4, 1), optimizer=partial(torch.optim.AdamW, lr=0.1), layout=layout,
    runtime=sf.Runtime(patience=3.0, timeout=2.0 if what == "late" else 600.0),
)
kept = dist.group.WORLD  # these references stay
group = dist.new_group() if what == "group" else None

def train(width=4):
    engine.backward(engine(torch.ones(2, width)).mean())
    engine.step()

def refuse(grad):
    raise ValueError("of a hook")

def alone():
    if what == "hook":
        if engine.rank == 0:
            out = engine(torch.ones(2, 4))
            out.register_hook(refuse)  # behind the engine's own, which begins the backward
            engine.backward(out.mean())
    elif what == "shape":
        train(4 if engine.rank == 0 else 3)
    elif engine.rank == 1:
        while what == "late" and not (here / "rank 0 gave up").exists():
            time.sleep(0.1)
    elif what in ("save", "group"):
        engine.save(here / "checkpoint", wait=True)
    else:
        train()

train()
try:
    alone()
except Exception as error:
    (here / f"rank {engine.rank} gave up").touch()
    print("RAISED", type(error).__name__, error, flush=True)
    if catches == "raises" and engine.rank == 0:
        raise
dist.barrier(group)
print("past the barrier", flush=True)
"""


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("layout", "starts", "catches", "what"),
    [
        ("ddp", "script", "raises", "hook"),
        ("ddp", "script", "raises", "save"),
        ("zero3", "script", "catches", "step"),
        pytest.param("ddp", "script", "catches", "shape", marks=pytest.mark.soak),
        ("zero3", "engine", "raises", "step"),
        pytest.param("ddp", "engine", "raises", "group", marks=pytest.mark.soak),
        pytest.param("zero3", "script", "raises", "late", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_wait_for_each_other_in_vain_end(
    tmp_path: Path, layout: str, starts: str, catches: str, what: str
) -> None:
    """Rank 0 saves or trains alone, gave up when rank 1 comes late, or fails in a backward before it knows that rank 1
    is not in it, and rank 1 stands in a barrier of the script's:
    both end with status 1 and say why, whoever started the group and whatever still refers to it."""
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    here = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), layout, starts, catches, what],
            env={**here, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1], said
    assert not any("past the barrier" in text for text in said), said
    if what == "late":
        assert "CollectiveError" in said[0] and "did not finish within 2 s" in said[0], said
        return
    if what == "hook":
        assert "ValueError: of a hook" in said[0], said
        return
    assert "RAISED OrderError no rank can go on" in said[0] and "leaves all process groups" in said[0], said
    assert "OrderError: no rank can go on" in said[1], said
    if catches == "catches":  # the first error stays in sight
        assert said[0].index("no rank can go on") < said[0].index("has not been initialized"), said
