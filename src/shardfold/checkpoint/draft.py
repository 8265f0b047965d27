"""The folder in which a checkpoint is written, until it takes its place.

A checkpoint is written into a folder beside its place (``.step-100.writing-TOKEN``), synced, and then renamed; where
one of that name exists already the two are exchanged by one system call and the old one is removed. ``latest`` is
replaced after that. A process killed at any moment leaves the old checkpoint, or the new one, and perhaps a folder that
the next save from the same host clears away.

Hosts that share no disk have such a folder each. All of them take their places before any ``latest`` is replaced, so
that whatever a ``latest`` names is on every host. Which ranks share one the folder itself tells, and not the name of
the host: rank 0 makes the draft, and who sees it shares its disk. The others leave a word each where they would write,
and find each other by these.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardfold.checkpoint.folders import ASIDE, DRAFT, INDEX, LATEST, LEFT_OVER, OWNER, sync_folder, write_synced
from shardfold.checkpoint.run_lock import Holder, RunLock
from shardfold.comm.launcher_notes import refuse_without_lease
from shardfold.errors import CheckpointError, CollectiveError, by_rank

__all__ = ["Draft", "Host", "find_hosts", "hosts_said", "whose"]


HERE = "{}.here"  # what a rank writes to find out which others see the same folder
DAY = 24 * 3600.0
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


class Draft:
    """A folder that is to become ``target``; all ranks write into it, one of them begins and commits it.

    Args:
        target: the checkpoint's folder.
        token: of this save, 12 hexadecimal digits, the same on all ranks.
        latest: whether it becomes the latest checkpoint.
        lock: whose the folder around it is; None: that does not matter.
        adds: whether no checkpoint goes, if there is nothing at ``target``.
    """

    def __init__(
        self, target: Path, token: str, *, latest: bool = True, lock: RunLock | None = None, adds: bool = False
    ) -> None:
        self.target, self.token, self._latest = target, token, latest
        self.lock, self._adds = lock, adds
        self.path = target.parent / DRAFT.format(target.name, token)
        self._ours = False  # whether what lies at ``path`` is this draft
        self._claimed = False  # whether the folder was nobody's before
        self._tried = False  # whether ranks have left words in it before it was begun
        self._undo: Callable[[], None] | None = None

    def begin(self) -> None:
        """Makes the folder, and removes those that dead processes left beside it.

        Raises:
            CheckpointError: the target is not a checkpoint's place, or the folder around it is another run's.
            OSError: of the file system.
        """
        parent = self.target.parent
        if self.target.name == LATEST or self.target.name.startswith(".") or not self.target.name:
            raise CheckpointError(
                f"{self.target}: a checkpoint is not named {self.target.name!r}: {LATEST!r} is the file that says "
                "which one is the latest, and names that begin with a dot are hidden; choose another."
            )
        there = next(above for above in self.target.parents if above.exists())
        if not there.is_dir():
            raise CheckpointError(f"{there} is a file, where a folder is needed; choose another path.")
        parent.mkdir(parents=True, exist_ok=True)
        if (parent / LATEST).is_dir():
            raise CheckpointError(
                f"{parent / LATEST} is a folder, where the file that says which checkpoint is the latest belongs: "
                "choose another folder for checkpoints, or move it."
            )
        self._check_target()
        if self.lock is not None:
            self._claimed = self.lock.claim(self.target, adds=self._adds, latest=self._latest)
        _clear(parent, self.path.name)
        self.path.mkdir(exist_ok=self._tried)
        self._ours = True
        self.unmark()
        (self.path / OWNER).write_text(json.dumps(Holder.here().to_json()), encoding="utf-8")  # training waits for it

    # -- which ranks see it

    @property
    def there(self) -> bool:
        """Whether this rank sees the folder that another rank has made."""
        return (self.path / OWNER).is_file()

    def mark(self, rank: int) -> None:
        """Leaves a word in it, on a host that does not see rank 0's: who reads it sees the same folder."""
        self._tried = True
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / HERE.format(rank)).touch()

    def first(self) -> int:
        """The lowest rank that sees this folder too, when all have left their words; 0 where it is rank 0's."""
        return 0 if self.there else min(int(mark.stem) for mark in self._marks())

    def unmark(self) -> None:
        """Removes these words, when all ranks have read them."""
        for mark in self._marks():
            mark.unlink()

    def _marks(self) -> list[Path]:
        return [mark for mark in self.path.glob(HERE.format("*")) if mark.stem.isdecimal()]

    # -- how it becomes a checkpoint

    def commit(self, index: bytes) -> None:
        """The folder, complete but for its index, takes its place, and is the latest if it is to be.

        Raises:
            CheckpointError, OSError: all is as it was, and the draft still there.
        """
        try:
            self.place(index)
            self.name()
        except BaseException:
            self._take_back()
            raise
        self.finish()

    def place(self, index: bytes) -> None:
        """Takes its place; :meth:`discard` still brings all back to where it was.

        Raises:
            CheckpointError, OSError: it did not.
        """
        self._check_own()
        write_synced(self.path / INDEX, index)
        if self._latest:
            write_synced(self.path / LATEST, self.target.name.encode())
        sync_folder(self.path)
        self._undo = self._take_place()
        sync_folder(self.target.parent)

    def _check_own(self) -> None:
        """
        Raises:
            CheckpointError: another process saves here now.
            CollectiveError: or may do so, for all that the launcher says.
        """
        if self.lock is not None:
            self.lock.check(self.target.parent)
        refuse_without_lease(str(self.target))

    def pledge(self) -> Callable[[], None]:
        """It stays in its place until it is known what became of it on the other hosts; what takes that back."""
        undo, self._undo, self._ours = self._undo, None, False

        def take_back() -> None:
            self._undo, self._ours = undo, True
            self.discard()

        return take_back

    def decide(self) -> None:
        """It is in its place on every host, and stays there whatever comes."""
        self._undo = None
        self._ours = self._claimed = False

    def name(self) -> None:
        """Is the latest from now on, if it is to be."""
        if self._latest:
            self._check_own()
            try:
                os.replace(self.target / LATEST, self.target.parent / LATEST)
            except FileNotFoundError:
                self._check_own()  # it was taken over in between
                raise

    def finish(self, *, alone: bool = True) -> None:
        """Removes what it has replaced; ``alone``: no other host has a part of it."""
        self.decide()
        with suppress(OSError):  # it is done; after a loss of power ``latest`` may be the one before
            sync_folder(self.target.parent)
            (self.target / OWNER).unlink()
        for old in (self.path, self.target.parent / ASIDE.format(self.target.name)):  # of the same name
            shutil.rmtree(old, ignore_errors=True)
        if not alone:  # whatever was left half-way on several hosts has a successor on all of them
            with suppress(OSError):
                _clear(self.target.parent, self.path.name, halves=True)

    def _take_back(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            try:
                self._check_own()
            except (CheckpointError, CollectiveError):  # it is a checkpoint of the run, which others have gone on with
                self._ours = False
                return
            undo()

    @property
    def committed(self) -> bool:
        """Whether this save, and no other, is what lies at the target; as another rank can see it."""
        try:
            with open(self.target / INDEX, "rb") as file:
                return json.load(file)["written"].get("save") == self.token
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def discard(self) -> None:
        """Removes what was written, unless it has become the checkpoint."""
        with suppress(OSError):
            self._take_back()
        if self._claimed and self.lock is not None:
            self.lock.let_go(self.target.parent)
            self._claimed = False
        if self._ours:
            shutil.rmtree(self.path, ignore_errors=True)
            self._ours = False
        elif self._tried:
            self.sweep()

    def sweep(self) -> None:
        """On another rank, which has heard that the save failed: removes what it wrote after it was discarded."""
        if not (self.path / INDEX).exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def _take_place(self) -> Callable[[], None]:
        """Renames the folder to its target; what brings both back to where they were."""
        path, target = self.path, self.target
        if not target.exists():
            os.rename(path, target)
            return lambda: os.rename(target, path)
        self._check_target()
        if _swap(path, target):
            return lambda: None if _swap(path, target) else self._lose()
        # No such system call here: for a moment neither is there, and ``resolve`` knows the other name.
        aside = target.parent / ASIDE.format(target.name)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
        try:
            os.rename(path, target)
        except BaseException:
            os.rename(aside, target)
            raise

        def undo() -> None:
            os.rename(target, path)
            os.rename(aside, target)

        return undo

    def _lose(self) -> None:
        """What lies at ``path`` is the checkpoint that was replaced: nobody may remove it."""
        self._ours = False

    def _check_target(self) -> None:
        target = self.target
        if not target.exists():
            return
        if not target.is_dir() or (not (target / INDEX).exists() and any(target.iterdir())):
            raise CheckpointError(
                f"{target} exists and is not a checkpoint: nothing was written; choose another path, or remove it."
            )


def _swap(one: Path, other: Path) -> bool:
    """Exchanges two folders at once; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _clear(parent: Path, own: str, *, halves: bool = False) -> None:
    """Removes what processes that are no more left in a folder of checkpoints.

    ``halves``: also parts of checkpoints of several hosts, some of which may have them under their name: until there is
    another one, they may be all that there is.
    """
    for found in parent.iterdir():
        match = LEFT_OVER.fullmatch(found.name)
        if match is None or not found.is_dir() or found.name == own:
            continue
        name, kind = match.groups()
        if kind is None and not (parent / name).exists() and (found / INDEX).is_file():
            with suppress(OSError):
                os.rename(found, parent / name)  # its successor never came
        elif kind == "removed" or ((kind is None or _dead(found)) and (halves or not _is_half(found))):
            shutil.rmtree(found, ignore_errors=True)


def _is_half(folder: Path) -> bool:
    """Whether a folder has a host's part of a checkpoint that several hosts have parts of."""
    try:
        return bool(json.loads((folder / INDEX).read_bytes())["written"].get("hosts"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _dead(draft: Path) -> bool:
    """Whether nobody writes into a draft any more."""
    try:
        alive = Holder.from_json(json.loads((draft / OWNER).read_text())).alive
        if alive is not None:
            return not alive
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        return time.time() - draft.stat().st_mtime > DAY
    except OSError:
        return False


# -- hosts


@dataclass(frozen=True)
class Host:
    """Ranks that see the same folder.

    Attributes:
        name: of the machine.
        folder: the checkpoint's, there.
        ranks: in rising order; the first of them completes the checkpoint there.
        files: that they wrote.
    """

    name: str
    folder: str
    ranks: tuple[int, ...]
    files: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.name} (rank{'s' * (len(self.ranks) > 1)} {_ranges(self.ranks)})"

    def to_json(self) -> dict[str, Any]:
        return {"host": self.name, "folder": self.folder, "ranks": list(self.ranks), "files": list(self.files)}

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> Host:
        return Host(str(said["host"]), str(said["folder"]), tuple(said["ranks"]), tuple(said["files"]))


def find_hosts(
    draft: Draft, rank: int, world: int, *, anyone: Callable[[bool], bool], everyone: Callable[[str, str], list[str]]
) -> list[Host]:
    """The hosts of a save, rank 0's first; on each other one its first rank has begun a draft of its own.

    Args:
        draft: which rank 0 has begun.
        rank: this one.
        world: how many there are.
        anyone: whether any rank says so.
        everyone: what each rank says under a name.

    Raises:
        CheckpointError: on all ranks: a host cannot write there.
    """
    alone = Host(socket.gethostname(), str(draft.target), tuple(range(world)))
    if not anyone(not draft.there):
        return [alone]
    first, problem = 0, ""
    try:
        if not draft.there:
            draft.mark(rank)
    except OSError as error:
        problem = f"{error.strerror} ({error.filename})"
    anyone(False)  # all have left their words
    if not problem:
        first = draft.first()
    told = [json.loads(said) for said in everyone("hosts", json.dumps([first, alone.name, alone.folder, problem]))]
    if rank == 0:
        draft.unmark()
    problems = {number: said[3] for number, said in enumerate(told)}
    if not any(problems.values()) and first == rank != 0:
        try:
            draft.begin()
        except (CheckpointError, OSError) as error:
            problem = str(error)
    problems |= {number: said or problems[number] for number, said in enumerate(everyone("drafts", problem))}
    if any(problems.values()):
        raise CheckpointError(by_rank(problems))
    ranks: dict[int, list[int]] = {}
    for number, said in enumerate(told):
        ranks.setdefault(said[0], []).append(number)
    return [Host(told[lead][1], told[lead][2], tuple(those)) for lead, those in sorted(ranks.items())]


def hosts_said(index: Any) -> list[Host]:
    """The hosts that wrote a checkpoint, as its index names them; none: all of it was written into one folder."""
    try:
        return [Host.from_json(said) for said in index.written.get("hosts", ())]
    except (KeyError, TypeError, AttributeError):
        return []


def whose(index: Any, file: str) -> str:
    """Where a file of a checkpoint of several hosts was written, for people; empty if that is not known."""
    for host in hosts_said(index):
        if file in host.files:
            return f"it was written on {host} as {Path(host.folder) / file}: copy it from there"
    return ""


def _ranges(ranks: Sequence[int]) -> str:
    """``0-3, 8``"""
    said: list[list[int]] = []
    for rank in ranks:
        if said and said[-1][-1] + 1 == rank:
            said[-1].append(rank)
        else:
            said.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in said)
