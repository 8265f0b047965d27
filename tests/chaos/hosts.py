"""Cases on several hosts, as network namespaces: one of them dies, is cut off, stands still or is slow.

python -m tests.chaos.hosts 17 100..119
python -m tests.chaos.hosts "nodes=3 fault=cut node=last"
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardfold.launch.namespaces import INTERFACE, Namespaces
from shardfold.launch.options import Options
from shardfold.launch.run_script import run as run_script
from tests.chaos import judge
from tests.chaos.case import HANGS, LEAVES, SECTIONS, Case
from tests.chaos.judge import LIMIT, MARGIN, Judge, Look, Run, Verdict, blamed, busy, trained, tree
from tests.chaos.rank import work
from tests.chaos.warm import begin

LOST = ("launcher kill", "host dead", "cut", "one way", "freeze")
"""A host's launcher dies; host and link go at once; its link is cut; nothing comes from it any more, though it hears
all; all of its processes stand still."""
BAD = ("flap", "loss", "slow link")
"""A host's link is cut for a moment, loses packets, is slow: the run goes on."""
OF_RANKS = ("kill", *HANGS, *LEAVES, "raise")
CHOICES: dict[str, tuple[Any, ...]] = {
    "nodes": (2, 3),
    "each": (1, 2),
    "layout": ("ddp", "zero2", "zero3", "offload"),
    "fault": (*LOST, *BAD, *OF_RANKS),
    "moment": ("begin", "made", "between", "saving", *SECTIONS),
    "step": (0, 2),
    "node": ("first", "last"),
    "saves": ("none", "each", "beside"),
    "restarts": (0, 1),
    "backend": ("static", "c10d"),
}
FLAP = 4.0
"""Seconds for which a link is cut, two thirds of the patience."""
LOSS = 10
"""Packets of a hundred that a link loses."""


@dataclass(frozen=True)
class HostCase(Case):
    """
    Attributes:
        nodes: hosts.
        each: ranks on each of them.
        node: which is struck; node 0 has the store.
        backend: how hosts meet; ``c10d``: hosts may go, down to one.
    """

    nodes: int = 2
    each: int = 1
    node: str = "last"
    backend: str = "static"

    @classmethod
    def read(cls, line: str) -> HostCase:
        case = super().read(line)
        assert isinstance(case, cls)
        return replace(case, ranks=case.nodes * case.each)

    @property
    def lacks(self) -> str:
        """As of a case on one host."""
        return "the command nft" if self.fault == "loss" and shutil.which("nft") is None else ""

    @property
    def host(self) -> int:
        """Number of the host that is struck."""
        return 0 if self.node == "first" else self.nodes - 1

    @property
    def struck(self) -> int:
        """Its last rank."""
        return (self.host + 1) * self.each - 1

    @property
    def patience(self) -> float:
        """As of a case on one host."""
        return 1.5 * FLAP if self.fault == "flap" else 3.0 if self.fault in (*LOST, *HANGS) else 10.0

    @property
    def goes_on(self) -> bool:
        """Whether it is to come to its end in spite of the fault.

        Nobody takes the place of the store's host, nor of one that has a number.
        """
        if self.fault in LOST:
            return self.restarts > 0 and self.backend == "c10d" and self.host != 0
        return self.fault in BAD or self.restarts > 0

    @property
    def goes_on_alone(self) -> bool:
        """Whether the host that is struck may: it has the store, lives, and one is enough."""
        alive = self.fault in ("cut", "one way", "freeze")
        return alive and self.restarts > 0 and self.backend == "c10d" and self.host == 0


def of_number(number: int) -> HostCase:
    """The case of a number."""
    draw = random.Random(number)
    given = {name: draw.choice(values) for name, values in CHOICES.items()}
    if (given["saves"] == "none" and given["moment"] == "saving") or given["fault"] in ("hang", *LEAVES):
        given["moment"] = "between"
    return HostCase(**given, ranks=given["nodes"] * given["each"], part=draw.randrange(21) / 20)


@dataclass
class HostRun(Run):
    """
    Attributes:
        ends: of each launcher that was to end by itself: its status, None if it did not, and seconds behind the strike.
        errs: what each launcher wrote.
        acts: whether a host that stood still has changed the checkpoints' folder once it moved again.
    """

    ends: dict[int, tuple[int | None, float]] = field(default_factory=dict[int, tuple[int | None, float]])
    errs: list[str] = field(default_factory=list[str])
    acts: bool = False


