"""Runs many draws: ``python -m tests.draws --count 3000 --seed 0``, or ``--only 1234`` one of them.

It prints how many ran, which sentences refused others, and the number of each that failed. What fails is made smaller
and printed as a script that repeats it by itself; ``--keep FOLDER`` writes these there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from shardfold.testing import Ranks
from tests.draws.drawn import Outcome, make_draw, try_out
from tests.draws.script import script
from tests.draws.shrink import shrink

RANKS = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.draws", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first")
    parser.add_argument("--only", type=int, help="this one only")
    parser.add_argument(
        "--shrink", type=float, default=120.0, metavar="SECONDS", help="for each that fails; 0: not at all"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where scripts of what fails are written")
    parser.add_argument("--caught", action="store_true", help="print how many fail, and nothing else")
    return parser.parse_args()


def report(number: int, outcome: Outcome, given: argparse.Namespace, ranks: Ranks) -> None:
    print(f"draw {number} failed: {outcome.said.partition(chr(10))[0][:400]}", flush=True)
    if not given.shrink:
        return
    draw, less = shrink(make_draw(number), outcome, lambda draw: try_out(draw, ranks), given.shrink)
    text = script(draw, f"Draw {number}: {less.said.partition(chr(10))[0][:300]}".replace('"""', "'''"))
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        (given.keep / f"draw_{number}.py").write_text(text, encoding="utf-8")
    print(f"  smaller: {draw.text()}\n  {less.said.partition(chr(10))[0][:400]}", flush=True)
    if given.keep is None:
        print(text, flush=True)


def main() -> int:
    given = arguments()
    numbers = [given.only] if given.only is not None else range(given.seed, given.seed + given.count)
    kinds, sentences, failed = Counter[str](), Counter[str](), list[int]()
    begun = time.monotonic()
    with Ranks(RANKS) as ranks:
        for number in numbers:
            outcome = try_out(make_draw(number), ranks)
            kinds[outcome.kind] += 1
            if outcome.kind in ("refused", "void"):
                sentences[f"{outcome.kind}: {outcome.said}"] += 1
            elif outcome.kind == "failed":
                failed.append(number)
                if not given.caught:
                    report(number, outcome, given, ranks)
    if not given.caught:
        for said, count in sentences.most_common():
            print(f"{count:5} {said[:300]}")
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{len(numbers)} draws in {time.monotonic() - begun:.0f} s: {said}" + f" {failed}" * bool(failed), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
