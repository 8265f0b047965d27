"""What a run is at, as its folder says and as is true: also when its processes are gone, stopped, or wait in vain."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardfold.launch.run_records import ENDS, LAUNCHER, STATUS, Record, boot_of_this_machine, read_records
from shardfold.tiers.limit import process_state
from shardfold.tools.observe.event_files import event_files, last_scalars
from shardfold.tools.observe.run_files import opened, read_object

__all__ = ["OVER", "RunStatus", "runs_in"]

OVER = (*ENDS, "lost")
"""States in which nothing of a run goes on."""
DEEP = 3  # levels of folders that runs are looked for in
TAIL = 64 * 1024  # bytes of figures that are read for the last ones
SLACK = 30.0  # seconds that a word from another machine may take, where the file system tells nothing of locks


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What a run is at.

    Attributes:
        folder: of the run.
        state: ``"starting"``, ``"training"``, ``"saving"``, ``"evaluating"``; ``"stalled"``: its processes live, and no
            step comes; ``"done"``, ``"stopped"`` (somebody asked it to end, and it did in good order), ``"failed"``,
            ``"lost"``: its processes are gone and none said why; ``"unknown"``: the folder does not tell.
        step, steps: optimizer steps done, and of the whole run; 0: none, not known.
        age: seconds since its first rank said something; None: never.
        rank: which rank failed, or makes the others wait; None: none, or not known.
        words: why it is at that, for people; "" if there is nothing to say.
        ranks: records of its ranks.
    """

    folder: Path
    state: str
    step: int = 0
    steps: int = 0
    age: float | None = None
    rank: int | None = None
    words: str = ""
    ranks: Sequence[Record] = ()

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    def state_of(self, record: Record, changed: float) -> str:
        """What one of its processes is at: ``"lost"`` if it is gone and has not said why, unless the run has ended so
        that it had to go. ``changed``: as of :func:`read_records`."""
        if record.phase in OVER or _lives(record, changed):
            return record.phase
        ends_so = record.rank == LAUNCHER or self.state in ("done", "stopped")
        return self.state if self.is_over and ends_so else "lost"

    @property
    def why(self) -> str:
        """The words, with the rank that failed before them."""
        if self.state != "failed" or self.rank is None or self.rank < 0 or self.words.startswith("rank"):
            return self.words
        return f"rank {self.rank}: {self.words}"

    @property
    def last_figures(self) -> dict[str, Any]:
        """The last whole line of ``metrics.jsonl``; where there is none, the last scalars of TensorBoard's files."""
        return next(iter(self.last_rows(1)), {})

    def last_rows(self, most: int) -> list[dict[str, Any]]:
        """The last whole lines of ``metrics.jsonl``, the last one first, as far as a piece of it has them; where there
        is no such file, the last scalars of TensorBoard's."""
        found: list[dict[str, Any]] = []
        with opened(self.folder / "metrics.jsonl") as file, suppress(OSError):
            if file is None:
                return [dict(last_scalars(self.folder))]
            lines = os.pread(file, TAIL, max(0, os.fstat(file).st_size - TAIL)).split(b"\n")
            for line in reversed(lines[:-1]):
                with suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        found.append(row)
                if len(found) == most:
                    break
        return found

    def to_json(self) -> str:
        """One line: what it is at, its last figures, and what each of its ranks has said."""
        said = {**asdict(self), "folder": str(self.folder), "figures": self.last_figures}
        return json.dumps(said)

    @classmethod
    def of(cls, folder: Path) -> RunStatus:
        """Read what the folder says, and ask the system what of it still holds."""
        records, changed = read_records(folder)
        ranks = [each for each in records if each.rank != LAUNCHER]
        launcher = next((each for each in records if each.rank == LAUNCHER), None)
        if not ranks or ranks[0].rank != 0:
            return cls._without_ranks(folder, launcher)
        lead, age = ranks[0], ranks[0].age(changed)
        found = _judge(ranks, launcher, age, changed)
        return cls(folder=folder, step=lead.step, steps=lead.steps, age=age, ranks=ranks, **found)

    @classmethod
    def _without_ranks(cls, folder: Path, launcher: Record | None) -> RunStatus:
        if launcher is not None:
            lives = launcher.lives is not False
            words = "" if lives else "its launcher ended before its ranks had begun"
            return cls(folder=folder, state="starting" if lives else "lost", words=launcher.words or words)
        if summary := read_object(folder / "summary.json"):
            steps = summary.get("steps") if isinstance(summary.get("steps"), int) else 0
            return cls(folder=folder, state="stopped" if summary.get("interrupted") else "done", step=steps or 0)
        if files := event_files(folder):
            with suppress(OSError):
                age = max(0.0, time.time() - files[-1].stat(follow_symlinks=False).st_mtime)
                step = int(last_scalars(folder).get("step") or 0)
                return cls(folder=folder, state="unknown", step=step, age=age, words="it has TensorBoard's files only")
        return cls(folder=folder, state="unknown", words=f"it has no {STATUS}")


