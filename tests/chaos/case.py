"""What is run, what strikes it, and when: drawn by a number, or read from a line.

python -m tests.chaos.case 17 100..199 pairwise
python -m tests.chaos.case "layout=zero3 ranks=3 fault=kill moment=backward part=0.5 victim=last"
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

STEPS = 6
"""Updates of a run."""
LAYOUTS = {
    "ddp": (2, 3, 4),
    "zero1": (2, 3, 4),
    "zero2": (2, 3, 4),
    "zero3": (2, 3, 4),
    "fsdp2": (2, 3, 4),
    "hsdp": (4,),
    "hpz": (4,),
    "offload": (2, 3),
    "infinity": (2, 3),
    "disk": (2, 3),
    "stages": (2, 4),
}
"""By name, among how many ranks."""
PLACES = ("begin", "made", "between", "saving", "gathered", "evaluation", "closed")
"""Moments that are no operation."""
SECTIONS = ("forward", "backward", "last", "step")
MOMENTS = (*PLACES, *SECTIONS)
LEAVES = ("quit", "return")
"""It ends with status 0 while others train: at once, and as a script ends that is over."""
DEATHS = ("kill", "late", "segv", "exit", *LEAVES, "raise", "child", "oom")
"""Of a rank: now, at any instruction of the next milliseconds, by its own fault, behind a process that it has started,
for want of memory."""
DISKS = ("torn", "eio", "full")
"""The rank dies at a call of the file system in a save, it gets an error there, or there is no room."""
DELAYS = ("pause", "slow", "launcher pause")
NOTICES = ("notice term", "notice usr1", "notice file")
ENDS = ("term", "int", "launcher kill")
HANGS = ("stop", "hang")
"""The process is stopped, or a call in it holds the interpreter and never ends."""
LOOPS = ("loop",)
"""It computes without end, and gives signs of life meanwhile."""
FAULTS = (*DEATHS, *HANGS, *LOOPS, *DISKS, *DELAYS, *NOTICES, *ENDS)
CHOICES: dict[str, tuple[object, ...]] = {
    "layout": tuple(LAYOUTS),
    "ranks": (2, 3, 4),
    "fault": FAULTS,
    "moment": MOMENTS,
    "step": (0, 1, 3),
    "victim": ("first", "second", "last"),
    "saves": ("none", "each", "beside"),
    "restarts": (0, 2),
    "launcher": ("run", "train"),
    "again": ("", "begin", "loading"),
}
"""What a case may be made of, each by itself."""


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        layout: a name of ``LAYOUTS``.
        ranks: how many.
        fault: what strikes.
        moment: a place in a rank's work, or a section of the program.
        step: number of updates that were done then.
        victim: the rank that is struck.
        saves: ``none``; ``each``: behind each step, before the next one; ``beside``: behind each second one, meanwhile.
        restarts: how often ranks are started again.
        launcher: ``run`` is that of scripts, ``train`` that of the library's own commands.
        again: where the rank is struck once more, in the attempt behind the first; "": nowhere.
        part: how far the section has come: 0 is its first operation, 1 its last.
        call: of the file system, at which faults of disks strike.
    """

    layout: str = "zero3"
    ranks: int = 3
    fault: str = "kill"
    moment: str = "backward"
    step: int = 1
    victim: str = "second"
    saves: str = "each"
    restarts: int = 0
    launcher: str = "run"
    again: str = ""
    part: float = 0.3
    call: int = 9

    def __str__(self) -> str:
        return " ".join(f"{each.name}={getattr(self, each.name)}".replace(" ", "-") for each in fields(self))

    @classmethod
    def read(cls, line: str) -> Case:
        given: dict[str, object] = {}
        kinds = {each.name: type(each.default) for each in fields(cls)}
        for word in line.split():
            name, _, value = word.partition("=")
            given[name] = kinds[name](value)
        if "fault" in given:
            given["fault"] = str(given["fault"]).replace("-", " ")
        return cls(**given)  # pyright: ignore[reportArgumentType]

    @property
    def struck(self) -> int:
        """The victim's number."""
        return {"first": 0, "second": 1, "last": self.ranks - 1}[self.victim]

    @property
    def patience(self) -> float:
        """Short where it is waited for, and long where nothing is to be given up."""
        return {"stop": 1.0, "hang": 3.0}.get(self.fault, 10.0)

    @property
    def timeout(self) -> float:
        """Of a collective: the longest that others wait for a rank that computes."""
        return 3.0 if self.fault in LOOPS else 1800.0

    @property
    def waits(self) -> float:
        """Seconds for which others may wait for the rank that is struck."""
        return self.timeout if self.fault in LOOPS else self.patience if self.fault in HANGS else 0.0

    @property
    def lacks(self) -> str:
        """What is missing on this machine for it; empty: nothing is."""
        groups = Path("/sys/fs/cgroup/memory")
        return f"{groups} to write to" if self.fault == "oom" and not os.access(groups, os.W_OK) else ""

    def why_not(self) -> str:
        """Why there is no such case; empty: there is."""
        if self.ranks not in LAYOUTS[self.layout]:
            return "the layout is for other numbers of ranks"
        if self.victim == "second" and self.ranks == 2:
            return "the second rank is the last"
        if self.fault in DISKS and (self.saves == "none" or self.moment != "saving"):
            return "a fault of the disk strikes a save"
        if self.moment == "saving" and self.saves == "none":
            return "nothing is saved"
        if self.fault in NOTICES and (self.launcher != "run" or self.moment in ("begin", "closed")):
            return "notice is for a run that trains"
        if self.fault in ("hang", *LOOPS) and self.moment in ("begin", "closed"):
            return "it gives no signs of life yet, or nobody waits for it"
        if self.fault in LEAVES and self.moment in ("begin", "closed"):
            return "others wait for it to come, as long as they wait for that; or need it no more"
        if self.launcher == "train" and self.restarts:
            return "it starts nothing again"
        if self.again and not (self.restarts and self.fault in ("kill", "segv", "exit", "raise")):
            return "there is no attempt behind the first"
        return ""


