"""Runs the numerical tests as another CPU would compute: `make numerics`.

`python tests/support/numerics.py [PATTERN ...]` runs some of the files only.

PyTorch chooses its kernels by what the CPU can do, MKL does so too, and the number of threads says where sums are cut.
A tolerance that follows from the arithmetic holds under all of them; one that was read off a machine does not. Each
setting that this CPU has runs the files below in processes of its own, and a table says what passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

FILES = (
    "activations/test_fit.py", "activations/test_memory.py", "checkpoint/test_resume.py",
    "checkpoint/test_state_dicts.py", "engine/test_engine.py", "engine/test_one_rank.py", "engine/test_user_hooks.py",
    "nn/test_batchnorm.py", "nn/test_cross_entropy.py", "nn/test_moe.py", "numerics/test_clipping.py",
    "numerics/test_scaling.py", "numerics/test_token_weights.py", "optim/test_average.py", "optim/test_schedules.py",
    "optim/test_sharded.py", "optim/test_steps.py", "parallel/test_optimizers.py", "parallel/test_ring.py",
    "planner/test_division.py", "planner/test_memory.py", "planner/test_moved.py", "planner/test_repeats.py",
    "sharding/test_copies.py", "sharding/test_gathered.py", "sharding/test_materialize.py",
    "sharding/test_rebuild.py", "sharding/test_rebuild_values.py", "tools/recipes/test_gpt.py",
    "training/test_divergence.py", "training/test_dtypes.py", "training/test_evaluation.py",
    "training/test_fsdp2_equal.py", "training/test_generation.py", "training/test_graphs.py",
    "training/test_inputs.py", "training/test_ordinary.py", "training/test_peak.py", "training/test_precision.py",
    "training/test_same_training.py", "training/test_transformers.py",
)  # fmt: skip
LEVELS = ("DEFAULT", "AVX2", "AVX512")
AMD = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""As an AMD CPU without AVX-512 computes, where MKL takes no kernels of Intel's and oneDNN has none for 16 bits."""


def settings() -> list[dict[str, str]]:
    """Those that this CPU can run: asking PyTorch for kernels beyond them ends in an illegal instruction."""
    best = torch.backends.cpu.get_cpu_capability()
    levels = LEVELS[: LEVELS.index(best) + 1] if best in LEVELS else LEVELS[:1]
    found: list[dict[str, str]] = [{}]
    found += [{"ATEN_CPU_CAPABILITY": level.lower()} for level in levels]
    if torch.backends.mkl.is_available():
        found += [{"MKL_CBWR": level} for level in ("COMPATIBLE", *levels[1:])]
    if "AVX2" in levels:
        found.append(AMD)
    return [*found, {"SHARDFOLD_TEST_THREADS": "2"}]


def run(setting: dict[str, str], files: list[str], jobs: str) -> tuple[bool, str]:
    """Runs the files under a setting; the end of pytest's output where something failed, and its last line."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        jobs,
        "--dist",
        "worksteal",
        "--no-header",
        "--tb=line",
        *files,
    ]
    done = subprocess.run(command, env={**os.environ, **setting}, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    for line in lines if done.returncode else ():
        if line.startswith(("FAILED", "ERROR")):
            print(f"    {line}", flush=True)
    return done.returncode == 0, lines[-1].strip("= ")


def main(patterns: list[str]) -> int:
    folder = Path(__file__).parents[1]
    names = [name for name in FILES if not patterns or any(re.search(p, name) for p in patterns)]
    files = [str(folder / name) for name in names]
    print(f"{torch.backends.cpu.get_cpu_capability()}, {len(files)} files", flush=True)
    rows: list[tuple[str, str]] = []
    failed = 0
    for setting in settings():
        begun = time.monotonic()
        passed, said = run(setting, files, os.environ.get("JOBS", "3"))
        failed += not passed
        name = " ".join(f"{key}={value}" for key, value in setting.items()) or "as it is"
        rows.append((name, re.sub(r" in [\d.]+s.*", "", said) + f" in {time.monotonic() - begun:.0f} s"))
        print(f"{rows[-1][0]:<28} {rows[-1][1]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