def _judge(ranks: Sequence[Record], launcher: Record | None, age: float, changed: float) -> dict[str, Any]:
    """The state, the rank that is to blame, and the words."""
    lead = ranks[0]
    if launcher is not None and launcher.phase in OVER:
        own = next((each.words for each in ranks if each.rank == launcher.about), "")
        return {"state": launcher.phase, "rank": launcher.about, "words": own or launcher.words}
    if lead.phase in ("done", "stopped"):
        return {"state": lead.phase}
    failed = sorted((each for each in ranks if each.phase == "failed"), key=lambda each: (each.follows, each.clock))
    gone = [each for each in ranks if each.phase not in OVER and not _lives(each, changed)]
    if failed and not (gone and failed[0].follows):
        return {"state": "failed", "rank": failed[0].rank, "words": failed[0].words}
    if len(gone) == len(ranks):
        return {"state": "lost", "words": _how_lost(lead)}
    if gone:
        where = f"process {gone[0].pid} on host {gone[0].host}"
        return {"state": "failed", "rank": gone[0].rank, "words": f"its {where} is gone and has not said why"}
    if lead.promise and age > lead.promise:
        return {"state": "stalled", **_why_stalled(ranks, age)}
    return {"state": lead.phase}


def _lives(record: Record, changed: float) -> bool:
    if record.lives or record.lives is None:
        return True
    # A lock of another machine may not be seen here: then whoever wrote of late lives.
    return record.host != socket.gethostname() and record.age(changed) < max(record.promise, SLACK)


def _how_lost(lead: Record) -> str:
    if lead.host == socket.gethostname() and lead.boot not in ("", boot_of_this_machine()):
        return f"the machine was restarted while it was {lead.phase}"
    return f"all of its processes are gone, and none has said why; the last word was {lead.phase}, step {lead.step}"


def _why_stalled(ranks: Sequence[Record], age: float) -> dict[str, Any]:
    for each in ranks:
        if each.host == socket.gethostname() and process_state(each.pid) == "T":
            return {"rank": each.rank, "words": f"rank {each.rank} is stopped (SIGSTOP), process {each.pid}"}
    behind = min(ranks, key=lambda each: (each.step, each.at))
    ahead = max(each.step for each in ranks)
    if behind.step < ahead:
        return {"rank": behind.rank, "words": f"rank {behind.rank} is at step {behind.step}, others at {ahead}"}
    return {"rank": None, "words": f"no step for {age:.0f} s"}


def runs_in(roots: Sequence[Path]) -> Iterator[Path]:
    """The run folders in these folders, at most three levels down, and these folders if they are runs; links are not
    followed. A folder with event files of TensorBoard's is one, and may have others in it."""

    def below(folder: Path, depth: int) -> Iterator[Path]:
        if (folder / STATUS).is_file() or all((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
            yield folder
            return
        if event_files(folder):
            yield folder
        if depth:
            with suppress(OSError):
                for each in sorted(folder.iterdir()):
                    if each.is_dir() and not each.is_symlink():
                        yield from below(each, depth - 1)

    for root in roots:
        yield from below(root, DEEP)
