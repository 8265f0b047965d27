"""Ranks that sleep on a board are woken, in whatever order a processor makes writes visible and threads run."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfold.comm import _boards as boards
from shardfold.comm import _futex, _neighbours, _words
from shardfold.comm._boards import WORD, Board, possible
from shardfold.comm._near import NearTransport
from shardfold.comm.mesh import DataMesh
from shardfold.comm.transport import GlooTransport
from shardfold.testing import Ranks

LIMIT = timedelta(seconds=30)
ALLOWED = _neighbours.allowed
ROUNDS, SLOTS = 3, 2


class _Stuck(BaseException):
    """Nobody can go on."""


class _Machine:
    """A processor with stores that become visible later, in their order, and a kernel with ``futex``. One thread runs
    at a time; which one, and when a store becomes visible, ``choose`` says before each access, and how often at all.

    [1] P. Sewell, S. Sarkar, S. Owens, F. Zappa Nardelli, M. O. Myreen, "x86-TSO", CACM 53 (7), 2010, section 3.2.
    """

    def __init__(self, threads: int, words: int, choose: random.Random) -> None:
        self.memory = [0] * words
        self.buffers: list[list[tuple[int, int]]] = [[] for _ in range(threads)]
        self.asleep: dict[int, int] = {}  # by thread: the address
        self.over: set[int] = set()
        self.stuck = False
        self._choose, self._turn, self._moved = choose, -1, threading.Condition()
        self._shown, self._changes = choose.choice([0.02, 0.2]), choose.choice([0.1, 0.5])
        self._local = threading.local()

    # -- accesses

    def __getitem__(self, word: int) -> int:
        me = self._step()
        mine = [value for place, value in self.buffers[me] if place == word]
        return mine[-1] if mine else self.memory[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.buffers[self._step()].append((word, value))

    def fence(self) -> None:
        self._empty(self._step())

    def sleep_while(self, address: int, value: int, seconds: float | None) -> None:
        me = self._step()
        self._empty(me)
        if self.memory[address // WORD] == value:
            self.asleep[me] = address
            self._step()

    def wake(self, address: int) -> None:
        self._empty(self._step())
        self.asleep = {one: where for one, where in self.asleep.items() if where != address}

    def _empty(self, thread: int) -> None:
        while self.buffers[thread]:
            self._show(thread)

    def _show(self, thread: int) -> None:
        word, value = self.buffers[thread].pop(0)
        self.memory[word] = value

    # -- threads

    def run(self, works: list[Any]) -> bool:
        """Whether all came to their ends."""
        threads = [threading.Thread(target=self._one, args=(i, work)) for i, work in enumerate(works)]
        for thread in threads:
            thread.start()
        with self._moved:
            self._next()
        for thread in threads:
            thread.join()
        return not self.stuck

    def _one(self, me: int, work: Any) -> None:
        self._local.me = me
        with suppress(_Stuck):
            self._wait(me)
            work()
        with self._moved:
            self.over.add(me)
            self._next()

    def _step(self) -> int:
        me = self._local.me
        with self._moved:
            self._next()
        self._wait(me)
        return me

    def _wait(self, me: int) -> None:
        with self._moved:
            while self._turn != me and not self.stuck:
                self._moved.wait()
        if self.stuck:
            raise _Stuck

    def _next(self) -> None:
        while True:
            able = [i for i in range(len(self.buffers)) if i not in self.asleep and i not in self.over]
            hidden = [i for i, buffer in enumerate(self.buffers) if buffer]
            if not able and not hidden:
                self.stuck |= len(self.over) < len(self.buffers)
                self._turn = -1
                break
            if hidden and (not able or self._choose.random() < self._shown):
                self._show(self._choose.choice(hidden))
                continue
            if self._turn not in able or self._choose.random() < self._changes:
                self._turn = self._choose.choice(able)
            break
        self._moved.notify_all()


class _Words:
    """What a board reads its rows from: each word is an access of its own."""

    def __init__(self, machine: _Machine) -> None:
        self._machine = machine

    def row(self, begin: int, count: int) -> tuple[int, ...]:
        return tuple(self._machine[begin // WORD + i] for i in range(count))


class _Row(struct.Struct):
    def unpack_from(self, buffer: Any, offset: int = 0) -> tuple[Any, ...]:
        return buffer.row(offset, self.size // WORD)


class _Pages:
    def __init__(self, machine: _Machine) -> None:
        self.cells, self.bytes, self.address = machine, _Words(machine), 0


def _board(machine: _Machine, me: int, ranks: int) -> Board:
    members: Any = [None] * ranks
    pages: Any = _Pages(machine)
    board = Board(members, me, pages, ranks * WORD, SLOTS, kinds=1, room=0, progress=lambda: False, spins=False)
    board._row = _Row(board._row.format)
    return board


def _meets(board: Board) -> None:
    for number in range(1, ROUNDS + 1):
        board.arrive(number, 0)
        while not board.all_arrived(number, 0):
            board.sleep(number, 0, 1.0)


def _orders(count: int) -> Iterator[random.Random]:
    for seed in range(count):
        yield random.Random(seed)


@pytest.mark.parametrize(("ranks", "orders"), [(2, 400), (3, 100)])
def test_no_waking_is_missed_in_any_order(monkeypatch: pytest.MonkeyPatch, ranks: int, orders: int) -> None:
    """The board's own code, on a processor that may let each store wait. Nothing here ends a sleep but a waking."""
    for choose in _orders(orders):
        machine = _Machine(ranks, ranks + Board.bytes_of(ranks, SLOTS, 1, 0) // WORD, choose)
        monkeypatch.setattr(boards, "_futex", machine)
        assert machine.run([partial(_meets, _board(machine, me, ranks)) for me in range(ranks)])


# -- between processes


def _exchange(key: str, text: str) -> list[str]:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    return said


def _wires() -> tuple[NearTransport, DataMesh]:
    mesh = DataMesh(None, torch.device("cpu"), LIMIT)
    gloo = GlooTransport(lambda n, dtype: torch.empty(n, dtype=dtype), lambda flat: None)
    return NearTransport(gloo, mesh.groups(), mesh.rank, _exchange, lambda work: work.wait(LIMIT)), mesh


def _met(rounds: int) -> bool:
    """Sleeps here have no end but a waking."""
    wire, mesh = _wires()
    board: Any = wire._near[id(mesh.everyone)]._board
    for number in range(1, rounds + 1):
        board.arrive(number, 0)
        while not board.all_arrived(number, 0):
            board.sleep(number, 0, None)
    mesh.close()
    return True


needs_near = pytest.mark.skipif(not possible(), reason="this system has no cross memory attach")


@needs_near
def test_processes_wake_each_other(ranks: Ranks) -> None:
    assert ranks.run(_met, 500, world_size=3) == [True] * 3


def _looks(cores: list[list[int]]) -> tuple[bool, int, int]:
    """Whether rank 0 may spin, and how often it looked and slept until rank 1 came, when it had slept five times."""
    _neighbours.allowed = lambda: cores[dist.get_rank()]
    store: Any = dist.distributed_c10d._get_default_store()
    wire, mesh = _wires()
    tensor, looks, sleeps = torch.ones(10), 0, 0
    if mesh.rank == 0:
        look, sleep = Board.all_arrived, _futex.sleep_while

        def looked(*given: Any) -> bool:
            nonlocal looks
            looks += 1
            return look(*given)

        def slept(*given: Any) -> None:
            nonlocal sleeps
            sleeps += 1
            if sleeps == 5:
                store.set("slept", "")
            sleep(*given)

        Board.all_arrived, _futex.sleep_while = looked, slept  # type: ignore[method-assign]
        try:
            wire.all_reduce(tensor, mesh.everyone).wait(lambda work: work.wait(LIMIT))
        finally:
            Board.all_arrived, _futex.sleep_while = look, sleep  # type: ignore[method-assign]
    else:
        store.wait(["slept"], LIMIT)
        wire.all_reduce(tensor, mesh.everyone).wait(lambda work: work.wait(LIMIT))
    spins = wire._near[id(mesh.everyone)]._board.spins
    _neighbours.allowed = ALLOWED
    mesh.close()
    return spins, looks, sleeps


def _crossed() -> list[float]:
    """Two sums, which ranks wait for in contrary orders, where nobody answers the door."""
    knock, boards.Door.knock = boards.Door.knock, lambda door: None  # type: ignore[method-assign]
    try:
        wire, mesh = _wires()
        tensors = [torch.full((10,), float(i + mesh.rank)) for i in range(2)]
        works = [wire.all_reduce(tensor, mesh.everyone) for tensor in tensors]
        for work in works if mesh.rank else reversed(works):
            work.wait(lambda work: work.wait(LIMIT))
    finally:
        boards.Door.knock = knock  # type: ignore[method-assign]
    mesh.close()
    return [float(tensor[0]) for tensor in tensors]


@needs_near
def test_who_waits_goes_on_with_what_else_it_has_begun(ranks: Ranks) -> None:
    assert ranks.run(_crossed, world_size=2) == [[1.0, 3.0]] * 2


def _unasked(cores: list[list[int]]) -> float:
    """Rank 0 waits, and asks nobody, for what rank 1 has begun and does not wait for."""
    _neighbours.allowed = lambda: cores[dist.get_rank()]
    look, boards.Mark.look = boards.Mark.look, lambda mark: None  # type: ignore[method-assign]
    try:
        wire, mesh = _wires()
        tensor = torch.full((10,), 1.0 + mesh.rank)
        pending = wire.all_reduce(tensor, mesh.everyone)
        if mesh.rank == 0:
            pending.wait(lambda work: work.wait(LIMIT))
        dist.barrier()
        pending.wait(lambda work: work.wait(LIMIT))
    finally:
        boards.Mark.look = look  # type: ignore[method-assign]
        _neighbours.allowed = ALLOWED
    mesh.close()
    return float(tensor[0])


@needs_near
def test_a_rank_with_cores_to_spare_goes_on_by_itself(ranks: Ranks) -> None:
    assert ranks.run(_unasked, [[0, 1], [2, 3]], world_size=2) == [3.0, 3.0]


@needs_near
@pytest.mark.parametrize(("cores", "spins"), [([[0], [1]], True), ([[0], [0]], False), ([[0, 1], [0, 1]], True)])
def test_who_waits_sleeps_and_looks_first_only_with_a_core_to_itself(
    ranks: Ranks, cores: list[list[int]], spins: bool
) -> None:
    found, looks, sleeps = ranks.run(_looks, cores, world_size=2)[0]
    assert found == spins
    assert sleeps >= 5
    if not spins:
        assert looks <= 6 * sleeps  # before and after each, by who waits and by what else it has begun


def _said(kind: str) -> list[list[float]]:
    """Messages reduced as words and by the group."""
    wire, mesh = _wires()
    words, group, rank = wire.words(mesh.everyone), mesh.everyone, mesh.rank
    assert words is not None
    found: list[list[float]] = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM):
        for dtype in (torch.uint8, torch.float64):
            values = torch.tensor([rank, 3 - rank, 2], dtype=dtype)
            assert words.takes(values, op)
            if kind == "words":
                words.reduce(values, op).wait(LIMIT)
            else:
                dist.all_reduce(values, op, group=group)
            found.append(values.tolist())
    assert not words.takes(torch.zeros(_words.ROOM + 1, dtype=torch.uint8), dist.ReduceOp.MAX)
    assert not words.takes(torch.zeros(1), dist.ReduceOp.PRODUCT)
    many = [(i, torch.tensor([float(i * (rank + 1))])) for i in range(3 * _words.SLOTS)]
    works = [(i, value, words.reduce(value, dist.ReduceOp.SUM)) for i, value in many]
    for i, value, work in works:
        work.wait(LIMIT)
        found += [[value.item() / i]] if i else []
    mesh.close()
    return found


@needs_near
def test_words_say_what_the_group_would(ranks: Ranks) -> None:
    """Of each dtype and operation, and more of them at once than there are slots."""
    said = ranks.run(_said, "words", world_size=3)
    assert said == ranks.run(_said, "group", world_size=3)
    assert said[0][6:] == [[6.0]] * (3 * _words.SLOTS - 1)  # 1 + 2 + 3 times each
