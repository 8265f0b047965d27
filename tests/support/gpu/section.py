"""A section's process, whose argument is its name, with what it is asked on standard input.

It writes a note after each case, so that what was found is kept whatever happens next, and stops by itself when its
time is over.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tests.support.gpu.report import FAILED, PASSED, SKIPPED, Case

__all__ = ["CHECKS", "SPEED", "Asked", "Clock", "Notes", "Outcome", "Part", "Skip", "main"]

DETAIL = 40  # lines of a failure


class Part(NamedTuple):
    """A section.

    Attributes:
        title: of it.
        share: of the time.
        module: of this package, whose ``run`` it is; empty: the one called as the section is.
    """

    title: str
    share: float
    module: str = ""


#: What there is to do, by name. The first are short and say most.
CHECKS: dict[str, Part] = {
    "machine": Part("The machine", 0.03),
    "waits": Part("Host synchronizations in a step", 0.07),
    "memory": Part("Memory: predicted and allocated", 0.07),
    "plans": Part("Plans of whole steps", 0.15),
    "requests": Part("The caching allocator, simulated and real", 0.05),
    "codes": Part("Formats on the device", 0.03),
    "products": Part("Products in fp8", 0.05),
    "races": Part("Streams that are delayed", 0.18),
    "marked": Part("The tests that need a device", 0.1),
    "compared": Part("`shardfold bench`", 0.27),
}
#: How fast it is: what `make gpu-bench` runs.
SPEED: dict[str, Part] = {
    "machine": Part("The machine", 0.02),
    "rates": Part("What the device does: copies, products, formats of the wire", 0.05),
    "steps-200M": Part("Steps of 200M parameters", 0.2, "steps"),
    "steps-1.3B": Part("Steps of 1.3B parameters", 0.27, "steps"),
    "compile": Part("What torch.compile brings", 0.1, "steps"),
    "fp8": Part("What products in fp8 bring", 0.06, "steps"),
    "steps-7B": Part("Steps of 7B parameters, states in host memory", 0.2, "steps"),
    "timeline": Part("Where a step goes", 0.1),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a section is asked.

    Attributes:
        device: type of the devices.
        ranks: processes.
        seconds: that it has.
        folder: where it may write.
        small: whether sizes are those of a rehearsal.
        out: folder of the report, for pictures.
        name: of the section.
    """

    device: str
    ranks: int
    seconds: float
    folder: str
    small: bool
    out: str = ""
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Skip(Exception):
    """A case cannot run here; its text is the reason."""


class Outcome(Exception):
    """A case has failed; its text is the sentence, ``figures`` what was measured."""

    def __init__(self, says: str, detail: str = "", **figures: Any) -> None:
        super().__init__(says)
        self.detail, self.figures = detail, figures


class Clock:
    """The time of a section.

    Args:
        seconds: that it has, from now.
        now: tells the time.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._now = seconds, now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - self._now())


class Notes:
    """What a section leaves: one line of JSON per note.

    Args:
        out: where it is written.
        clock: of the section.
    """

    def __init__(self, out: TextIO, clock: Clock) -> None:
        self._out, self.clock = out, clock

    def _write(self, **note: Any) -> None:
        print(json.dumps(note, default=str), file=self._out, flush=True)

    def fact(self, name: str, value: Any) -> None:
        self._write(fact=name, value=value)

    def not_run(self, what: str, why: str) -> None:
        self._write(not_run={"what": what, "why": why})

    def begins(self, name: str) -> None:
        """From here on, what kills the process did so in this case."""
        self._write(begins=name)

    def case(self, case: Case) -> None:
        self._write(case=asdict(case))

    def attempt(self, name: str, run: Callable[[], tuple[str, dict[str, Any]]], *, needs: float = 0.0) -> None:
        """Runs a case and notes what came of it; if less than ``needs`` seconds are left, that it was not reached.

        ``run`` gives a sentence, whose further lines stand below the table, and figures; it raises :class:`Outcome`,
        :class:`Skip` or whatever goes wrong.
        """
        if self.clock.left <= needs:
            self.not_run(name, f"the {self.clock.seconds:.0f} s of the section were over")
            return
        self.begins(name)
        try:
            says, figures = run()
        except Skip as why:
            self.case(Case(name=name, verdict=SKIPPED, says=str(why)))
            self.not_run(name, str(why))
        except Outcome as bad:
            self.case(Case(name=name, verdict=FAILED, says=str(bad), figures=bad.figures, detail=bad.detail))
        except Exception as error:
            lines = "".join(traceback.format_exception(error)).splitlines()
            first = str(error).strip().splitlines() or [""]
            says = f"{type(error).__name__}: {first[0]}"
            self.case(Case(name=name, verdict=FAILED, says=says, detail="\n".join(lines[-DETAIL:])))
        else:
            says, _, detail = says.partition("\n")
            self.case(Case(name=name, verdict=PASSED, says=says, figures=figures, detail=detail))


def main() -> None:
    module = sys.argv[1]
    asked = Asked(**json.loads(sys.stdin.read()))
    with open(Path(asked.folder) / f"{asked.name}.jsonl", "a", encoding="utf-8") as out:
        run: Callable[[Asked, Notes], None] = importlib.import_module(f"tests.support.gpu.{module}").run
        run(asked, Notes(out, Clock(asked.seconds)))
