"""The ranks whose memory this one can read, and what they tell each other about what lies there."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from shardfold.comm._boards import WORD, Board, Door, Mark, Neighbour, Pages, read, wait_for
from shardfold.comm._words import Words
from shardfold.comm.cores import allowed, share
from shardfold.comm.transport import Waiter
from shardfold.tiers.limit import boot_id

__all__ = ["SLOTS", "Group", "neighbours"]

SLOTS = 1024
"""So many collectives of one group may be under way."""

READY, DONE = 0, 1


class Group:
    """The ranks of one group, and what they tell each other.

    Args:
        members, me, pages, progress, spins: see :class:`Board`.
        waiter: waits for a mark.

    Attributes:
        words: small messages among them.
    """

    def __init__(
        self,
        members: Sequence[Neighbour],
        me: int,
        pages: Pages,
        waiter: Waiter,
        progress: Callable[[], bool],
        *,
        spins: bool,
    ) -> None:
        self.members, self.me, self.size = members, me, len(members)
        self.others = [i for i in range(self.size) if i != me]
        self.closed = False  # nothing more is read
        start = self.size * WORD
        self._board = Board(members, me, pages, start, SLOTS, kinds=2, room=WORD, progress=progress, spins=spins)
        start += Board.bytes_of(self.size, SLOTS, 2, WORD)
        self.words = Words(members, me, pages, start, progress, spins=spins)
        self._waiter = waiter
        self._numbers = 0
        self._addresses = struct.Struct(f"{self.size}q")

    @staticmethod
    def bytes_of(ranks: int) -> int:
        """Of its pages."""
        return ranks * WORD + Board.bytes_of(ranks, SLOTS, 2, WORD) + Words.bytes_of(ranks)

    def number(self) -> int:
        """Of the next collective."""
        self._numbers += 1
        return self._numbers

    def post(self, number: int, address: int) -> None:
        """This rank's data of that collective is ready and lies there."""
        if number > SLOTS:  # first all others must be done with what stands in this place
            wait_for(self.all_done(number - SLOTS, number - SLOTS), self._waiter)
        self._board.pages.cells[self._board.rooms(number)[0] // WORD + self.me] = address
        self._board.arrive(number, READY)

    def done(self, number: int) -> None:
        """This rank has read what it needs."""
        self._board.arrive(number, DONE)

    def all_ready(self, number: int, begun: int) -> Mark:
        """That all have posted; who has posted ``begun`` can go on to that by itself."""
        return Mark(self._board, number, READY, begun=begun)

    def all_done(self, number: int, begun: int) -> Mark:
        """That all have read what they need; who has ended reads no more."""
        return Mark(self._board, number, DONE, begun=begun, ends=True)

    def addresses(self, number: int) -> tuple[int, ...]:
        """Where each rank's data lies, once they are ready."""
        return self._addresses.unpack_from(self._board.pages.bytes, self._board.rooms(number)[0])

    def read(self, other: int, address: int, into: int, num_bytes: int) -> None:
        """Copies bytes of another rank's memory.

        Raises:
            RuntimeError: its process has ended.
        """
        try:
            read(self.members[other].process, address, into, num_bytes)
        except OSError as error:
            raise self._board.ended(other, f"ended ({error.strerror})") from error

    def close(self) -> None:
        """This rank reads and gives nothing more."""
        self.closed = True
        self._board.close()


class Neighbours(NamedTuple):
    """What :func:`neighbours` has found.

    Attributes:
        groups: those all of whose ranks can read each other; None in place of the others.
        cores: how many this rank has to itself.
        everywhere: whether there are none in place of which None stands, on no rank.
    """

    groups: list[Group | None]
    cores: float
    everywhere: bool


_probe = ctypes.c_int64(secrets.randbits(62))  # which others read to see that this process is there


def neighbours(
    groups: Sequence[tuple[int, Sequence[int]]],
    door: Door | None,
    exchange: Callable[[str, str], list[str]],
    waiter: Waiter,
    progress: Callable[[], bool],
) -> Neighbours:
    """The groups all of whose ranks can read each other. All ranks call it.

    Args:
        groups: this rank's place in each, and their ranks.
        door: of this process; None: this rank sends.
        exchange: ``exchange(key, text)`` gives every rank's text.
        waiter, progress: see :class:`Group`.
    """
    place = _place() if door is not None else None
    mine: dict[str, Any] = {}
    made: dict[int, Pages] = {}
    if door is not None and place is not None:
        made = {i: Pages(Group.bytes_of(len(ranks))) for i, (me, ranks) in enumerate(groups) if me == 0}
        mine = {
            "place": place,
            "process": os.getpid(),
            "probe": ctypes.addressof(_probe),
            "token": _probe.value,
            "door": door.pages.file,
            "boards": [made[i].file if i in made else None for i in range(len(groups))],
            "cores": allowed(),
        }
    said = [json.loads(text) for text in exchange("near/boards", json.dumps(mine))]
    users = [entry["cores"] for entry in said if mine and entry and entry["place"] == place]
    found = {other: one for other, entry in enumerate(said) if mine and entry and (one := _found(mine, entry))}
    boards = {i: board for i, (_, ranks) in enumerate(groups) if (board := _board(i, ranks, found, said, made))}
    heard = exchange("near/seen", json.dumps([sorted(found), sorted(boards)]))
    seen: list[tuple[set[int], set[int]]] = [(set(ranks), set(theirs)) for ranks, theirs in map(json.loads, heard)]
    for board in made.values():
        board.close_file()  # all have opened it, and only they may
    cores = share(mine["cores"], users) if users else 1.0
    kept: list[Group | None] = [
        Group([found[r] for r in ranks], me, boards[i], waiter, progress, spins=cores >= 1)
        if all(set(ranks) <= seen[r][0] and i in seen[r][1] for r in ranks)
        else None
        for i, (me, ranks) in enumerate(groups)
    ]
    everywhere = all(len(ranks) == len(seen) and len(boards) == len(groups) for ranks, boards in seen)
    return Neighbours(kept, cores, everywhere)


def _found(mine: Mapping[str, Any], entry: Mapping[str, Any]) -> Neighbour | None:
    if entry["place"] != mine["place"] or not _of_this_user(entry["process"]):
        return None
    try:
        own = entry["process"] == mine["process"]
        door = None if own else Door(Pages.of(entry["process"], entry["door"], mmap.PAGESIZE))
    except (OSError, ValueError):
        return None
    one = Neighbour(entry["process"], entry["probe"], entry["token"], door)
    return one if one.is_there() else None


def _board(
    i: int, ranks: Sequence[int], found: Mapping[int, Neighbour], said: Sequence[Any], made: Mapping[int, Pages]
) -> Pages | None:
    """Of the ``i``-th group, which its first rank has made."""
    if i in made or ranks[0] not in found:
        return made.get(i)
    with suppress(OSError, ValueError):
        return Pages.of(said[ranks[0]]["process"], said[ranks[0]]["boards"][i], Group.bytes_of(len(ranks)))
    return None


def _of_this_user(process: int) -> bool:
    """Whether a process runs under the same user: one with more rights could read others' too, and is not to."""
    try:
        return os.stat(f"/proc/{int(process)}").st_uid == os.geteuid()
    except OSError:
        return False


def _place() -> str | None:
    """What ranks of one host have in common, and containers or simulated hosts on it do not; None: it does not say."""
    try:
        boot = boot_id()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return None
