"""How many bytes small blocks are put together to, by the links that were measured."""

from __future__ import annotations

import pytest

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.plan.auto_wire import LinkFigure, bucket_for

MIB = 2**20
PAIR, ALL = ("intra",), ("inter", "intra")
RANKS = {PAIR: 2, ALL: 8, ("alone",): 1}


@pytest.mark.parametrize(
    ("rate", "latency", "axes", "mib"),
    [
        (1.25e8, 1e-3, PAIR, 3),  # 1 Gbit/s, 1 ms: 1.125 MB sent, of a flat twice as large
        (1.25e9, 1e-3, PAIR, 22),
        (1.25e8, 1e-3, ALL, 2),  # of eight ranks each sends seven eighths
        (1.25e8, 1e-2, PAIR, 22),
        (1.25e9, 1e-2, PAIR, 25),  # no more than DDP's
        (1e9, 1e-6, PAIR, 1),
        (1e12, 1.0, ("alone",), 1),  # nothing is sent there
    ],
)
def test_a_tenth_of_a_collective_is_latency(rate: float, latency: float, axes: tuple[str, ...], mib: int) -> None:
    assert bucket_for({("REDUCE_SCATTER", axes): LinkFigure(rate, latency)}, RANKS) == mib * MIB
    if 1 < mib < 25:
        sent = mib * MIB * (RANKS[axes] - 1) / RANKS[axes]
        assert 0.05 < latency / (latency + sent / rate) <= 0.1


def test_the_link_that_needs_most_says_it() -> None:
    links = {("ALL_GATHER:bf16", PAIR): LinkFigure(1e9, 1e-6), ("REDUCE_SCATTER", ALL): LinkFigure(1.25e8, 1e-3)}
    assert bucket_for(links, RANKS) == 2 * MIB
    assert bucket_for({}, RANKS) == MIB


def test_where_nothing_is_known_a_bucket_is_that_of_ddp() -> None:
    assert sf.Overlap(bucket="auto").bucket_bytes == 25 * MIB
    with pytest.raises(ConfigError, match=r"such as '8MiB', 'auto', or None"):
        sf.Overlap(bucket="automatic")
    with pytest.raises(ConfigError, match=r"Overlap.speculate"):
        sf.Overlap(speculate="auto")
