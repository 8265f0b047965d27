"""Index arithmetic: every element has one place and one owner, and padding is what it is said to be."""

from __future__ import annotations

from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.plan.placement import SegmentSpec, Slot, SlotRange, UnitSpec, pack, shard_index, shard_range

AXES = ("inter", "intra", "third")
SPLITS = [over for n in range(len(AXES) + 1) for over in permutations(AXES, n)]

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6).map(
    lambda found: {f"p{i}": shape for i, shape in enumerate(found)}
)
meshes = st.tuples(*[st.integers(1, 4)] * len(AXES)).map(lambda sizes: dict(zip(AXES, sizes, strict=True)))
aligns = st.sampled_from([1, 2, 3, 8, 64])


def ranks_of(mesh: dict[str, int]) -> list[dict[str, int]]:
    places = product(*(range(size) for size in mesh.values()))
    return [dict(zip(mesh, place, strict=True)) for place in places]


def num_ranks(mesh: dict[str, int]) -> int:
    return len(ranks_of(mesh))


@given(shapes, st.integers(1, 12), aligns)
def test_slots_keep_their_order_and_are_aligned_and_disjoint(
    shapes: dict[str, tuple[int, ...]], parts: int, align: int
):
    slots, length = pack(shapes, parts, align)
    assert [(slot.name, slot.shape) for slot in slots] == list(shapes.items())
    end = 0
    for slot in slots:
        assert slot.offset % align == 0
        assert end <= slot.offset < end + align
        end = slot.offset + slot.numel
    assert end <= length


@given(shapes, st.integers(1, 12), aligns)
def test_padding_is_below_align_per_parameter_and_at_most_one_aligned_row_of_shards_at_the_end(
    shapes: dict[str, tuple[int, ...]], parts: int, align: int
):
    slots, length = pack(shapes, parts, align)
    spec = SegmentSpec(slots, length, "fp32")
    assert length > 0 and length % (parts * align) == 0
    assert 0 <= spec.padding <= (align - 1) * len(slots) + parts * align
    assert spec.padding < (align - 1) * len(slots) + parts * align or not spec.numel
    assert spec.numel == sum(slot.numel for slot in slots)


@given(shapes, meshes, aligns, st.sampled_from(SPLITS))
def test_shards_are_equal_aligned_ranges_that_tile_the_flat_in_order_of_their_index(
    shapes: dict[str, tuple[int, ...]], mesh: dict[str, int], align: int, over: tuple[str, ...]
):
    _, length = pack(shapes, num_ranks(mesh), align)
    ranges = {}
    for coords in ranks_of(mesh):
        ranges.setdefault(shard_index(over, mesh, coords), set()).add(shard_range(length, over, mesh, coords))
    assert all(len(same) == 1 for same in ranges.values())  # ranks that differ on other axes hold the same shard
    tiles = [ranges[index].pop() for index in range(len(ranges))]
    assert tiles[0][0] == 0 and tiles[-1][1] == length
    assert all(left[1] == right[0] for left, right in pairwise(tiles))
    assert {stop - start for start, stop in tiles} == {length // len(tiles)}
    assert all(start % align == 0 for start, _ in tiles)


@given(shapes, meshes, aligns, st.sampled_from(SPLITS))
def test_every_element_of_every_parameter_belongs_to_exactly_one_shard(
    shapes: dict[str, tuple[int, ...]], mesh: dict[str, int], align: int, over: tuple[str, ...]
):
    slots, length = pack(shapes, num_ranks(mesh), align)
    spec = SegmentSpec(slots, length, "fp32")
    # One rank for each shard: the others, at other places on the remaining axes, repeat it.
    owners = [coords for coords in ranks_of(mesh) if not any(coords[axis] for axis in mesh if axis not in over)]
    owned = [
        (piece.slot, element)
        for coords in owners
        for piece in spec.pieces(*shard_range(length, over, mesh, coords))
        for element in range(piece.start, piece.stop)
    ]
    assert len(owned) == len(set(owned))
    assert set(owned) == {(i, slot.offset + n) for i, slot in enumerate(slots) for n in range(slot.numel)}


@given(shapes, aligns, st.integers(0, 400), st.integers(0, 400))
def test_pieces_cover_exactly_the_parameters_inside_a_range_in_order(
    shapes: dict[str, tuple[int, ...]], align: int, one: int, other: int
):
    slots, length = pack(shapes, 1, align)
    start, stop = sorted((min(one, length), min(other, length)))
    pieces = list(SegmentSpec(slots, length, "fp32").pieces(start, stop))
    assert pieces == sorted(pieces)
    assert all(start <= piece.start < piece.stop <= stop for piece in pieces)
    covered = [(piece.slot, n) for piece in pieces for n in range(piece.start, piece.stop)]
    inside = [(i, s.offset + n) for i, s in enumerate(slots) for n in range(s.numel) if start <= s.offset + n < stop]
    assert covered == inside


@given(meshes)
def test_a_finer_shard_lies_inside_the_shard_over_its_first_axes(mesh: dict[str, int]):
    length = 5 * num_ranks(mesh)
    for coords in ranks_of(mesh):
        outer = (0, length)
        for n in range(1, len(AXES) + 1):
            inner = shard_range(length, AXES[:n], mesh, coords)
            assert outer[0] <= inner[0] and inner[1] <= outer[1]
            outer = inner


def test_a_scalar_takes_one_element_and_an_empty_parameter_none():
    slots, length = pack({"scalar": (), "empty": (0, 3), "row": (5,)}, parts=2, align=4)
    assert slots == (Slot("scalar", (), 0), Slot("empty", (0, 3), 4), Slot("row", (5,), 4))
    assert [slot.numel for slot in slots] == [1, 0, 5]
    assert length == 16
    spec = SegmentSpec(slots, length, "fp32")
    assert list(spec.pieces(0, 8)) == [SlotRange(0, 0, 1), SlotRange(2, 4, 8)]
    assert list(spec.pieces(8, 16)) == [SlotRange(2, 8, 9)]
    assert (spec.numel, spec.padding) == (6, 10)


@pytest.mark.parametrize("shapes", [{}, {"empty": (0,)}])
def test_a_segment_of_nothing_still_gives_every_rank_an_aligned_shard(shapes: dict[str, tuple[int, ...]]):
    _, length = pack(shapes, parts=3, align=8)
    assert length == 24


def test_shards_are_numbered_row_major_over_the_axes_in_their_order():
    mesh = {"inter": 2, "intra": 3}
    coords = {"inter": 1, "intra": 2}
    assert shard_index(("inter", "intra"), mesh, coords) == 5
    assert shard_index(("intra", "inter"), mesh, coords) == 5
    assert shard_index(("intra", "inter"), mesh, {"inter": 1, "intra": 1}) == 3
    assert shard_index(("intra",), mesh, coords) == 2
    assert shard_range(12, (), mesh, coords) == (0, 12)


def test_a_unit_is_trainable_if_any_of_its_segments_is():
    frozen, live = SegmentSpec((), 8, "fp32", trainable=False), SegmentSpec((), 8, "fp32")
    assert not UnitSpec("u", (frozen,)).trainable
    assert UnitSpec("u", (frozen, live)).trainable
