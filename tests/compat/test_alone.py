"""Every module of DeepSpeed's face is imported first and alone, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "shardfold" / "compat"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "deepspeed").rglob("*.py")
)

#: One process has torch, which is what takes long, and nothing of shardfold. It forks for each module.
SERVER = """
import json, os, sys, traceback
import torch, torch.distributed, torch.optim, torch.utils.checkpoint, torch.utils.data, torch.utils.flop_counter
assert not [name for name in sys.modules if name.startswith("shardfold")]

def alone(name):
    import importlib
    import shardfold.compat
    shardfold.compat.install()
    module = importlib.import_module(name)
    for each in dir(module):
        getattr(module, each)

failed = {}
for name in json.load(sys.stdin):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            alone(name)
        except BaseException:
            os.write(writes, traceback.format_exc()[-2000:].encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as said:
        if why := said.read():
            failed[name] = why
    os.waitpid(child, 0)
json.dump(failed, sys.stdout)
"""


def failures(modules: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SERVER], input=json.dumps(modules),
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.soak
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in (1, 2))])
def test_every_module_is_imported_first_and_alone(part: int):
    """And so is each of its public names asked for."""
    assert len(MODULES) > 120
    assert failures(MODULES[part::3]) == {}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["runtime.zero.partition_parameters", "zero", "utils.zero_to_fp32", "runtime.engine"])
def test_an_interpreter_begins_with_a_module(name: str):
    """Nothing is loaded before, torch included."""
    script = f"import shardfold.compat as c; c.install(); import deepspeed.{name}"
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0
