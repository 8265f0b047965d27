"""Runs a case and looks whether everything behind it is as it has to be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from shardfold import launch
from shardfold.checkpoint.folders import listed
from shardfold.checkpoint.verify import verify
from shardfold.launch.options import Options
from shardfold.launch.process import INTERRUPTED
from shardfold.launch.run_script import run as run_script
from shardfold.plan.patience import PATIENCE
from tests.chaos.case import DEATHS, DELAYS, ENDS, HANGS, LEAVES, LOOPS, NOTICES, STEPS, Case
from tests.chaos.rank import CHAOS, adamw, batch, model, work
from tests.chaos.warm import STACKS, begin, keep_orphans
from tests.support.saving import left_over

LIMIT = 90.0
"""Seconds that a run may take at all, on a busy machine."""
MARGIN = 3.0
"""Beside the patience: for a fault to be noticed and the rest to be ended."""
TOLERANCE = 1e-6
"""Between weights in fp64: sums in another order differ by 1e-15 of their terms, and six updates have at most 1e4 times
that, as an update is a gradient over at least 1e-4."""
PAUSE = 0.4
"""Seconds for which a paused process stands."""
GROUPS = Path("/sys/fs/cgroup")
ROOM = 96 << 20
"""Bytes of memory from the strike on, where that is limited."""
DISK = "800k"
"""Of a checkpoints' folder that is full: one has about 320 KiB, and a third is written before the first is removed."""


@dataclass
class Run:
    """One launcher from its begin to its end.

    Attributes:
        status: its exit status; None: it had to be ended.
        log: what ranks have said, by time.
        out, err: what was written.
        behind: seconds between the strike and its end; None: nothing has struck.
        left: what was left of it.
    """

    status: int | None
    log: list[dict[str, Any]]
    err: str
    behind: float | None = None
    left: list[str] = field(default_factory=list)

    def said(self, what: str, **more: object) -> list[dict[str, Any]]:
        return [each for each in self.log if each["what"] == what and more.items() <= each.items()]

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("Error: ")]


@dataclass
class Verdict:
    """
    Attributes:
        wrong: what is not as it has to be.
        seconds: from the strike to the end of the run; None: it did not strike.
        sentence: the launcher's first.
    """

    case: Case
    wrong: list[str]
    seconds: float | None
    sentence: str
    took: float

    def __str__(self) -> str:
        behind = "did not strike" if self.seconds is None else f"{self.seconds:.2f} s behind it"
        lines = [f"{'WRONG' if self.wrong else 'held'} in {self.took:.1f} s, {behind}: {self.case}"]
        lines += [f"  {each}" for each in self.wrong]
        return "\n".join(lines + [f"  {self.sentence}"] * bool(self.sentence))


class Judge:
    """Runs cases one after the other in folders below ``place``; a process has one."""

    def __init__(self, place: Path) -> None:
        self.place, self.number = place, 0
        keep_orphans()
        _warm()

    def run(self, case: Case) -> Verdict:
        began = time.monotonic()
        self.number += 1
        folder = self.place / f"{self.number}"
        folder.mkdir()
        with small(folder / "run", DISK if case.fault == "full" else None) as room:
            found = self._run(case, folder, case.ranks, strikes=True)
            wrong = [*Look(case, found, folder, room).wrong()]
            if not (folder / "weights").exists() and not wrong and (folder / "run" / "latest").exists():
                wrong += self.resumed(case, folder, found, room)
        if not wrong:
            subprocess.run(["rm", "-rf", str(folder)], check=True)
        sentence = found.sentences[0] if found.sentences else found.err[-600:] * bool(wrong)
        return Verdict(case, wrong, found.behind, sentence, time.monotonic() - began)

    def resumed(self, case: Case, folder: Path, before: Run, room: bool) -> Iterator[str]:
        """Another number of ranks goes on from what is there, to what a run without a fault comes to."""
        other = min(case.ranks - 1, 4)  # which divide a batch
        layout = case.layout if case.layout not in ("hsdp", "hpz", "stages") else "zero2"
        again = self._run(Case(layout=layout, ranks=other, saves="none" if room else case.saves), folder, other)
        if again.status != 0:
            yield f"the run that goes on ends with {again.status}: {again.err[-800:]}"
            return
        yield from (f"the run that goes on: {each}" for each in again.left)
        yield from trained(folder)
        first = {each["steps"] for each in again.said("loaded")}
        done = {each["steps"] for each in before.said("saved")}
        whole = {step for step in done if len(before.said("saved", steps=step)) == case.ranks}
        if len(first) != 1 or (whole and max(first) < max(whole)):
            yield f"goes on from step {first}, and {max(whole, default=0)} was saved"
        if not room and (draft := left_over(folder / "run")):
            yield f"drafts are left behind a whole run: {draft}"

    def _run(self, case: Case, folder: Path, ranks: int, strikes: bool = False) -> Run:
        (folder / "disk").mkdir(exist_ok=True)
        (folder / "log").unlink(missing_ok=True)
        err = folder / ("err" if strikes else "err-again")
        given = partial(work, case.layout, case.saves, case if strikes else None, folder)
        pid = begin(partial(_launch, case, ranks, folder), given, environment(case, "lo"), folder / "out", err)
        watched = Watched(pid, case if strikes else None, folder)
        status = watched.wait()
        ended = time.monotonic()
        left = [*left_over_by(busy()), *(f"a file of a disk tier: {each.name}" for each in (folder / "disk").iterdir())]
        log = read_log(folder)
        struck = [each["at"] for each in log if each["what"] == "struck"]
        behind = ended - struck[0] if struck else None
        return Run(status, log, err.read_text(errors="replace"), behind, left)


RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDFOLD_RUN", "SHARDFOLD_FOLLOWS")


def environment(case: Case, interface: str) -> dict[str, str]:
    """Of a launcher."""
    given = {name: value for name, value in os.environ.items() if name not in RANKS}
    return {**given, "GLOO_SOCKET_IFNAME": interface, PATIENCE: f"{case.patience}", "OMP_NUM_THREADS": "1"}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """What ranks have said so far, by time."""
    try:
        text = (folder / "log").read_text()
    except FileNotFoundError:
        return []
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda each: each["at"])


def struck_in(folder: Path) -> dict[str, Any] | None:
    """What the rank that was struck has said of it."""
    return next((each for each in read_log(folder) if each["what"] == "struck"), None)


def _launch(case: Case, ranks: int, folder: Path) -> int:
    os.chdir(folder)
    if case.launcher == "train":
        return launch.launch(["chaos"], ranks)
    notice = {"notice": 60.0, "notice_file": "leave"} if case.fault in NOTICES else {}
    given = {"nproc_per_node": f"{ranks}", "max_restarts": case.restarts, "patience": case.patience, **notice}
    return run_script(Options(no_python=True, standalone=True, **given), "chaos", [])


class Watched:
    """A launcher under way: what a fault needs from outside is done when ranks say that it has struck."""

    def __init__(self, pid: int, case: Case | None, folder: Path) -> None:
        self.pid, self.case, self.folder = pid, case, folder
        self._until = float("inf")
        self._paused = 0
        self._seen = False

    def wait(self) -> int | None:
        deadline = time.monotonic() + LIMIT
        with limited(self.case) as limit:
            while time.monotonic() < deadline:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    return os.waitstatus_to_exitcode(status)
                if not self._seen and self.case is not None and (struck := struck_in(self.folder)):
                    self._seen = True
                    self._act(struck, limit)
                if time.monotonic() >= self._until:
                    os.kill(self._paused, signal.SIGCONT)
                    self._until = float("inf")
                time.sleep(0.01)
        ask_where([self.pid])
        kill_descendants()
        return None

    def _act(self, struck: Mapping[str, Any], limit: Path | None) -> None:
        assert self.case is not None
        if self.case.fault in ("pause", "launcher pause"):
            self._paused = struck["pid" if self.case.fault == "pause" else "launcher"]
            self._until = time.monotonic() + PAUSE
        if self.case.fault in ("slow", "oom"):
            if limit is not None:
                (limit / "cgroup.procs").write_text(str(struck["pid"]))
            (self.folder / "acted").touch()


