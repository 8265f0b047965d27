"""What ranks that have stopped hold of a run, from which they go on without the one that is gone.

Each rank puts all that it has of each state into a file in shared memory, in the form of a checkpoint, and what it
holds of another's, where there are copies: then nothing refers to the engine any more, which ends with its process
groups. Where the ranks have met again they tell each other what is in these files, and take the newest step of which
every element is there: one that a rank has not come to is rolled forward on it, and one that no rank has whole is
rolled back. The files that it takes become a checkpoint of so many hosts, which the next engine loads, however it cuts
the states.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardfold.checkpoint.collect import collect, copied, header
from shardfold.checkpoint.draft import Host
from shardfold.checkpoint.files import write_file
from shardfold.checkpoint.folders import INDEX
from shardfold.checkpoint.index import Index, Piece
from shardfold.comm.cores import machine
from shardfold.comm.launcher_notes import tell_launcher
from shardfold.comm.shared_folders import SharedFolder
from shardfold.errors import CheckpointError, StepError
from shardfold.sharding.model import ShardedModel

__all__ = ["Held", "covering"]

Exchange = Callable[[str, str], list[str]]


@dataclass(frozen=True)
class _Told:
    """What one rank says of its files.

    Attributes:
        place: of the folder that theirs is in; ranks that have the same see the same files.
        folder: that they are in.
        host: for people.
        indexes: of what is in each.
    """

    place: str
    folder: str
    host: str
    indexes: list[Index]

    def to_text(self) -> str:
        return json.dumps([self.place, self.folder, self.host, [each.to_bytes().decode() for each in self.indexes]])

    @classmethod
    def from_text(cls, text: str, rank: int) -> _Told:
        place, folder, host, indexes = json.loads(text)
        return cls(place, folder, host, [Index.from_bytes(t.encode(), f"what rank {rank} holds") for t in indexes])


@dataclass(frozen=True)
class _Taken:
    """Whose file is taken.

    Attributes:
        rank: its number.
        told: what it says of its files.
        index: of that one.
    """

    rank: int
    told: _Told
    index: Index


class Held:
    """What this rank has, of itself and, where the table has copies, of another. It sends nothing, and the engine may
    be one whose collectives have failed.

    Args:
        model: that of the engine; None: this rank is new, and has nothing.
        uid: of this rank, equal to no other's in any epoch.
        state: what else is of the step that it is at, by name, as :meth:`Engine.save` takes it.
        copies: whether it holds what another one has, too.

    Raises:
        CheckpointError: there is no room for it in memory.
    """

    def __init__(
        self, model: ShardedModel | None, uid: int, state: Mapping[str, Any] | None = None, *, copies: bool = False
    ) -> None:
        segments = [] if model is None else model.segments()
        held = (region.nbytes for segment in segments for region in segment.regions.values())
        self._shared = SharedFolder.with_room((2 + 2 * copies) * sum(held))
        self._folder, self._uid = self._shared.path, uid
        self._indexes: list[Index] = []
        if model is not None:
            self.add(model, state, copies=copies)

    def add(self, model: ShardedModel, state: Mapping[str, Any] | None = None, *, copies: bool = False) -> None:
        """What this rank has now, too: of another step, where it is not known which one the others have.

        Raises:
            CheckpointError: there is no room for it in memory.
        """
        name = f"held-{self._uid:05d}-{model.run.steps}.safetensors"
        try:
            index, tensors = header(model, state or {}, {})
            parts, own = collect(model, {}, tensors, {}, {}, every=True)
            others, once = copied(model) if copies else ([], {})
            own.ranks.clear()  # random numbers stay what they are
            own.once.update(once)
            parts = [part for part in (*parts, *others) if part.piece.kind != "rank"]
            own.add_file(name, *write_file(self._folder / name, parts))
        except BaseException as error:
            self.drop()
            if isinstance(error, OSError):
                full = (
                    f"the states of this rank do not fit into {self._folder.parent} ({error.strerror}), from where the "
                    "others would go on: give it more room, or TMPDIR another folder."
                )
                tell_launcher(full)  # and not by what it has come here
                raise CheckpointError(full) from error
            raise
        index.join(own)
        if model.run.broken:  # it is of no step
            index.pieces.clear()
        self._indexes.append(index)

    def drop(self) -> None:
        """It is not needed any more."""
        self._shared.drop()

    @contextmanager
    def together(self, exchange: Exchange, rank: int) -> Iterator[Path]:
        """Inside, a checkpoint of what the ranks hold together; every rank calls it.

        Args:
            exchange: ``exchange(key, text)`` gives every rank's text.
            rank: this one.

        Raises:
            StepError: on all ranks: no step is whole in what they hold.
            CheckpointError: on all ranks: a file cannot be shown to the others.
        """
        base = self._folder.parent
        place = f"{machine()} {os.stat(base).st_dev} {base}"
        told = _Told(place, str(self._folder), socket.gethostname(), self._indexes)
        said = exchange("held", json.dumps([f"{self._folder.name}-{os.urandom(4).hex()}", told.to_text()]))
        texts = [json.loads(text) for text in said]
        every = [_Told.from_text(text, number) for number, (_, text) in enumerate(texts)]
        offered = [_Taken(number, each, index) for number, each in enumerate(every) for index in each.indexes]
        taken = [offered[number] for number in covering([each.index for each in offered])]
        if not taken:
            newest = max((each.index.step for each in offered), default=0)
            lost = (
                f"what is left of step {newest} is not whole: ranks that had the same part of the states are all "
                "gone, or were amid their updates; load a checkpoint."
            )
            tell_launcher(lost, lost=True)
            raise StepError(lost)
        folder = base / texts[0][0]
        here = [each for each in taken if each.told.place == told.place]
        made: list[SharedFolder] = []
        problem = ""
        try:
            try:
                if here and rank == here[0].rank:
                    made.append(SharedFolder(folder))
                    for each in here:  # its files stay where they are: another rank may die before all have them
                        for file in each.index.files:
                            os.link(f"{each.told.folder}/{file}", folder / file)
                    apart = len({each.place for each in every}) > 1
                    (folder / INDEX).write_bytes(_joined(taken, folder.name, apart=apart).to_bytes())
            except OSError as error:
                problem = f"{error.strerror} ({error.filename})"
            if problems := [text for text in exchange("held/there", problem) if text]:
                raise CheckpointError(f"what ranks hold cannot be put together: {problems[0]}.")
            yield folder
            exchange("held/read", "")
        finally:
            for shared in made:
                shared.drop()


def covering(indexes: Sequence[Index]) -> list[int]:
    """Whose files it takes to have every element of every state of the newest step that they have whole; none: there is
    no such step. Of ranks that have the same one is enough."""
    for step in sorted({index.step for index in indexes}, reverse=True):
        having = [number for number, index in enumerate(indexes) if index.step == step]
        taken: list[int] = []
        done: Mapping[tuple[str, str], list[tuple[int, int]]] = {}
        for number in having:
            with_it = _covered(indexes[each] for each in (*taken, number))
            if with_it != done:
                taken, done = [*taken, number], with_it
        sizes = {parameter.name: parameter.numel for parameter in indexes[having[0]].parameters}
        whole = all(ranges == [(0, sizes[name])] for (name, _), ranges in done.items() if sizes[name])
        if whole and {name for name, state in done if state == "weight"} >= {n for n, size in sizes.items() if size}:
            return taken
    return []


def _covered(indexes: Iterator[Index]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Which elements of which state of which parameter are in any of them, as ranges in rising order."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    pieces = (piece for index in indexes for piece in index.pieces if piece.kind in ("element", "block"))
    for piece in sorted(pieces, key=lambda piece: piece.start):
        ranges = found.setdefault((piece.of, piece.state), [])
        if ranges and piece.start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], piece.stop)
        else:
            ranges.append((piece.start, piece.stop))
    return found


def _joined(taken: Sequence[_Taken], folder: str, *, apart: bool) -> Index:
    """The index of the checkpoint that these files are; ``apart``: ranks do not see the same folders."""
    first, *others = (each.index for each in taken)
    known = set(map(_place, first.pieces))
    for other in others:
        pieces = [piece for piece in other.pieces if piece.kind in ("element", "block", "once")]
        pieces = [piece for piece in pieces if piece.kind == "once" or _place(piece) not in known]
        known.update(map(_place, pieces))
        first.join(replace(other, parameters=[], buffers=[], optimizer=None, run={}, pieces=pieces))
    if apart:
        hosts: list[dict[str, Any]] = []
        for place in dict.fromkeys(each.told.place for each in taken):
            here = [each for each in taken if each.told.place == place]
            files, ranks = tuple(file for each in here for file in each.index.files), tuple(e.rank for e in here)
            there = Path(here[0].told.folder).with_name(folder)
            hosts.append(Host(here[0].told.host, str(there), ranks, files).to_json())
        first.written["hosts"] = hosts
    return first


def _place(piece: Piece) -> tuple[object, ...]:
    """Which elements of which state it is; a copy has those that its original has."""
    return piece.of, piece.state, piece.start, piece.stop
