"""A program of yours on the simulated device: ``python -m shardfold.testing.simulated script.py ARGUMENTS``.

    python -m shardfold.testing.simulated [--mode check|lazy] [--seed N] [--lag N] [--memory BYTES]
                                          (SCRIPT | -m MODULE) [ARGUMENTS]

The device ``sim`` is there before the program's first line. What was found is printed when the program ends by itself,
and is the status 1.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from shardfold.plan.checks import parse_bytes
from shardfold.testing.simulated.simulation import MODES, RacesFound, simulated

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shardfold.testing.simulated", description="Run a program on the simulated device."
    )
    parser.add_argument("--mode", choices=MODES, default="check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, default=64, help="how many operations the device may stay behind, in lazy")
    parser.add_argument("--memory", help="how many bytes the device has, as in 64MiB; without it, as many as needed")
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is the name of a module")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.lag < 1:
        parser.error(f"--lag {given.lag}: it is a number of operations, at least 1")
    if given.memory is not None and parse_bytes(given.memory) is None:
        parser.error(f"--memory {given.memory}: it is a number of bytes, as in 64MiB")
    if not given.module and not Path(given.program).exists():
        parser.error(f"there is no file {given.program}: name a script, or a module with -m")
    sys.argv = [given.program, *given.arguments]
    with simulated(given.mode, seed=given.seed, lag=given.lag, memory=given.memory) as sim:
        if given.module:
            runpy.run_module(given.program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(given.program).resolve().parent))
            runpy.run_path(given.program, run_name="__main__")
        try:
            sim.expect_clean()
        except RacesFound as found:
            sys.exit(str(found))


if __name__ == "__main__":
    main()