class Look:
    """At a run that was struck."""

    def __init__(self, case: Case, run: Run, folder: Path, room: bool) -> None:
        self.case, self.run, self.folder, self.room = case, run, folder, room

    def wrong(self) -> Iterator[str]:
        case, run = self.case, self.run
        if run.status is None:
            yield f"it did not end within {LIMIT:.0f} s: {run.err[-20000:]}"
            return
        yield from run.left
        yield from self._checkpoints()
        yield from self._losses()
        if run.behind is None:
            if run.status != 0:
                yield f"nothing has struck, and it ended with {run.status}: {run.err[-500:]}"
            yield from trained(self.folder)
            return
        # An error of a call that only tidies up; what strikes behind the end of all work.
        if run.status == 0 and (case.fault in ("eio", "late") or (case.fault in ENDS and case.moment == "closed")):
            yield from trained(self.folder)
            return
        yield from self._time()
        yield from self._blame()
        dies = case.fault in (*DEATHS, *HANGS, *LOOPS, "torn", "eio")
        if case.fault in (*DELAYS, "full") or (dies and case.restarts):
            if run.status != 0:
                yield f"it ended with {run.status}"
            else:
                yield from trained(self.folder)
        elif dies and run.status != self._status():
            yield f"it ended with {run.status}, not {self._status()}"
        elif case.fault in NOTICES:
            yield from self._left_by_notice()
        elif case.fault in ("term", "int"):
            wanted = INTERRUPTED if case.fault == "int" else 128 + signal.SIGTERM
            if run.status != wanted:
                yield f"it ended with {run.status}, not {wanted}"

    def _status(self) -> int:
        signals = {"late": signal.SIGALRM, "segv": signal.SIGSEGV}
        return {"exit": 7, "raise": 1, "eio": 1, **dict.fromkeys(LEAVES, 1)}.get(
            self.case.fault, 128 + signals.get(self.case.fault, signal.SIGKILL)
        )

    def _time(self) -> Iterator[str]:
        run, case = self.run, self.case
        if case.fault in (*DELAYS, *NOTICES, "full") or case.restarts:
            return  # which go on
        most = (case.waits + MARGIN) * busy()
        if run.behind is not None and run.behind > most:
            yield f"it ended {run.behind:.1f} s behind the strike; {most:.1f} s are the most"

    def _blame(self) -> Iterator[str]:
        """The first sentence names who was struck, and none names another one."""
        case, run = self.case, self.run
        named = [number for line in run.sentences for number in blamed(line)]
        if case.fault in (*DEATHS, *HANGS, *LOOPS, "torn", "eio"):
            if not named:
                yield f"nobody is named: {run.err[-800:]}"
            elif set(named) != {case.struck}:
                yield f"ranks {named} are named, and {case.struck} was struck: {run.sentences}"
            if case.fault == "stop" and "was stopped (SIGSTOP, state T)" not in run.err:
                yield "it is not said that it was stopped"
            if case.fault == "hang" and "gave no sign of life" not in run.err:
                yield "it is not said that it gave no sign of life"
            if case.fault in LOOPS and ", at rank.py:" not in run.err:
                yield "it is not said where it computes"
            if case.fault == "oom" and case.launcher == "run" and "kernel OOM" not in run.err:
                yield "it is not said that there was no memory"
            if case.fault == "raise" and CHAOS not in run.err:
                yield "the exception is not shown"
        elif named:
            yield f"ranks {named} are named, and none has failed: {run.sentences}"

    def _losses(self) -> Iterator[str]:
        """Each step that was done, however often, had the loss that it has undisturbed."""
        _, wanted = undisturbed()
        found: dict[tuple[int, int, int], dict[int, float]] = {}
        for each in self.run.said("step"):
            found.setdefault((each["attempt"], each["steps"], each["parts"]), {})[each["part"]] = each["loss"]
        for (attempt, step, parts), losses in found.items():
            if len(losses) == parts:
                mean = sum(losses.values()) / len(losses)
                if abs(mean - wanted[step - 1]) > TOLERANCE:
                    yield f"the loss of step {step} in attempt {attempt} is {mean}, not {wanted[step - 1]}"

    def _left_by_notice(self) -> Iterator[str]:
        run, case = self.run, self.case
        if (self.folder / "weights").exists():
            yield from trained(self.folder)  # it came too late for it
            return
        left, stands = run.said("left"), run.said("stands")
        if len(left) != case.ranks or len({each["steps"] for each in left}) != 1:
            yield f"ranks left behind steps {[each['steps'] for each in left]}: {run.err[-500:]}"
        elif len({each["steps"] for each in stands}) != 1 or stands[0]["steps"] != left[0]["steps"]:
            yield f"steps are lost: {stands}"
        number = signal.SIGUSR1 if case.fault == "notice usr1" else signal.SIGTERM
        if run.status != 128 + number:
            yield f"it ended with {run.status}, not {128 + number}"

    def _checkpoints(self) -> Iterator[str]:
        place = self.folder / "run"
        if not place.exists():
            return
        for each in listed(place):
            if not (looked := verify(each)).ok:
                yield f"{each.name} is damaged: {looked.damage}"
        latest = place / "latest"
        if latest.exists() and latest.read_text().strip() not in {each.name for each in listed(place)}:
            yield f"latest names {latest.read_text()!r}, which is not whole"


