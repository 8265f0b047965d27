"""Which ranks see the same folder: on hosts that share no disk each one has a part of a checkpoint.

The folder itself is asked, not the name of the host: rank 0 makes the draft of a checkpoint, and who sees it shares its
disk. The others leave a word each where they would write, and find each other by these.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardfold.checkpoint.draft import Draft
from shardfold.errors import CheckpointError, by_rank

__all__ = ["Host", "find_hosts", "hosts_said", "whose"]


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
