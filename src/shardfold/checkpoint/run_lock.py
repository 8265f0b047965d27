"""Whose a folder of checkpoints is: it belongs to one run, of which one process at a time saves there.

Who has loaded a checkpoint of it goes on with the run, and knows what was there at that moment. Anything else there is
another's: who finds it when it begins to save there is refused, if the save could replace or remove what others have
written. A save that only adds one is written beside them, without a claim. Which process saves there now says a file in
the folder, until the engine is closed; whether that still lives is known on its host:

    held here, alive            refused
    held here, dead             taken over
    held on another host        taken over, as nobody can tell whether a killed container or job left it; if the other
                                one lives after all, its next save finds that and is refused

So what a killed process leaves is in nobody's way, and of two that go on from the same checkpoint one saves. The name
of the run, which its first save draws, is in the index of each checkpoint: ``keep=`` counts those of one run.

Who takes over fences the other one, which may be stopped in the middle of a save: its draft, and the ``latest`` that a
checkpoint carries until it is named, are gone from where they were, so that the renames with which it would go on find
nothing. Ranks that a launcher has started again take over as soon as they load: what an earlier attempt of the same job
still does must not come between what was loaded and what is saved next.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from shardfold.checkpoint.folders import INDEX, LATEST, LEFT_OVER, OWNER, listed, origin, write_synced
from shardfold.errors import CheckpointError
from shardfold.tiers.limit import boot_id

__all__ = ["LOCK", "Holder", "RunLock"]


@dataclass(frozen=True)
class Holder:
    """A process.

    Attributes:
        host: where its id means what it means there: a container is a host of its own.
        pid: its id.
        started: when it began, in a unit of the system's, as ids are given again; empty where that is not known.
    """

    host: str
    pid: int
    started: str

    @staticmethod
    def here() -> Holder:
        """This process."""
        return Holder(_host(), os.getpid(), _started(os.getpid()))

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> Holder:
        """
        Raises:
            KeyError, TypeError, ValueError: it names none.
        """
        return Holder(str(said["host"]), int(said["pid"]), str(said["started"]))

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "pid": self.pid, "started": self.started}

    @property
    def alive(self) -> bool | None:
        """Whether it still runs; None: it is of another host, or of one that has started anew."""
        if self.host != _host():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it is of another user
            pass
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        where = "this host" if self.host == _host() else self.host.partition(" ")[0]
        return f"process {self.pid} on {where}"


def _host() -> str:
    said = [socket.gethostname()]
    with suppress(OSError):
        said.append(boot_id())
        said.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(said)


def _started(pid: int) -> str:
    """Empty also for one that has ended and was not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


LOG = getLogger("shardfold")
LOCK = ".shardfold-run.json"
TRIES = 8
_open: WeakValueDictionary[str, RunLock] = WeakValueDictionary()  # of this process, by token
_saves: set[str] = set()  # of this process, whose engines may replace each other's


@dataclass(frozen=True)
class _LockFile:
    """What the file says."""

    token: str  # of an engine
    holder: Holder
    attempt: tuple[str, int] = ("", 0)  # of which job, the how manieth

    @property
    def alive(self) -> bool | None:
        if self.holder == Holder.here():
            return self.token in _open
        return self.holder.alive


