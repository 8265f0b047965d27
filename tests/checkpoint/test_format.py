"""The values of a checkpoint: index arithmetic against NumPy, and texts that come back as they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfold.checkpoint.files import UnwrittenPiece, write_file
from shardfold.checkpoint.index import Index, Parameter, Piece, overlaps
from shardfold.checkpoint.trees import decode, encode
from shardfold.errors import CheckpointError
from shardfold.plan.placement import Box

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Piece]:
    """A shape, and a piece that holds a range of a box of it, or of the whole."""
    shape = draw(SHAPES)
    box = None
    if draw(st.booleans()):
        starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(1, size - start)) for start, size in zip(starts, shape, strict=True))
        box = Box(starts, sizes)
    inside = box.numel if box is not None else math.prod(shape)
    low, high = sorted((draw(st.integers(0, inside)), draw(st.integers(0, inside))))
    return shape, Piece("w", "weight", "element", "F32", (high - low,), low, high, box)


@given(boxes(), st.data())
def test_overlaps_are_those_of_the_elements(given: tuple[tuple[int, ...], Piece], data: st.DataObject) -> None:
    """Runs of a piece are exactly its elements in the range asked for, each once, in rising order, as NumPy cuts."""
    shape, piece = given
    numel = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    whole = np.arange(numel).reshape(shape)
    cut = whole
    if piece.box is not None:
        cut = whole[piece.box.slices]
    held = cut.reshape(-1)[piece.start : piece.stop]  # the number in the whole of each value of the piece
    runs = list(overlaps(piece, shape, start, stop))
    found = [(run.one + i, run.other + i) for run in runs for i in range(run.numel)]
    assert found == sorted((int(n), at) for at, n in enumerate(held) if start <= n < stop)
    assert all(run.numel > 0 for run in runs)


NAMES = st.text(min_size=1, max_size=8)
FILES = ("a.safetensors", "b")


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    numel, start, at = draw(st.integers(0, 6)), draw(st.integers(0, 9)), draw(st.integers(0, 2**40))
    block = draw(st.sampled_from([1, 1, 4]))
    dtype, box = draw(st.sampled_from(["F32", "BF16"])), draw(st.none() | st.just(Box((0, 1), (20, 30))))
    named = {"of": f"{draw(NAMES)} of no parameter", "state": draw(NAMES), "file": draw(st.sampled_from(FILES))}
    return Piece(
        **named,
        kind="block" if block > 1 else "element",
        dtype=dtype,
        shape=(numel,),
        start=start,
        stop=start + numel * block,
        box=box,
        block=block,
        at=at,
        sums=draw(st.lists(NAMES, max_size=2).map(tuple)),
        rank=draw(st.none() | st.integers(0, 3)),
    )


@st.composite
def parameters(draw: st.DrawFn, most: int) -> list[Parameter]:
    """With names of their own."""
    names = draw(st.lists(NAMES, unique=True, max_size=2 * most))
    return [
        Parameter(name, draw(SHAPES), "F32", tuple(also), draw(st.booleans()))
        for name, *also in (names[i : i + 2] for i in range(0, len(names), 2))
    ]


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.builds(
        Index, step=st.integers(0, 2**40), written=st.dictionaries(NAMES, NAMES),
        files=st.just(dict.fromkeys(FILES, 2**41)), parameters=parameters(3), buffers=parameters(2),
        pieces=st.lists(pieces(), max_size=4), once=st.dictionaries(NAMES, st.dictionaries(NAMES, JSONS), max_size=2),
        run=st.dictionaries(NAMES, JSONS, max_size=3), ranks=st.lists(st.dictionaries(NAMES, JSONS), max_size=2),
        nonfinite=st.lists(NAMES, max_size=2),
    )
)  # fmt: skip
def test_an_index_comes_back_as_it_was(index: Index) -> None:
    """Through its text, which is the same for the same index."""
    data = index.to_bytes()
    assert Index.from_bytes(data, "here") == index
    assert Index.from_bytes(data, "here").to_bytes() == data


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((b'"version": 1', b'"version": 2'), "read it with the release that wrote it, or a later one"),
        ((b'"version": 1', b'"version": 0'), "version 0"),
        ((b"shardfold checkpoint", b"another checkpoint"), "'another checkpoint'"),
        ((b'"step": 7', b'"step": 8'), "checksum differs"),
        ((b'"checksum"', b'"chocksum"'), "is not an index of a checkpoint, or is damaged"),
        ((b"{\n", b"[\n"), "is not an index of a checkpoint, or is damaged"),
    ],
)
def test_an_index_that_was_changed_is_refused(change: tuple[bytes, bytes], says: str) -> None:
    data = Index(step=7).to_bytes()
    with pytest.raises(CheckpointError, match=says) as error:
        Index.from_bytes(data.replace(*change, 1), "runs/index.json")
    assert str(error.value).startswith("runs/index.json ")


ARRAYS = st.tuples(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]), st.lists(st.integers(0, 4), max_size=3)
).map(lambda made: (np.arange(math.prod(made[1])) % 2).astype(made[0]).reshape(made[1]))
TENSORS = ARRAYS.map(torch.tensor) | ARRAYS.map(lambda array: torch.tensor(array).to(torch.bfloat16))
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | TENSORS | ARRAYS
)  # fmt: skip
KEYS = st.text(max_size=5) | st.integers() | st.just("$tensor") | st.tuples(st.integers(), st.text(max_size=2))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(other) is type(one) and one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
    if isinstance(one, np.ndarray):
        return (
            type(other) is np.ndarray
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and np.array_equal(one, other)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and (one == other or (one != one and other != other))


@given(TREES)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    """Types, order of keys, dtypes and shapes too; through the text of an index."""
    tensors: dict[str, torch.Tensor] = {}
    said = encode(tree, "state", tensors)
    index = Index.from_bytes(Index(run={"state": said}).to_bytes(), "here")
    assert same(tree, decode(index.run["state"], tensors.__getitem__))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "state is a object"),
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a set"),
        ({(1,): len}, r"state\[\(1,\)\]"),
    ],
)
def test_what_is_no_tree_is_named(value: Any, where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        encode(value, "state", {})


def test_an_array_that_can_not_be_written_to_is_taken() -> None:
    """A view that is read-only, or not in C order, is kept as what it shows."""
    array = np.arange(60).reshape(5, 12)[:, ::2].T
    array.flags.writeable = False
    tensors: dict[str, torch.Tensor] = {}
    assert same(array, decode(encode(array, "state", tensors), tensors.__getitem__))


def test_two_boxes_of_a_parameter_lie_in_one_file(tmp_path: Path) -> None:
    """Their names tell them apart; two pieces of one name are refused before anything is written."""
    boxes = [Piece("w", "weight", "element", "F32", (2,), 0, 2, Box((at, 0), (1, 2))) for at in (0, 1)]
    assert [piece.key for piece in boxes] == ["weight/w/0,0/0", "weight/w/1,0/0"]
    written = write_file(tmp_path / "f.safetensors", [UnwrittenPiece(piece, torch.zeros(2)) for piece in boxes])
    assert len(written.pieces) == 2
    with pytest.raises(CheckpointError, match="two tensors would have the name 'weight/w/0,0/0'"):
        write_file(tmp_path / "g.safetensors", [UnwrittenPiece(boxes[0], torch.zeros(2))] * 2)
    assert not (tmp_path / "g.safetensors").exists()
