"""The tests under other versions of PyTorch and Python: ``make matrix``.

Each pair gets an environment of its own under ``.matrix``, with the package and its tools as pip resolves them there,
and runs the part of the tests that touches PyTorch's inside. PyPI's PyTorch is the CUDA build: several GB for each
pair. What a version is known to do otherwise is skipped by the test itself, with a sentence.

    python tests/support/matrix.py --torch 2.11.0 2.15.0 --python python3.10 python3.13
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[2]
VERSIONS = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
FILES = [
    "house/test_torch_internals.py", "engine/test_engine.py", "comm/test_near.py", "sharding/test_freed.py",
    "optim/test_steps.py", "numerics/test_clipping.py", "numerics/test_scaling.py", "training/test_compile.py",
    "activations/test_modes.py", "checkpoint/test_failures.py", "sharding/test_sharded_init.py",
    "training/test_loops.py", "training/test_graphs.py", "engine/test_user_hooks.py",
    "checkpoint/test_state_dicts.py", "checkpoint/test_export.py", "launch/test_local.py",
    "compat/test_initialize.py", "optim/test_schedules.py", "engine/test_one_rank.py", "sharding/test_copies.py",
    "testing/simulated",
]  # fmt: skip
LAST = re.compile(r"=* ?((?:\d+ (?:failed|passed|skipped|errors?|deselected|warnings?)(?:, )?)+) in ([\d.]+)s")


def made(python: str, torch: str, pip: list[str]) -> Path:
    """The interpreter of an environment with both; it is kept for the next time."""
    folder = ROOT / ".matrix" / f"{Path(python).name}-{torch}"
    executable = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        install = [executable, "-m", "pip", "install", "--quiet", *pip]
        subprocess.run([*install, f"torch=={torch}", "-e", f"{ROOT}[dev]"], check=True)
        (folder / ".ready").touch()
    return executable


def ran(executable: Path, log: Path, jobs: int) -> str:
    """Runs the tests and gives pytest's last line."""
    command = [executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "worksteal"]
    files = [f"tests/{name}" for name in FILES]
    with open(log, "w") as out:
        subprocess.run(
            [*command, *files], check=False, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
    lines = [found for line in log.read_text().splitlines() if (found := LAST.search(line))]
    return lines[-1][1].strip(", ") if lines else f"ended early: {log}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", nargs="+", default=VERSIONS)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--pip", nargs="*", default=[], help="more arguments of pip install")
    options = parser.parse_args()
    rows: list[tuple[str, str, str, float]] = []
    for python in options.python:
        for torch in options.torch:
            begun = monotonic()
            try:
                executable = made(python, torch, options.pip)
                said = ran(executable, ROOT / ".matrix" / f"{Path(python).name}-{torch}.log", options.jobs)
            except subprocess.CalledProcessError as error:
                said = f"not installed (pip ended with {error.returncode})"
            rows.append((Path(python).name, torch, said, monotonic() - begun))
            print("{:<12} torch {:<8} {}  ({:.0f} s)".format(*rows[-1]), flush=True)
    return int(any("failed" in said or "error" in said or "passed" not in said for _, _, said, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