class HostJudge(Judge):
    """Runs cases of hosts; it needs what ``Namespaces`` need."""

    def run(self, case: Case) -> Verdict:
        assert isinstance(case, HostCase)
        began = time.monotonic()
        self.number += 1
        folder = self.place / f"{self.number}"
        folder.mkdir()
        links = Namespaces(case.nodes)
        try:
            found = Hosts(case, links, folder).run()
        finally:
            links.close()
        wrong = [*HostLook(case, found, folder, room=False).wrong()]
        if not (folder / "weights").exists() and not wrong and (folder / "run" / "latest").exists():
            wrong += self.resumed(case, folder, found, room=False)
        if not wrong:
            subprocess.run(["rm", "-rf", str(folder)], check=True)
        said = [err if wrong else " ".join(re.findall(r"^Error: .*$", err, re.M)) for err in found.errs]
        sentence = " | ".join(f"node {node}: {' '.join(err.split())[-400:]}" for node, err in enumerate(said) if err)
        return Verdict(case, wrong, found.behind, sentence, time.monotonic() - began)


class Hosts:
    """The launchers of a case, from their begin to the end of the last one."""

    def __init__(self, case: HostCase, links: Namespaces, folder: Path) -> None:
        self.case, self.links, self.folder = case, links, folder
        self.pids: list[int] = []
        self.ends: dict[int, tuple[int | None, float]] = {}
        self._heals = float("inf")

    def run(self) -> HostRun:
        case, folder = self.case, self.folder
        (folder / "disk").mkdir()
        given = partial(work, case.layout, case.saves, case, folder)
        errs = [folder / f"err-{node}" for node in range(case.nodes)]
        for node, (space, err) in enumerate(zip(self.links.spaces, errs, strict=True)):
            around = judge.environment(case, INTERFACE)
            self.pids.append(begin(partial(self._launch, node), given, around, folder / f"out-{node}", err, space))
        self._watch()
        acts = self._wakes() if case.fault == "freeze" else False
        left = judge.left_over_by(busy())
        log = judge.read_log(folder)
        struck = next((each["at"] for each in log if each["what"] == "struck"), None)
        texts = [err.read_text(errors="replace") for err in errs]
        ends = {node: (status, at - (struck or at)) for node, (status, at) in sorted(self.ends.items())}
        behind = None if struck is None else max((each for _, each in ends.values()), default=0.0)
        return HostRun(None, log, "\n".join(texts), behind, left, ends, texts, acts)

    def _launch(self, node: int) -> int:
        os.chdir(self.folder)
        case, first = self.case, Namespaces.address(0)
        if case.backend == "static":
            given: dict[str, Any] = {"nnodes": f"{case.nodes}", "node_rank": node}
            given |= {"master_addr": first, "master_port": 29500}
        else:
            given = {"nnodes": f"1:{case.nodes}", "rdzv_backend": "c10d", "rdzv_endpoint": f"{first}:29500"}
        given |= {"nproc_per_node": f"{case.each}", "patience": case.patience, "max_restarts": case.restarts}
        return run_script(Options(no_python=True, **given), "chaos", [])

    def _watch(self) -> None:
        """Until each launcher has ended that is to end by itself."""
        deadline, waiting = time.monotonic() + LIMIT, dict(enumerate(self.pids))
        armed = True
        while waiting and time.monotonic() < deadline:
            for node, pid in list(waiting.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.ends[node] = os.waitstatus_to_exitcode(status), time.monotonic()
                    del waiting[node]
            if armed and judge.struck_in(self.folder) is not None:
                armed = False
                self._act()
                (self.folder / "acted").touch()
                if self.case.fault in ("host dead", "launcher kill", "freeze"):
                    waiting.pop(self.case.host, None)
            if time.monotonic() >= self._heals:
                self._heals = float("inf")
                self.links.heal(self.case.host)
            time.sleep(0.01)
        judge.ask_where(waiting.values())
        self.ends |= {node: (None, time.monotonic()) for node in waiting}

    def _act(self) -> None:
        case, space = self.case, self.links.spaces[self.case.host]
        match case.fault:
            case "host dead":
                self.links.cut(case.host)
                self._send(signal.SIGSTOP)
                self._send(signal.SIGKILL)
            case "cut" | "flap":
                self.links.cut(case.host)
                self._heals = time.monotonic() + FLAP if case.fault == "flap" else float("inf")
            case "one way":
                for node in range(case.nodes):
                    if node != case.host:
                        words = f"ip -n {space} route add blackhole {Namespaces.address(node)}/32"
                        subprocess.run(words.split(), check=True)
            case "freeze":
                self._send(signal.SIGSTOP)
            case "loss":
                rules = f"table inet chaos {{ chain c {{ type filter hook input priority 0; iifname {INTERFACE} "
                rules += f"numgen random mod 100 < {LOSS} drop; }}; }}"
                subprocess.run(["ip", "netns", "exec", space, "nft", "-f", "-"], input=rules, text=True, check=True)
            case "slow link":
                self.links.limit("2mbit")
            case _:
                pass

    def _send(self, number: int) -> None:
        """To all processes of the host that is struck."""
        for pid in [*tree(self.pids[self.case.host])]:  # who is dead has no children
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wakes(self) -> bool:
        """A host that stood still goes on, long after it was given up, and ends; whether it acts before."""
        before, waiting = _contents(self.folder / "run"), self.pids[self.case.host]
        self._send(signal.SIGCONT)
        deadline = time.monotonic() + LIMIT
        while not (found := os.waitpid(waiting, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        status = os.waitstatus_to_exitcode(found[1]) if found[0] else None
        self.ends[self.case.host] = status, 0.0
        return _contents(self.folder / "run") != before


class HostLook(Look):
    """At a run on hosts of which one was struck."""

    case: HostCase
    run: HostRun

    def wrong(self) -> Iterator[str]:
        case, run = self.case, self.run
        yield from run.left
        yield from self._checkpoints()
        yield from self._losses()
        for node, (status, _) in run.ends.items():
            if status is None:
                yield f"the launcher of node {node} did not end within {LIMIT:.0f} s"
        if run.acts and not case.goes_on_alone:
            yield "the host that stood still has changed the folder of checkpoints behind its end"
        others = {node: end for node, end in run.ends.items() if node != case.host}
        if run.behind is None or case.goes_on:
            wanted = run.ends if run.behind is None or case.fault not in LOST else others
            if any(status for status, _ in wanted.values()):
                yield f"launchers end with {run.ends}"
            yield from trained(self.folder)
        elif 0 in [status for status, _ in (others if case.goes_on_alone else run.ends).values()]:
            yield f"launchers end with {run.ends}"
        elif case.goes_on_alone:
            yield from trained(self.folder)
        if run.behind is None:
            return
        yield from self._who()
        # One that ends well is named when no other one has failed by itself for half of the patience.
        waits = 1.0 if case.fault in (*LOST, *HANGS) else 0.5 if case.fault in LEAVES else 0.0
        most = (waits * case.patience + MARGIN) * busy()
        last = max(at for _, at in (others if case.goes_on_alone else run.ends).values())
        if not case.goes_on and last > most:
            yield f"they ended {last:.1f} s behind the strike; {most:.1f} s are the most: {run.ends}"

    def _who(self) -> Iterator[str]:
        """A rank's end is its own, a host's is the host's, and a link that is bad for a while nobody's."""
        case, run = self.case, self.run
        named = {rank for line in run.sentences for rank in blamed(line)}
        wanted = {case.struck} if case.fault in OF_RANKS else set[int]()
        if named != wanted:
            yield f"ranks {named} are named, not {wanted}: {run.sentences}"
        for node, err in enumerate(run.errs):
            if case.fault in LOST and node != case.host and "does not answer any more" not in err:
                yield f"node {node} does not say that a host does not answer: {err[-500:]}"


def _contents(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file()) if folder.exists() else ()
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in found}


def main(words: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        judged = HostJudge(Path(place))
        for word in words:
            first, _, last = word.partition("..")
            numbers = range(int(first), int(last or first) + 1) if first.isdigit() else [-1]
            for number in numbers:
                case = of_number(number) if number >= 0 else HostCase.read(word)
                if case.lacks:
                    print(f"not here for want of {case.lacks}: {case}", flush=True)
                    continue
                verdict = judged.run(case)
                failed += bool(verdict.wrong)
                print(f"{number if number >= 0 else ''} {verdict}".strip(), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
