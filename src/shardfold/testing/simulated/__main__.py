"""A program of yours on the simulated device: ``python -m shardfold.testing.simulated script.py ARGUMENTS``.

    python -m shardfold.testing.simulated [--mode check|lazy] [--seed N] (SCRIPT | -m MODULE) [ARGUMENTS]

The device ``sim`` is there before the program's first line. What was found is printed when the program ends by itself,
and is the status 1.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from shardfold.testing.simulated.simulation import MODES, RacesFound, simulated

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shardfold.testing.simulated", description="Run a program on the simulated device."
    )
    parser.add_argument("--mode", choices=MODES, default="check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is the name of a module")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    sys.argv = [given.program, *given.arguments]
    with simulated(given.mode, seed=given.seed) as sim:
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
