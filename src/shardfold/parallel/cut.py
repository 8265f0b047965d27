"""Which tokens of a sequence each rank has, and which parts of them attend to which.

A sequence is cut into *ranges* of consecutive tokens, and each rank has some of them, ascending:

    contiguous   rank r of N has the r-th of N ranges
    zigzag       rank r has the r-th and the r-th from behind of 2N ranges: under a causal mask every rank then has the
                 same work with the keys of every other ("striped", 2311.09431, has the same aim)

Documents that are packed into a row cut the ranges into *spans*. Of two spans, every token of one sees every token of
the other, or none does, or they are the same span: attention is full *tiles* and causal ones, and no mask is needed. So
it is with a sliding window: where it begins, tokens see what a causal tile shows read from behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardfold.errors import ConfigError

__all__ = ["CONTIGUOUS", "ZIGZAG", "CutBatch", "Range", "Tile", "TokenSpan", "cut_ranges"]

Range = tuple[int, int]
"""From, up to."""

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"


class TokenSpan(NamedTuple):
    """Consecutive tokens of one document on one rank.

    Attributes:
        document: its number in the row.
        tokens: where they are in the whole sequence.
        at: where the first is on the rank.
    """

    document: int
    tokens: Range
    at: int

    @property
    def here(self) -> Range:
        """Where they are on the rank."""
        return self.at, self.at + self.tokens[1] - self.tokens[0]


class Tile(NamedTuple):
    """Queries that see keys: all, or each (``causal``) those up to its own place, or (``reverse``) those from there."""

    rows: Range  # of the batch
    queries: Range  # on the rank that has them
    keys: Range
    causal: bool
    reverse: bool = False


def cut_ranges(length: int, ranks: int, order: str) -> tuple[tuple[Range, ...], ...]:
    """The ranges of each rank; sizes differ by one token at most.

    Raises:
        ConfigError: there are fewer tokens than ranks.
    """
    if length < ranks:
        raise ConfigError(f"a sequence of {length} tokens is not cut over {ranks} ranks: each needs one at least.")
    parts = 2 * ranks if order == ZIGZAG and ranks > 1 else ranks
    edges = [length * i // parts for i in range(parts + 1)]
    all_ranges = list(pairwise(edges))
    mine = [[all_ranges[r]] if parts == ranks else [all_ranges[r], all_ranges[-1 - r]] for r in range(ranks)]
    return tuple(tuple((a, b) for a, b in each if a < b) for each in mine)


@dataclass(frozen=True)
class CutBatch:
    """One batch of sequences, cut.

    Attributes:
        length: tokens of a whole sequence.
        ranges: by rank, ascending and in the order in which it has them.
        documents: where documents begin and the last one ends, by row of the batch, or once for all rows.
        rows: of the batch.
    """

    length: int
    ranges: tuple[tuple[Range, ...], ...]
    documents: tuple[tuple[int, ...], ...]
    rows: int

    @classmethod
    def of(
        cls,
        length: int,
        ranks: int,
        order: str = CONTIGUOUS,
        documents: Sequence[Sequence[int]] | None = None,
        rows: int = 1,
    ) -> CutBatch:
        """Rows of ``length`` tokens over ``ranks``; ``documents`` as :attr:`documents`, None: one in each row."""
        given = tuple(tuple(each) for each in documents) if documents is not None else ((0, length),)
        alike = len(set(given)) == 1
        return cls(length, cut_ranges(length, ranks, order), given[:1] if alike else given, rows)

    def tokens(self, rank: int) -> int:
        """How many a rank has of each row."""
        return sum(b - a for a, b in self.ranges[rank])

    @property
    def sizes(self) -> list[int]:
        """Tokens by rank."""
        return [self.tokens(rank) for rank in range(len(self.ranges))]

    def spans(self, rank: int, row: int) -> list[TokenSpan]:
        """What a rank has of a row."""
        edges, found, at = self.documents[row], list[TokenSpan](), 0
        for start, stop in self.ranges[rank]:
            for number, (a, b) in enumerate(pairwise(edges)):
                first, last = max(start, a), min(stop, b)
                if first < last:
                    found.append(TokenSpan(number, (first, last), at + first - start))
            at += stop - start
        return found

    def tiles(self, queries: int, keys: int, causal: bool, window: int | None = None) -> tuple[Tile, ...]:
        """What the queries of one rank see of the keys of one; with a ``window`` the last so many, causally."""
        return _tiles(self, queries, keys, causal, window)

    def steps(self, window: int | None) -> list[int]:
        """How far behind those ranks are whose keys any rank sees, itself first."""
        return list(range(len(self.ranges))) if window is None else _steps(self, window)

    @property
    def packed(self) -> bool:
        """Whether a row has several documents."""
        return any(len(edges) > 2 for edges in self.documents)

    @property
    def joined(self) -> CutBatch:
        """The same sequences on one rank, in their order."""
        return CutBatch(self.length, (((0, self.length),),), self.documents, self.rows)


@lru_cache(64)
def _steps(cut: CutBatch, window: int) -> list[int]:
    ranks = range(len(cut.ranges))
    return [step for step in ranks if any(cut.tiles(r, (r - step) % len(ranks), True, window) for r in ranks)]


@lru_cache(256)
def _tiles(cut: CutBatch, queries: int, keys: int, causal: bool, window: int | None) -> tuple[Tile, ...]:
    found: list[Tile] = []
    for first, last, row in _alike(cut):
        mine, theirs = _by_document(cut.spans(queries, row)), _by_document(cut.spans(keys, row))
        for number, spans in mine.items():
            seen = theirs.get(number, [])
            if window is not None:
                found += [Tile((first, last), *each) for a in spans for b in seen for each in _banded(a, b, window)]
            elif causal and spans == seen and _adjacent(spans):
                found.append(
                    Tile((first, last), (spans[0].at, spans[-1].here[1]), (spans[0].at, spans[-1].here[1]), True)
                )
            else:
                found += [Tile((first, last), *each) for each in _pairs(spans, seen, causal)]
    return tuple(found)


def _alike(cut: CutBatch) -> Iterable[tuple[int, int, int]]:
    """Consecutive rows of the same documents: from, up to, and one of them by its number in ``documents``."""
    if len(cut.documents) == 1:
        yield 0, cut.rows, 0
        return
    first = 0
    for row in range(1, cut.rows + 1):
        if row == cut.rows or cut.documents[row] != cut.documents[first]:
            yield first, row, first
            first = row


def _by_document(spans: Sequence[TokenSpan]) -> dict[int, list[TokenSpan]]:
    found: dict[int, list[TokenSpan]] = {}
    for span in spans:
        found.setdefault(span.document, []).append(span)
    return found


def _adjacent(spans: Sequence[TokenSpan]) -> bool:
    """Whether they are one range on their rank, in the order of their tokens."""
    pairs = pairwise(spans)
    return all(a.here[1] == b.at and a.tokens[1] <= b.tokens[0] for a, b in pairs)


def _pairs(spans: Sequence[TokenSpan], seen: Sequence[TokenSpan], causal: bool) -> list[tuple[Range, Range, bool]]:
    """Queries, keys and whether causal, of spans of one document; ranges that lie one behind the other are one."""
    found: list[tuple[Range, Range, bool]] = []
    same = [(span.here, span.here, True) for span in spans if causal and span in seen]
    before: list[tuple[Range, list[Range]]] = []
    for span in spans:
        full = _joined(k.here for k in seen if not causal or k.tokens[1] <= span.tokens[0])
        if before and before[-1][1] == full and before[-1][0][1] == span.at:
            before[-1] = ((before[-1][0][0], span.here[1]), full)
        else:
            before.append((span.here, full))
    found += [(queries, each, False) for queries, full in before for each in full]
    return same + found


def _banded(span: TokenSpan, seen: TokenSpan, window: int) -> Iterable[tuple[Range, Range, bool, bool]]:
    """Queries and keys, whether causal and whether in reverse, where a token sees the last ``window`` up to itself.

    Queries are cut where any edge of the two spans lies, and again each ``window`` tokens. Of the keys, a piece [x, y)
    then sees those between y - window and x, its own up to each token, and of [x - window, y - window) those behind
    each token's place.
    """
    (start, stop), (low, high) = span.tokens, seen.tokens
    places = {edge % window for edge in (start, stop, low, high)}
    edges = {stop, *(at for place in places for at in range(start + (place - start) % window, stop, window))}
    for x, y in pairwise(sorted(edges)):
        for a, b, causal, reverse in (
            (x, y, True, False),
            (y - window, x, False, False),
            (x - window + 1, y - window, True, True),
        ):
            a, b, end = (max(a, low), min(b, high), y) if not causal else (a, b, y - reverse)
            if a < b and low <= a and b <= high:
                here = (x - start + span.at, end - start + span.at)
                yield here, (a - low + seen.at, b - low + seen.at), causal, reverse


def _joined(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