class RunLock:
    """The folders of one engine's run, on a rank that completes checkpoints.

    Attributes:
        run: the name of the run; empty until its first save, or until it has loaded one.
        replaces: False refuses a folder of another run. True takes it, and logs what it replaces of another.
    """

    def __init__(self) -> None:
        self.run = ""
        self.replaces = False
        self._token = os.urandom(6).hex()
        self._runs: set[str] = set()  # that this engine has gone on with
        self._saves: set[str] = set()  # of this engine
        self._known: dict[Path, set[str]] = {}  # saves that were in a folder when it was loaded from
        self._held: set[Path] = set()
        self._beside: set[Path] = set()  # folders of others in which this one has saved, too
        _open[self._token] = self

    def adopt(self, checkpoint: Path, *, completes: bool = True) -> None:
        """The engine goes on where this checkpoint was written; ``completes``: this rank is the one that saves."""
        held, (job, number) = _read(checkpoint.parent), _attempt()
        earlier = held if held is not None and held.attempt[0] == job and held.attempt[1] < number else None
        if completes and job and earlier is not None and not earlier.alive and self._take(checkpoint.parent, earlier):
            self._held.add(_real(checkpoint.parent))
        self._known[_real(checkpoint.parent)] = {_name(path) for path in listed(checkpoint.parent)}
        self.run = origin(checkpoint).run or self.run
        self._runs.add(self.run)

    def begin(self, token: str) -> None:
        """A save begins: the first one names a run that has no name yet."""
        self.run = self.run or token
        self._runs.add(self.run)
        self._saves.add(token)
        _saves.add(token)

    def owns(self, checkpoint: Path) -> bool:
        """Whether it is of this run, or of none that is known, as checkpoints of earlier versions are."""
        return origin(checkpoint).run in (*self._runs, "")

    def claim(self, target: Path, *, adds: bool, latest: bool) -> bool:
        """This process is the one that saves in the folder around ``target`` from now on; False if it was so before.

        Args:
            target: of a checkpoint.
            adds: it removes no checkpoint, so that it takes none from others if there is nothing in its place. Only
                a ``latest`` moves, which is refused where another process saves there.

        Raises:
            CheckpointError: the folder is another's; says whose, and what to do.
        """
        folder = target.parent
        if self.replaces:
            if (target / INDEX).is_file() and not self.owns(target):
                LOG.warning("%s of another run, which was not loaded, is replaced.", target)
            return False
        try:
            return self._claim(folder)
        except CheckpointError:
            held = _read(folder)
            theirs = held is not None and held.alive and held.holder != Holder.here()
            if not adds or (theirs and latest) or (target.exists() and not self._may_replace(target)):
                raise
        if latest and _real(folder) not in self._beside:
            self._beside.add(_real(folder))
            LOG.warning("%s has checkpoints of another run beside %s, which `latest` names now.", folder, target.name)
        return False

    def _may_replace(self, target: Path) -> bool:
        """Whether another engine of this program made it, of whose run this engine is not."""
        folder = _real(target.parent)
        return origin(target).save in _saves and folder not in self._held and folder not in self._known

    def check(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: another process has gone on from what this one wrote there.
        """
        if _real(folder) not in self._held:
            return
        held = _read(folder)
        if held is not None and held.token != self._token:
            raise CheckpointError(
                f"{folder} is no longer this run's: {held.holder} has gone on from it and saves there now; end one of "
                "the two, or give this one another folder"
            )
        if held is None:  # who took it has given it back
            self._refuse_unknown(folder)

    def release(self) -> None:
        """The engine is closed: another may go on at once."""
        _open.pop(self._token, None)
        for folder in list(self._held):
            self.let_go(folder)

    def let_go(self, folder: Path) -> None:
        """Nothing is saved in the folder any more."""
        self._held.discard(_real(folder))
        with suppress(OSError):
            if (said := _read(folder)) is not None and said.token == self._token:
                (folder / LOCK).unlink()

    def _claim(self, folder: Path) -> bool:
        for _ in range(TRIES):
            self.check(folder)
            held = _read(folder)
            if held is not None and held.token == self._token:
                return False
            self._refuse_other(folder, held)
            if held is not None and held.alive is None:
                LOG.warning(
                    "%s was last saved to by %s, and whether that still runs cannot be seen from here: this run goes "
                    "on there, and that one will be refused if it saves again.",
                    folder,
                    held.holder,
                )
            if self._take(folder, held):
                self._held.add(_real(folder))
                return True
        raise CheckpointError(f"{folder} is claimed by several runs at this moment; give each a folder of its own")

    def _refuse_other(self, folder: Path, held: _LockFile | None) -> None:
        """
        Raises:
            CheckpointError: the folder is not for this run.
        """
        here = held is not None and held.holder == Holder.here()
        if held is not None and held.alive and not (here and _real(folder) in self._known):
            who = "another engine of this process" if here else str(held.holder)
            raise CheckpointError(
                f"{folder} is where {who} saves its checkpoints: give this run a folder of its own, or end the other"
            )
        self._refuse_unknown(folder)

    def _refuse_unknown(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: it has checkpoints that this engine has neither saved nor found when it loaded from there.
                One whose writer died before it was named, where none was before, is in nobody's way: who looks for
                ``latest`` begins anew.
        """
        known, named = self._known.get(_real(folder)), (folder / LATEST).exists()
        there = [path for path in listed(folder) if named or not (path / LATEST).exists()]
        unknown = [path for path in there if _name(path) not in self._saves | (known or set())]
        if not unknown:
            return
        name, how = unknown[-1].name, f"engine.load({str(folder)!r})"
        if known is None:
            raise CheckpointError(
                f"{folder} has checkpoints of another run, {name} the newest, which this one has not loaded: go on "
                f"from them with {how}, or give this run a folder of its own"
            )
        raise CheckpointError(
            f"{folder} has {name}, which came after this run had loaded from there, so another one has gone on from "
            f"the same checkpoint: go on from its with {how}, or give this run a folder of its own"
        )

    def _take(self, folder: Path, held: _LockFile | None) -> bool:
        """Takes the place of ``held``; False if another was faster."""
        path, aside = folder / LOCK, folder / f"{LOCK}.{self._token}"
        if path.exists():
            try:
                os.rename(path, aside)  # of two, one finds it
            except FileNotFoundError:
                return False
            now = _parsed(aside)
            if now != held:
                with suppress(OSError):
                    os.rename(aside, path)
                return False
            aside.unlink()
        said = {"run": self.run, "token": self._token, "attempt": _attempt(), **Holder.here().to_json()}
        try:
            write_synced(path, json.dumps(said).encode(), new=True)
        except FileExistsError:
            return False
        if held is not None:
            _fence(folder, held.holder)
        held = _read(folder)
        return held is not None and held.token == self._token


def _attempt() -> tuple[str, int]:
    """Of the launcher's: the name of its job, "" if it has none, and how often its ranks were started again."""
    name, count = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return ("", 0) if name == "none" else (name, int(count) if count.isdigit() else 0)


def _fence(folder: Path, before: Holder) -> None:
    """What the process that saved there has begun leads nowhere: no rename of its finds what it would move."""
    for found in folder.iterdir():
        with suppress(OSError, ValueError, KeyError, TypeError):
            if (match := LEFT_OVER.fullmatch(found.name)) is not None:
                said = json.loads((found / OWNER).read_bytes())
                if match[2] == "writing" and Holder.from_json(said) == before:
                    aside = found.with_name(found.name.replace(".writing-", ".removed-"))
                    os.rename(found, aside)  # at once, whatever is in it
                    shutil.rmtree(aside, ignore_errors=True)
            elif (found / INDEX).is_file():
                (found / LATEST).unlink(missing_ok=True)


def _name(checkpoint: Path) -> str:
    """Of the save that made it, or of what has none, as checkpoints of earlier versions."""
    return origin(checkpoint).save or f"{checkpoint.name} {(checkpoint / INDEX).stat().st_mtime_ns}"


def _real(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _read(folder: Path) -> _LockFile | None:
    return _parsed(folder / LOCK)


def _parsed(path: Path) -> _LockFile | None:
    """None: it is not there, or says nothing, as after a process was killed that made it."""
    try:
        said = json.loads(path.read_bytes())
        job, number = said.get("attempt", ("", 0))
        return _LockFile(str(said["token"]), Holder.from_json(said), (str(job), int(number)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
