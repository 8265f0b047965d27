"""The ranks of one contender, seen from outside: started, given orders, given up."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NoReturn

from shardfold.launch import die_with_parent, free_port, how, rank_environment
from shardfold.launch.namespaces import INTERFACE, Namespaces
from shardfold.tools.bench.contenders import Contender
from shardfold.tools.bench.settings import NODES, Settings

__all__ = ["ContenderFailed", "Team"]

LAST_LINES = 15  # of the standard error of a rank that failed
SETTLE = 2.0  # seconds for the other ranks to end once one has
LEAVE = 10.0  # seconds for ranks to end when their pipe does
#: By device, what comes before a rank's module on Python's command line.
BEFORE = {"sim": ("-m", "shardfold.testing.simulated")}


class ContenderFailed(Exception):
    """A contender died or did not answer; ``said`` are the last lines of one rank's standard error."""

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(reason)
        self.reason, self.said = reason, said


class _RankProcess:
    """One rank: its process and what it has answered so far."""

    def __init__(
        self, contender: Contender, settings: Settings, rank: int, port: int, folder: str, nodes: Namespaces | None
    ) -> None:
        self.rank = rank
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        environment = {
            **rank_environment(rank, settings.ranks, port),
            "OMP_NUM_THREADS": str(settings.threads),
            "TMPDIR": folder,  # where tiers on disk keep their files
            **contender.environment,
        }
        before: list[str] = []
        if nodes is not None:
            each = settings.ranks // nodes.nodes
            before = ["ip", "netns", "exec", nodes.spaces[rank // each]]
            environment |= {
                "MASTER_ADDR": nodes.address(0),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "LOCAL_RANK": str(rank % each),
                "LOCAL_WORLD_SIZE": str(each),
            }
        if contender.kind == "deepspeed" and settings.device == "cpu":
            environment["DS_ACCELERATOR"] = "cpu"
        self.process = subprocess.Popen(
            [
                *before,
                sys.executable,
                *BEFORE.get(settings.device, ()),
                "-m",
                "shardfold.tools.bench.rank",
                contender.name,
                str(rank),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # an interruption reaches them through us
            preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
        assert self.process.stdout is not None
        self.answers = self.process.stdout
        self._partial = b""

    def tell(self, line: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # who waits for the answer finds out why
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> dict[str, Any] | None:
        """The answer, if what can be read now completes one.

        Raises:
            EOFError: the process has ended, or closed its pipe.
        """
        chunk = os.read(self.answers.fileno(), 1 << 20)
        if not chunk:
            raise EOFError
        self._partial += chunk
        if not self._partial.endswith(b"\n"):
            return None
        line, self._partial = self._partial, b""
        return json.loads(line)

    def end(self) -> str:
        """How it ended, after it closed its pipe."""
        try:
            return how(self.process.wait(LEAVE))
        except subprocess.TimeoutExpired:  # threads of a library keep it
            return "closed its pipe, but did not end,"

    def said(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LAST_LINES:])

    def close(self, patience: float) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.answers.close()
        self._errors.close()


class Team:
    """All ranks of one contender, which start where it is made; a context manager, inside of which they are warm.

    Attributes:
        needs: bytes at their peak so far, of all ranks.
        free: bytes that were free on their device when they were last asked; None where nobody tells.
        first: seconds of their first step.
        optimizer, master, versions: see :meth:`shardfold.tools.bench.rank.BenchRank.ready`.

    Raises:
        ContenderFailed: from ``ready`` or any order. The ranks are gone then.
    """

    needs: int
    free: float | None
    first: float
    optimizer: str
    master: str
    versions: dict[str, str]

    def __init__(self, contender: Contender, settings: Settings) -> None:
        self.contender, self._settings = contender, settings
        port = free_port()
        # Whatever a contender leaves there goes with it.
        self._folder = tempfile.TemporaryDirectory(
            prefix="shardfold-bench-", dir=settings.folder, ignore_cleanup_errors=True
        )
        self._nodes = Namespaces(NODES, settings.link) if settings.link is not None else None
        self._processes = [
            _RankProcess(contender, settings, rank, port, self._folder.name, self._nodes)
            for rank in range(settings.ranks)
        ]
        for each in self._processes:
            each.tell(settings.as_json())

    def ready(self) -> Team:
        """Waits until all are warm."""
        answers = self._answers("start")
        self.needs = sum(answer["needs"] for answer in answers)
        self.first = max(answer["first"] for answer in answers)
        self.optimizer, self.master = answers[0]["optimizer"], answers[0]["master"]
        self.versions = answers[0]["versions"]
        return self

    def turn(self, steps: int) -> list[dict[str, Any]]:
        """What each rank measured over ``steps`` steps; see :meth:`shardfold.tools.bench.rank.Rank.turn`."""
        return self._order("turn", steps)

    def profile(self, steps: int) -> list[dict[str, Any]]:
        """Each rank's events of the last of ``steps`` steps."""
        return self._order("profile", steps)

    def close(self, patience: float = LEAVE) -> None:
        for each in self._processes:
            each.close(patience)
        self._processes = []
        if self._nodes is not None:
            self._nodes.close()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, *order: object) -> list[dict[str, Any]]:
        for each in self._processes:
            each.tell(order)
        return self._answers(str(order[0]))

    def _answers(self, doing: str) -> list[dict[str, Any]]:
        """One answer of each rank, by rank."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._settings.timeout
        with selectors.DefaultSelector() as selector:
            for each in self._processes:
                selector.register(each.answers, selectors.EVENT_READ, each)
            while selector.get_map():
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    late = next(each for each in self._processes if each.rank not in answers)
                    self._fail(late, f"rank {late.rank} did not answer {doing!r} in {self._settings.timeout:g} s")
                for key, _ in ready:
                    each: _RankProcess = key.data
                    try:
                        answer = each.read()
                    except EOFError:
                        culprit = self._culprit(each)
                        self._fail(culprit, f"rank {culprit.rank} {culprit.end()} in {doing!r}")
                    if answer is not None:
                        answers[each.rank] = answer
                        selector.unregister(each.answers)
        self.free = min((a["free"] for a in answers.values() if a.get("free") is not None), default=None)
        return [answers[rank] for rank in sorted(answers)]

    def _culprit(self, first: _RankProcess) -> _RankProcess:
        """Of the ranks that end within a moment, one that does not blame another."""
        deadline = time.monotonic() + SETTLE
        ended = []
        for each in [first, *(each for each in self._processes if each is not first)]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, deadline - time.monotonic()))
                ended.append(each)
        return next((each for each in ended if "by peer" not in each.said()), first)

    def _fail(self, rank: _RankProcess, reason: str) -> NoReturn:
        said = rank.said()
        self.close(patience=0.0)
        raise ContenderFailed(reason, said)
