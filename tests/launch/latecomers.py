"""Trainings on several hosts, as network namespaces, to which others come while they run.

python -m tests.launch.latecomers       # how long ranks stop for a host that comes
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardfold.launch.namespaces import INTERFACE, Namespaces
from shardfold.launch.options import Options
from shardfold.launch.run_script import run as run_script
from tests.chaos.judge import ask_where, read_log, tree
from tests.chaos.warm import begin
from tests.launch.partitions import Found, Parted, work
from tests.launch.survivors import LIMIT, TOLERANCE, plain, warm


@dataclass(frozen=True)
class Coming:
    """
    Attributes:
        hosts: that may be there, with a rank each; so many virtual ranks there are.
        first: that begin.
        at: for each host that comes, in the order of their numbers, behind which step.
        dies: a host that is gone at once, and behind which step; it comes back ``again`` behind that one.
        then: another one that is gone, for good, and behind which step.
        steps: updates of the run.
        layout, survive: of the states.
        other: the layout of those that come, where it is another one.
    """

    hosts: int = 3
    first: int = 2
    at: tuple[int, ...] = (4,)
    dies: tuple[int, int] | None = None
    again: int = 0
    then: tuple[int, int] | None = None
    steps: int = 24
    layout: str = "ddp"
    survive: str | None = None
    other: str = ""

    @property
    def run(self) -> Parted:
        return Parted(self.hosts, (), steps=self.steps, layout=self.layout, survive=self.survive)

    @property
    def events(self) -> list[tuple[int, str, int]]:
        """What happens behind which step, to which host."""
        found = [(step, "comes", self.first + n) for n, step in enumerate(self.at)]
        if self.dies is not None:
            found += [(self.dies[1], "dies", self.dies[0])]
            found += [(self.again, "comes", self.dies[0])] * bool(self.again)
        if self.then is not None:
            found += [(self.then[1], "dies", self.then[0])]
        return sorted(found)


def happened(case: Coming, links: Namespaces, folder: Path) -> Found:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDFOLD_RUN", "SHARDFOLD_FOLLOWS")
    around = {name: value for name, value in os.environ.items() if name not in names}
    around |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    other = partial(work, replace(case.run, layout=case.other), folder)
    given, launchers, ends = partial(work, case.run, folder), dict[int, int](), dict[int, tuple[int | None, float]]()

    def launch() -> int:
        os.chdir(folder)
        more: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{Namespaces.address(0)}:29500"}
        fewest = 1 if case.dies is not None and case.dies[0] == 0 else min(case.first, case.hosts - 1)
        more |= {"rdzv_conf": "last_call_timeout=3", "nnodes": f"{fewest}:{case.hosts}", "nproc_per_node": "1"}
        return run_script(Options(no_python=True, patience=3.0, **more), "latecomers", [])

    def start(node: int) -> None:
        err = folder / f"err-{node}"
        work_of = other if case.other and node >= case.first else given
        launchers[node] = begin(launch, work_of, around, folder / "out", err, links.spaces[node])

    for node in range(case.first):
        start(node)
    events, deadline = case.events, time.monotonic() + 2 * LIMIT
    while len(ends) < len(launchers) and time.monotonic() < deadline:
        for node, pid in launchers.items():
            if node not in ends and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ends[node] = os.waitstatus_to_exitcode(found[1]), time.monotonic()
        if events and reached(folder) >= events[0][0]:
            _, what, node = events.pop(0)
            if what == "comes":
                ends.pop(node, None)
                start(node)
            else:
                kill(launchers[node])
        time.sleep(0.005)
    left = [pid for node, pid in launchers.items() if node not in ends]
    ask_where(left)
    for pid in left:
        kill(pid)
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("err-*"))]
    return Found(ends, read_log(folder), texts, 0.0)


def kill(pid: int) -> None:
    for each in tree(pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def reached(folder: Path) -> int:
    with suppress(ValueError):  # a line is being written
        return max((each["steps"] for each in read_log(folder) if each["what"] == "step"), default=0)
    return 0


def wrong(case: Coming, found: Found, folder: Path) -> Iterator[str]:
    """What is not as it has to be."""
    refused = {node: 1 for node in range(case.first, case.first + len(case.at)) if case.other}
    gone = {} if case.then is None else {case.then[0]: -9}
    as_told = all(status == {**refused, **gone}.get(node, 0) for node, (status, _) in found.ends.items())
    if not as_told or len(found.ends) < case.first + len(case.at):
        yield f"launchers end with {found.ends}: {[err[-1500:] for err in found.errs]}"
        return
    for rank in range(case.first):
        steps = [each["steps"] for each in found.said("step", rank=rank)]
        if case.dies is None and steps != [*range(1, case.steps + 1)]:
            yield f"rank {rank} took the steps {steps}"
    came = {each["rank"] for each in found.said("step") if each["rank"] >= case.hosts}
    if len(came) != len(case.at) + bool(case.again) - len(refused):
        yield f"{came} have come and taken steps"
    if (ranks := max(each["ranks"] for each in found.said("step"))) != case.first + len(case.at) - len(refused):
        yield f"there were {ranks} ranks at most"
    expected, weights = plain(case.run.plan).weights, torch.load(folder / "weights")
    far = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
    if far > TOLERANCE:
        yield f"weights are {far} from plain PyTorch's"


def judged(case: Coming, place: str) -> tuple[Found, list[str]]:
    """Runs a case in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir=place))
    links = Namespaces(case.hosts)
    try:
        found = happened(case, links, folder)
    finally:
        links.close()
    return found, [*wrong(case, found, folder)]


def held(cases: list[Coming], place: str) -> list[str]:
    """What is not as it has to be."""
    return [f"{case}: {words}" for case in cases for words in judged(case, place)[1]]


def figures(place: str, rounds: int) -> None:
    took = list[float]()
    for _ in range(rounds):
        found, bad = judged(Coming(), place)
        for each in bad:
            print("WRONG", each, flush=True)
        first = next(iter(found.said("recovery")), None)
        if first is not None:
            took.append(sum(first[name] for name in ("agreed", "met", "moved")))
    print(f"{len(took)} hosts that came; ranks stopped for {statistics.median(took):.2f} s, at most {max(took):.2f}")


if __name__ == "__main__":
    warm()
    with tempfile.TemporaryDirectory() as place:
        figures(place, int("".join(sys.argv[1:]) or 3))