def blamed(line: str) -> list[int]:
    """The ranks that a launcher's sentence says have failed."""
    return [int(number) for number in re.findall(r"(?:^Error: |; so )rank (\d+) (?:on host|of \d)", line)]


def trained(folder: Path) -> Iterator[str]:
    """What it has come to is what it comes to undisturbed."""
    wanted, _ = undisturbed()
    try:
        found = torch.load(folder / "weights")
    except FileNotFoundError:
        yield "there are no weights of the end"
        return
    for name, value in wanted.items():
        if (far := float((found[name] - value).abs().max())) > TOLERANCE:
            yield f"{name} is {far} from what it is undisturbed"


@cache
def undisturbed() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights at the end, and the loss of each step, of plain PyTorch."""
    plain = model()
    optimizer = adamw(plain.parameters())
    losses: list[float] = []
    for step in range(STEPS):
        loss = plain(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return plain.state_dict(), losses


def _warm() -> None:
    """What a rank imports and what a first step makes is there before ranks are forked."""
    import shardfold.engine.engine
    import shardfold.launch._agent  # noqa: F401

    torch.set_num_threads(1)
    undisturbed()


def busy() -> float:
    """How many times as long as on a machine of its own something takes here, at most."""
    return max(1.0, 1.5 * os.getloadavg()[0] / len(os.sched_getaffinity(0)))


# -- faults from outside


@contextmanager
def small(folder: Path, size: str | None) -> Iterator[bool]:
    """A folder, with so much room if that is given and can be made; whether it was."""
    if size is None:
        yield False
        return
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(words, check=False, capture_output=True).returncode == 0
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def limited(case: Case | None) -> Iterator[Path | None]:
    """A control group with less time or less memory, where one can be made."""
    what = {"slow": ("cpu", "cpu.cfs_quota_us", 25_000), "oom": ("memory", "memory.limit_in_bytes", ROOM)}
    if case is None or case.fault not in what:
        yield None
        return
    controller, name, value = what[case.fault]
    group = GROUPS / controller / f"shardfold-chaos-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(value))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        take_away(group)


def take_away(group: Path) -> None:
    """A control group, if there is one, as soon as what was in it has ended."""
    for _ in range(500):
        try:
            group.rmdir()
            break
        except FileNotFoundError:
            break
        except OSError:
            time.sleep(0.01)


# -- what is left


def children(of: int | str = "self") -> list[int]:
    """Processes that a process has started and that are not reaped."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{of}/task"):
            found += [int(pid) for pid in Path(f"/proc/{of}/task/{thread}/children").read_text().split()]
    return found


def left_over_by(seconds: float) -> list[str]:
    """Processes that outlive the launchers by so much; all are children of this process."""
    deadline = time.monotonic() + seconds
    there: list[int] = []
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        there = children()
        if not there or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    said = [f"process {pid} is left: {_words(pid)}" for pid in there]
    kill_descendants()
    return said


def tree(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    for each in children(pid):
        yield from tree(each)


def ask_where(launchers: Iterable[int]) -> None:
    """Those that do not end, and their ranks, write their stacks, into what they have written."""
    for pid in [each for launcher in launchers for each in tree(launcher)]:
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS)
            time.sleep(0.5)


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return ""


def kill_descendants() -> None:
    while there := children():
        for pid in there:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            for pid in there:
                os.waitpid(pid, 0)
