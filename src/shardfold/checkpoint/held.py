"""What ranks that have stopped hold of a run, from which they go on without the one that is gone.

Each rank puts all that it has of each state into a file in shared memory, in the form of a checkpoint: then nothing
refers to the engine any more, which ends with its process groups. Where the ranks have met again they tell each other
what is in these files, and take the newest step of which every element is there: one that a rank has not come to is
rolled forward on it, and one that no rank has whole is rolled back. The files that it takes become a checkpoint of so
many hosts, which the next engine loads, however it cuts the states.
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

from shardfold.checkpoint.collect import collect, header
from shardfold.checkpoint.draft import Host
from shardfold.checkpoint.files import write_file
from shardfold.checkpoint.folders import INDEX
from shardfold.checkpoint.index import Index
from shardfold.comm.cores import machine
from shardfold.comm.shared_folders import SharedFolder
from shardfold.errors import CheckpointError, StepError
from shardfold.sharding.model import ShardedModel

__all__ = ["Held", "covering"]

Exchange = Callable[[str, str], list[str]]


@dataclass(frozen=True)
class _Told:
    """What one rank says of its file.

    Attributes:
        place: of the folder that it is in; ranks that have the same see the same files.
        base: the folder around it.
        host: for people.
        index: of what is in it.
    """

    place: str
    base: str
    host: str
    index: Index

    def to_text(self) -> str:
        return json.dumps([self.place, self.base, self.host, self.index.to_bytes().decode()])

    @classmethod
    def from_text(cls, text: str, rank: int) -> _Told:
        place, base, host, index = json.loads(text)
        return cls(place, base, host, Index.from_bytes(index.encode(), f"what rank {rank} holds"))


class Held:
    """What this rank has. It sends nothing, and the engine may be one whose collectives have failed.

    Args:
        model: that of the engine.
        uid: of this rank, equal to no other's in any epoch.

    Attributes:
        steps: updates that it has had.

    Raises:
        CheckpointError: there is no room for it in memory.
    """

    def __init__(self, model: ShardedModel, uid: int) -> None:
        self.steps = model.run.steps
        held = (region.nbytes for segment in model.segments() for region in segment.regions.values())
        self._shared = SharedFolder.with_room(2 * sum(held))
        self._folder = self._shared.path
        name = f"held-{uid:05d}.safetensors"
        try:
            self._index, tensors = header(model, {}, {})
            parts, own = collect(model, {}, tensors, {}, {}, every=True)
            own.ranks.clear()  # random numbers stay what they are
            own.add_file(name, *write_file(self._folder / name, [p for p in parts if p.piece.kind != "rank"]))
        except BaseException as error:
            self.drop()
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"the states of this rank do not fit into {self._folder.parent} ({error.strerror}), from where the "
                    "others would go on: give it more room, or TMPDIR another folder."
                ) from error
            raise
        self._index.join(own)
        if model.run.broken:  # it is of no step
            self._index.pieces.clear()

    def drop(self) -> None:
        """It is not needed any more."""
        self._shared.drop()

    def _show(self, folder: Path) -> None:
        """It stays where it is: another rank may die before all have it."""
        for file in self._index.files:
            os.link(self._folder / file, folder / file)

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
        told = _Told(f"{machine()} {os.stat(base).st_dev} {base}", str(base), socket.gethostname(), self._index)
        said = exchange("held", json.dumps([f"{self._folder.name}-{os.urandom(4).hex()}", told.to_text()]))
        texts = [json.loads(text) for text in said]
        every = [_Told.from_text(text, number) for number, (_, text) in enumerate(texts)]
        taken = covering([each.index for each in every])
        if not taken:
            raise StepError(
                f"what is left of step {max(each.index.step for each in every)} is not whole: ranks that had the same "
                "part of the states are all gone, or were amid their updates; load a checkpoint."
            )
        folder = base / texts[0][0]
        there = [number for number, each in enumerate(every) if each.place == told.place]
        mine = [number for number in there if number in taken]
        leads = bool(mine) and rank == mine[0]
        made: list[SharedFolder] = []

        def each(key: str, do: Callable[[], object], *, here: bool) -> None:
            problem = ""
            try:
                if here:
                    do()
            except OSError as error:
                problem = f"{error.strerror} ({error.filename})"
            if problems := [text for text in exchange(key, problem) if text]:
                raise CheckpointError(f"what ranks hold cannot be put together: {problems[0]}.")

        try:
            each("held/made", lambda: made.append(SharedFolder(folder)), here=leads)
            each("held/shown", lambda: self._show(folder), here=rank in mine)
            index = _joined(every, taken, folder.name) if leads else self._index
            each("held/there", lambda: (folder / INDEX).write_bytes(index.to_bytes()), here=leads)
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


def _joined(every: Sequence[_Told], taken: Sequence[int], folder: str) -> Index:
    """The index of the checkpoint that the files of these ranks are."""
    first, *others = (every[number].index for number in taken)
    for other in others:
        pieces = [piece for piece in other.pieces if piece.kind in ("element", "block", "once")]
        first.join(replace(other, parameters=[], buffers=[], optimizer=None, run={}, pieces=pieces))
    places = dict.fromkeys(every[number].place for number in taken)
    if len({each.place for each in every}) > 1:
        hosts: list[dict[str, Any]] = []
        for place in places:
            ranks = [number for number in taken if every[number].place == place]
            files = tuple(file for number in ranks for file in every[number].index.files)
            one = every[ranks[0]]
            hosts.append(Host(one.host, f"{one.base}/{folder}", tuple(ranks), files).to_json())
        first.written["hosts"] = hosts
    return first
