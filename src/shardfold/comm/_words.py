"""Words: a few numbers that each rank of a host writes where all of them read, and reduces by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm._boards import Board, Mark, Neighbour, Pages, look_until

__all__ = ["REDUCED", "Words"]

ROOM = 512
"""Bytes of a message at most."""
SLOTS = 64
"""Twice as many messages as may be under way: what a rank writes over was read by all, because each of them has written
since then, and before that read, half as many later ones."""
LIMIT = timedelta(minutes=5)  # for a message that half as many others have come behind


class Words:
    """The small messages of one group.

    Args:
        members, me, pages, start, progress, spins: see :class:`Board`.
    """

    def __init__(
        self,
        members: Sequence[Neighbour],
        me: int,
        pages: Pages,
        start: int,
        progress: Callable[[], bool],
        *,
        spins: bool,
    ) -> None:
        self._board = Board(members, me, pages, start, SLOTS, kinds=1, room=ROOM, progress=progress, spins=spins)
        self._under_way: deque[_Written] = deque()
        self._numbers = 0

    @staticmethod
    def bytes_of(ranks: int) -> int:
        """Of the pages that it takes."""
        return Board.bytes_of(ranks, SLOTS, 1, ROOM)

    @staticmethod
    def takes(values: Tensor, op: Any) -> bool:
        """Whether it can reduce them: the same on all ranks, which bring as many of one dtype."""
        return values.nbytes <= ROOM and op in REDUCED

    def reduce(self, values: Tensor, op: Any) -> _Written:
        """Begins to reduce a small tensor in place; the work, to be waited for."""
        while len(self._under_way) >= SLOTS // 2:
            self._under_way[0].wait(LIMIT)
        self._numbers += 1
        begin = self._board.rooms(self._numbers)[0] + self._board.me * ROOM
        self._board.pages.bytes[begin : begin + values.nbytes] = values.contiguous().view(torch.uint8).numpy().tobytes()
        self._board.arrive(self._numbers, 0)
        work = _Written(self._board, self._numbers, values, op, self._under_way)
        self._under_way.append(work)
        return work


class _Written:
    """As a ``torch.distributed`` work.

    Args:
        board, number: where the values of all are.
        values: this rank's, where the result goes.
        op: how.
        under_way: leaves it when it is read.
    """

    def __init__(self, board: Board, number: int, values: Tensor, op: Any, under_way: deque[_Written]) -> None:
        self.mark = Mark(board, number, 0, begun=None)
        self._board, self._number, self._values, self._op = board, number, values, op
        self._under_way = under_way

    def is_completed(self) -> bool:
        if self in self._under_way and self.mark.is_completed():
            begin, end = self._board.rooms(self._number)
            rows = torch.frombuffer(bytearray(self._board.pages.bytes[begin:end]), dtype=self._values.dtype)
            self._values.copy_(REDUCED[self._op](rows.view(self._board.size, -1)[:, : self._values.numel()]))
            self._under_way.remove(self)
        return self not in self._under_way

    def wait(self, timeout: timedelta) -> None:
        """Returns when ``values`` is reduced.

        Raises:
            RuntimeError: "timed out"; another process has ended or closed its engine.
        """
        look_until(self, timeout)


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=rows.dtype)


def _greatest(rows: Tensor) -> Tensor:
    return rows.amax(0)


def _least(rows: Tensor) -> Tensor:
    return rows.amin(0)


REDUCED: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: _sum,
    dist.ReduceOp.MAX: _greatest,
    dist.ReduceOp.MIN: _least,
}