def drawn(number: int, **fixed: object) -> Case | None:
    """The case of a number, with what is fixed; None: a hundred draws have found none."""
    draw = random.Random(number)
    for _ in range(100):
        given = {name: draw.choice(values) for name, values in CHOICES.items()}
        if given["fault"] in DISKS or fixed.get("fault") in DISKS:
            given["moment"] = "saving"
        given |= {"part": draw.randrange(21) / 20, "call": draw.randrange(30), **fixed}
        case = Case(**given)  # pyright: ignore[reportArgumentType]
        if not case.why_not():
            return case
    return None


def of_number(number: int) -> Case:
    """The case of a number."""
    case = drawn(number)
    assert case is not None
    return case


def kept(*, hosts: bool = False) -> list[str]:
    """Lines of those that have failed once, on one host or on several."""
    lines = Path(__file__).with_name("failed.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#") and hosts == ("nodes=" in line)]


def named(word: str) -> Iterator[tuple[str, Case]]:
    """What a word of the command line means: ``17``, ``0..99``, ``pairwise``, ``pairwise:40..79``, or a line."""
    from tests.chaos.cover import pairwise  # which draws cases

    what, _, numbers = word.rpartition(":")
    first, _, last = numbers.partition("..")
    if word == "pairwise":
        yield from ((f"{word}:{number}", case) for number, case in enumerate(pairwise()))
    elif first.isdigit() and what in ("", "pairwise"):
        for number in range(int(first), int(last or first) + 1):
            yield f"{what}:{number}".lstrip(":"), pairwise()[number] if what else of_number(number)
    else:
        yield "", Case.read(word)


def main(words: list[str]) -> int:
    from tests.chaos.judge import Judge  # which imports torch

    failed = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        judge = Judge(Path(place))
        for name, case in [each for word in words for each in named(word)]:
            if case.lacks:
                print(f"{name} not here for want of {case.lacks}: {case}".strip(), flush=True)
                continue
            verdict = judge.run(case)
            failed += bool(verdict.wrong)
            print(f"{name} {verdict}".strip(), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
