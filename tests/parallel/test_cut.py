"""Which tokens ranks have, and which tiles of attention follow: against masks made token by token."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.parallel.cut import CONTIGUOUS, ZIGZAG, CutBatch


def tokens_of(cut: CutBatch, rank: int) -> list[int]:
    """Where a rank's tokens are in the whole sequence, in the order in which it has them."""
    return [at for start, stop in cut.ranges[rank] for at in range(start, stop)]


def mask_of(cut: CutBatch, causal: bool, window: int | None = None) -> Tensor:
    """``(rows, tokens, tokens)``: which key (last) a query sees, of whole sequences."""
    at = torch.arange(cut.length)
    masks = []
    for row in range(cut.rows):
        edges = torch.tensor(cut.documents[row % len(cut.documents)])
        document = torch.bucketize(at, edges, right=True)
        mask = document[:, None] == document[None, :]
        near = at[:, None] - at[None, :] < (window or cut.length)
        masks.append(mask & near & (at[:, None] >= at[None, :]) if causal else mask)
    return torch.stack(masks)


def permuted(length: int, ranks: int, documents: list[tuple[int, ...]] | None, rows: int, seed: int) -> CutBatch:
    """Ranges of many lengths, given to ranks at random; each rank has one at least."""
    draw = random.Random(seed)
    edges = [0, *sorted(draw.sample(range(1, length), 3 * ranks - 1)), length]
    ranges = list(pairwise(edges))
    draw.shuffle(ranges)
    given = tuple(tuple(sorted(ranges[rank::ranks])) for rank in range(ranks))
    plain = CutBatch.of(length, ranks, CONTIGUOUS, documents, rows)
    return CutBatch(length, given, plain.documents, rows)


def cuts(ranks: int) -> list[CutBatch]:
    """Of every kind, of lengths that do not divide."""
    packed = [(0, 5, 6, 29), (0, 1, 17, 18, 29), (0, 29)]
    return [
        *(CutBatch.of(29, ranks, order, None, 2) for order in (CONTIGUOUS, ZIGZAG)),
        *(CutBatch.of(29, ranks, order, packed[:1], 2) for order in (CONTIGUOUS, ZIGZAG)),
        *(CutBatch.of(29, ranks, order, packed, 3) for order in (CONTIGUOUS, ZIGZAG)),
        *(permuted(29, ranks, packed, 3, seed) for seed in range(4)),
        permuted(29, ranks, None, 2, 9),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), *((True, n) for n in (1, 2, 7, 28, 40))])
def test_tiles_cover_what_is_seen_once(ranks: int, causal: bool, window: int | None) -> None:
    """The tiles of all pairs of ranks have every query and key that see each other once, and no others; causal ones are
    square. Ranks whose keys nobody sees are left out of the steps of a window."""
    for cut in cuts(ranks):
        assert sorted(at for rank in range(ranks) for at in tokens_of(cut, rank)) == list(range(cut.length))
        seen = torch.zeros(cut.rows, cut.length, cut.length, dtype=torch.long)
        for queries in range(ranks):
            for keys in range(ranks):
                assert (queries - keys) % ranks in cut.steps(window) or not cut.tiles(queries, keys, causal, window)
                for tile in cut.tiles(queries, keys, causal, window):
                    rows = slice(*tile.rows)
                    mine = tokens_of(cut, queries)[slice(*tile.queries)]
                    theirs = tokens_of(cut, keys)[slice(*tile.keys)]
                    block = torch.ones(len(mine), len(theirs), dtype=torch.long)
                    if tile.causal:
                        assert len(mine) == len(theirs) and (mine == theirs or tile.reverse)
                        block = block.triu() if tile.reverse else block.tril()
                    for row in range(cut.rows)[rows]:
                        seen[row][torch.tensor(mine)[:, None], torch.tensor(theirs)[None, :]] += block
        assert torch.equal(seen, mask_of(cut, causal, window).long())


def test_zigzag_gives_ranks_the_same_work() -> None:
    """Under a causal mask every rank has as many scores to compute in every hop, in one tile each, but for the first;
    in one range each, the last rank has all of them."""

    def work(order: str, rank: int, source: int) -> list[int]:
        tiles = CutBatch.of(64, 4, order).tiles(rank, source, causal=True)
        return [(t.queries[1] - t.queries[0]) * (t.keys[1] - t.keys[0]) for t in tiles]

    pairs = [(rank, (rank - step) % 4) for rank in range(4) for step in (1, 2, 3)]
    assert {tuple(work(ZIGZAG, *pair)) for pair in pairs} == {(128,)}
    assert [sum(sum(work(CONTIGUOUS, r, s)) for s in range(4) if s != r) for r in range(4)] == [0, 256, 512, 768]


def test_a_window_leaves_out_what_is_far() -> None:
    """Of ranks with one range each a rank needs those just before it; in zigzag order those on both sides."""
    assert CutBatch.of(64, 8).steps(9) == [0, 1] and CutBatch.of(64, 8).steps(10) == [0, 1, 2]
    assert CutBatch.of(64, 8, ZIGZAG).steps(5) == [0, 1, 7] and CutBatch.of(64, 8).steps(None) == list(range(8))
    assert CutBatch.of(64, 8, CONTIGUOUS, [[0, 8, 16, 24, 32, 40, 48, 56, 64]]).steps(9) == [0]


def test_fewer_tokens_than_ranks_are_refused() -> None:
    """Each rank needs a token."""
    with pytest.raises(ConfigError, match="3 tokens is not cut over 4 ranks"):
        CutBatch.of(3, 4, ZIGZAG)
    assert CutBatch.of(4, 4, ZIGZAG).sizes == [1, 1, 1, 1]
