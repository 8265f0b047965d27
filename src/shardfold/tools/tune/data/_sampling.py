"""In which order samples are read, and which share a row of tokens: the same for any number of ranks.

An epoch is a sequence of groups of blocks; within a group all samples are shuffled, and packed. All blocks are in one
group where there are few; else groups grow from a few blocks on, so that a first step needs no more than these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardfold.data import shuffled
from shardfold.tools.tune.data.packing import best_fit
from shardfold.tools.tune.data.prepared import Prepared

__all__ = ["Reached", "Sample", "SampleOrder"]

FEW, FIRST, MOST = 16, 4, 64  # blocks: in one group if there are no more; of the first group; of any


@dataclass(frozen=True)
class Sample:
    """What is read as one: a row, or a piece of a document.

    Attributes:
        row: its number.
        start, stop: its tokens.
        length: how many tokens; of both sequences, where the row has two.
    """

    row: int
    start: int
    stop: int
    length: int


@dataclass(frozen=True)
class Reached:
    """How far all ranks are.

    Attributes:
        epoch: from 0.
        group: of the epoch.
        done: of the group's bins, how many were read.
    """

    epoch: int = 0
    group: int = 0
    done: int = 0


class SampleOrder:
    """The bins of each epoch: lists of items that share a row of tokens, or, without packing, of one item.

    Args:
        prepared: the rows.
        length: the most tokens of a bin; documents are cut into pieces of it.
        pack: whether a bin has several items.
        seed: of the order.
        shuffle: False: rows come in their order.
    """

    def __init__(self, prepared: Prepared, *, length: int, pack: bool, seed: int, shuffle: bool = True) -> None:
        self.prepared = prepared
        self.length = length
        self.pack = pack
        self.seed = seed
        self.shuffle = shuffle
        self._last: tuple[tuple[int, int], list[list[Sample]]] | None = None

    def groups(self, epoch: int) -> list[list[int]]:
        """Numbers of blocks, group by group."""
        number = self.prepared.blocks
        order = self._shuffled(number, epoch, "blocks").tolist()
        if number <= FEW:
            return [order]
        groups, at, size = [], 0, FIRST
        while at < number:
            groups.append(order[at : at + size])
            at, size = at + size, min(2 * size, MOST)
        return groups

    def bins(self, epoch: int, group: int) -> list[list[Sample]]:
        """Those of a group, in the order in which they are read. It waits for the group's blocks."""
        if self._last is not None and self._last[0] == (epoch, group):
            return self._last[1]
        items = [item for block in self.groups(epoch)[group] for item in self._items(block, epoch)]
        if self.shuffle:
            items = [items[k] for k in self._shuffled(len(items), epoch, f"items/{group}").tolist()]
        bins = [[item] for item in items]
        if self.pack:
            packed = best_fit([item.length for item in items], self.length)
            if self.shuffle:  # best_fit begins with the longest
                packed = [packed[k] for k in self._shuffled(len(packed), epoch, f"bins/{group}").tolist()]
            bins = [[items[k] for k in each] for each in packed]
        self._last = (epoch, group), bins
        return bins

    def _shuffled(self, number: int, epoch: int, what: str) -> npt.NDArray[np.int64]:
        positions = np.arange(number)
        if not self.shuffle or number == 0:
            return positions
        salt = int.from_bytes(what.encode(), "little") % (2**61 - 1)
        return shuffled(positions, number, self.seed ^ salt, epoch)

    def _items(self, block: int, epoch: int) -> Iterator[Sample]:
        lengths, first = self.prepared.lengths(block), self.prepared.first(block)
        for row in self._rows(block, epoch, np.flatnonzero(lengths)):
            length = int(lengths[row])
            if self.prepared.kind != "text":
                yield Sample(first + row, 0, length, length)
                continue
            # Pieces overlap by one token: each is predicted once, also the first one of a piece.
            for start in range(0, max(length - 1, 1), self.length - 1):
                stop = min(start + self.length, length)
                yield Sample(first + row, start, stop, stop - start)

    def _rows(self, block: int, epoch: int, rows: npt.NDArray[np.int64]) -> Iterator[int]:
        """Which rows of a block an epoch reads: by a weight of 0.3 three of ten, in the next epoch others."""
        weight = self.prepared.weight(block)
        if weight == 1.0 or not len(rows):
            yield from rows.tolist()
            return
        start, stop = (math.floor(each * weight * len(rows) + 0.5) for each in (epoch, epoch + 1))
        for cycle in range(start // len(rows), -(-stop // len(rows))):
            low, high = max(start - cycle * len(rows), 0), min(stop - cycle * len(rows), len(rows))
            yield from rows[shuffled(np.arange(low, high), len(rows), self.seed ^ (block + 1) << 20, cycle)].tolist()

    def settled(self, place: Reached) -> Reached:
        """The place itself, or where the next group begins, if all of this one was read."""
        while place.done >= len(self.bins(place.epoch, place.group)):
            last = place.group + 1 >= len(self.groups(place.epoch))
            place = Reached(place.epoch + 1, 0, 0) if last else Reached(place.epoch, place.group + 1, 0)
            if last:
                break
        return place

    def take(self, place: Reached, number: int) -> tuple[list[list[Sample]], Reached]:
        """The next bins, at most ``number`` and none of the next epoch, and the place behind them."""
        taken: list[list[Sample]] = []
        epoch = place.epoch
        while len(taken) < number and place.epoch == epoch:
            bins = self.bins(place.epoch, place.group)[place.done : place.done + number - len(taken)]
            taken += bins
            place = self.settled(Reached(place.epoch, place.group, place.done + len(bins)))
        return taken, place
