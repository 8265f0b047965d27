"""The simulated allocator keeps its blocks in order whatever is asked for, and follows PyTorch's printed rules."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gpu.allocator import CachingAllocator, rounded
from tests.support.gpu.recorded import LOOPS
from tests.support.gpu.requests import compared
from tests.support.gpu.section import Outcome

MIB = 1 << 20
REQUESTS = st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.booleans())
def test_blocks_tile_their_segments(requests: list[tuple[bool, int]], expandable: bool) -> None:
    """Blocks follow each other without a gap, no two free ones touch, bytes add up; freed, all is one block again."""
    allocator, used = CachingAllocator(expandable=expandable), []
    for frees, size in requests:
        if frees and used:
            allocator.free(used.pop(size % len(used)))
        else:
            used.append(allocator.allocate(size))
        segments = list(allocator.segments())
        for blocks in segments:
            assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(blocks))
            assert not any(a[2] and b[2] for a, b in itertools.pairwise(blocks))
        assert sum(size for blocks in segments for _, size, free in blocks if not free) == allocator.allocated
        assert sum(size for blocks in segments for _, size, _ in blocks) == allocator.reserved <= allocator.peak
    for number in used:
        allocator.free(number)
    assert allocator.allocated == 0 and all(len(blocks) == 1 for blocks in allocator.segments())


def test_sizes_are_those_of_the_rules() -> None:
    """512 bytes; 2, 20 MiB and own segments; a large block is not split for 1 MiB."""
    assert (rounded(1), rounded(512), rounded(513)) == (512, 512, 1024)
    for size, taken in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)):
        allocator = CachingAllocator()
        allocator.allocate(size)
        assert allocator.reserved == taken * MIB, size
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(11 * MIB)
    assert allocator.allocated == 12 * MIB


def test_expandable_segments_leave_no_hole_that_grows() -> None:
    """Tensors that grow by turns need a new segment each time, or one that grows."""
    fixed, growing = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (fixed, growing):
        for size in range(20, 100, 10):
            allocator.free(allocator.allocate(size * MIB))
    assert growing.peak == 100 * MIB and fixed.peak > 4 * growing.peak


RECORDED = Path(__file__).parents[1] / "data" / "allocator" / "torch-2.11-h200.json.gz"


@pytest.mark.parametrize("name", list(LOOPS))
def test_a_gpus_allocator_took_what_is_simulated(name: str) -> None:
    """Training loops on an H200 with PyTorch 2.11, recorded by tests/support/gpu/recorded.py: behind every request and
    every end of one, as many bytes are taken from the device."""
    trace = json.loads(gzip.decompress(RECORDED.read_bytes()))[name]
    compared(trace, expandable=LOOPS[name][2])


def test_one_request_that_differs_is_seen() -> None:
    """The sentence names the event, what was reserved and what is simulated."""
    trace = [(MIB, 2 * MIB), (2 * MIB, 22 * MIB), (-1, 20 * MIB)]
    with pytest.raises(Outcome, match=r"event 2 of 3, request 1 freed: 20,971,520 bytes are reserved and 23,068,672"):
        compared(trace, expandable=False)
