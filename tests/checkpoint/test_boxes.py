"""Parameters of which a rank has a box: what they keep is read into any other boxes, and by whoever has all of them."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardfold as sf
from shardfold.checkpoint.collect import collect, header
from shardfold.checkpoint.draft import Draft
from shardfold.checkpoint.files import UnwrittenPiece, write_file
from shardfold.checkpoint.index import Index, Parameter, Piece
from shardfold.checkpoint.verify import gaps, verify
from shardfold.errors import CheckpointError, ConfigError, UsageError
from shardfold.optim.adamw8bit import dequantize, quantize
from shardfold.plan.placement import Box, Extent, Slot, pack, shared
from shardfold.testing import Ranks

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def _cut(values: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return values[box.slices]


@st.composite
def _box(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Any, empty ones too."""
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    # What is left out is drawn, not what is kept: small numbers are drawn often, and most boxes should meet.
    return Box(
        starts, tuple(size - at - draw(st.integers(0, size - at)) for at, size in zip(starts, shape, strict=True))
    )


@st.composite
def _tiles(draw: st.DrawFn, shape: tuple[int, ...], most: int) -> list[Box]:
    """Up to so many boxes that have every element of a tensor once: one is cut in two, again and again."""
    boxes = [Box.of(shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        wide = [(i, d) for i, box in enumerate(boxes) for d, size in enumerate(box.sizes) if size > 1]
        if not wide:
            break
        i, d = draw(st.sampled_from(wide))
        box = boxes.pop(i)
        at = draw(st.integers(1, box.sizes[d] - 1))
        for low, size in ((0, at), (at, box.sizes[d] - at)):
            starts, sizes = list(box.starts), list(box.sizes)
            starts[d], sizes[d] = starts[d] + low, size
            boxes.append(Box(tuple(starts), tuple(sizes)))
    return boxes


def _range(draw: st.DrawFn, numel: int) -> tuple[int, int]:
    low = draw(st.integers(0, numel))
    return low, numel - draw(st.integers(0, numel - low))


@given(st.data())
def test_what_two_boxes_share_is_what_numpy_finds(data: st.DataObject) -> None:
    """Every element that both ranges have, once, in rising order, in runs that none could be joined to."""
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    one, other = data.draw(_box(shape)), data.draw(_box(shape))
    within, of = _range(data.draw, one.numel), _range(data.draw, other.numel)
    mine, theirs = (_cut(numbers, box).reshape(-1) for box in (one, other))
    found = list(shared(one, within, other, of))
    expected = [
        (a, b)
        for a in range(*within)
        for b in range(*of)
        if mine[a] == theirs[b]
    ]  # fmt: skip
    assert [(run.one + i, run.other + i) for run in found for i in range(run.numel)] == expected
    assert all(run.numel for run in found) and one.meets(other) == bool({*mine} & {*theirs})


def test_a_long_run_is_one() -> None:
    """Rows that both boxes have whole are read at once; a range that begins late looks at no row before it."""
    whole, rows, columns = Box.of((6, 4)), Box((2, 0), (3, 4)), Box((0, 1), (6, 2))
    assert list(shared(whole, (0, 24), rows, (0, 12))) == [Extent(8, 0, 12)]
    assert list(shared(rows, (5, 12), whole, (0, 24))) == [Extent(5, 13, 7)]
    assert list(shared(whole, (14, 19), columns, (0, 12))) == [Extent(14, 7, 1), Extent(17, 8, 2)]


def test_a_slot_knows_its_box() -> None:
    """By default it has the whole parameter."""
    slots, _ = pack({"a": (4, 8), "b": (2, 8)}, 1, 1, {"b": ((6, 8), (4, 0))})
    assert [(slot.whole, slot.box) for slot in slots] == [((4, 8), None), ((6, 8), Box((4, 0), (2, 8)))]
    assert Slot("c", (), 0).whole == () and Slot("c", (), 0).box is None


# -- files ----------------------------------------------------------------------------------------------------------

BLOCK = 4


def _parts(draw: st.DrawFn, state: str, values: np.ndarray[Any, Any], box: Box) -> list[UnwrittenPiece]:
    """What ranks write that have a box together, split anywhere; of 8-bit moments between blocks."""
    flat = torch.from_numpy(_cut(values, box).reshape(-1).copy())
    shape, coded = values.shape, state == "q"
    ends = sorted(draw(st.integers(0, flat.numel())) for _ in range(draw(st.integers(0, 2))))
    ends = [end // BLOCK * BLOCK for end in ends] if coded else ends
    parts: list[UnwrittenPiece] = []
    for a, b in zip([0, *ends], [*ends, flat.numel()], strict=True):
        if a == b:
            continue
        named = None if box == Box.of(shape) and draw(st.booleans()) else box
        if not coded:
            parts.append(UnwrittenPiece(Piece("w", state, "element", "F32", (b - a,), a, b, named), flat[a:b]))
            continue
        codes, scales = quantize(flat[a:b], BLOCK, signed=False)
        parts.append(UnwrittenPiece(Piece("w", "q_codes", "element", "U8", (b - a,), a, b, named), codes))
        kept = Piece("w", "q_scales", "block", "F32", (len(scales),), a, b, named, BLOCK)
        parts.append(UnwrittenPiece(kept, scales))
    return parts


@settings(max_examples=40)
@given(st.data())
def test_any_boxes_are_written_and_any_read(data: st.DataObject) -> None:
    """A weight, a moment and an 8-bit moment of one to three dimensions: each tiled by boxes that are written in ranges
    into a few files, several into one; read in boxes of another tiling, in any range of them, and as a whole."""
    shape = data.draw(SHAPES)
    draw = np.random.default_rng(data.draw(st.integers(0, 9)))
    states = {name: draw.random(shape, dtype=np.float32) for name in ("weight", "exp_avg", "q")}
    parts: list[UnwrittenPiece] = []
    kept = dict(states)
    for name, values in states.items():
        tiles = data.draw(_tiles(shape, 4))
        parts += [part for box in tiles for part in _parts(data.draw, name, values, box)]
        if name == "q":  # what the codes stand for, box by box
            kept[name] = np.empty_like(values)
            for box in tiles:
                codes, scales = quantize(torch.from_numpy(_cut(values, box).reshape(-1).copy()), BLOCK, signed=False)
                _cut(kept[name], box)[...] = dequantize(codes, scales, BLOCK, signed=False).view(box.sizes).numpy()
    files: list[list[UnwrittenPiece]] = [[], [], []]
    for part in parts:
        files[data.draw(st.integers(0, 2))].append(part)
    index = Index(step=1, parameters=[Parameter("w", shape, "F32")])
    with TemporaryDirectory() as folder:
        draft = Draft(Path(folder, "step-1"), "0" * 12)
        draft.begin()
        for number, some in enumerate(files):
            written = write_file(draft.path / f"rank-{number}.safetensors", some)
            index.pieces += written.pieces
            index.files[f"rank-{number}.safetensors"] = written.num_bytes
        assert gaps(index) == []
        draft.commit(index.to_bytes())
        assert verify(folder).ok
        with sf.Checkpoint(folder) as checkpoint:
            assert {*checkpoint.states("w")} == {*states}
            for state, values in kept.items():
                assert np.array_equal(checkpoint.read("w", state).numpy(), values.reshape(-1))
                for box in data.draw(_tiles(shape, 5)):
                    flat = _cut(values, box).reshape(-1)
                    a, b = _range(data.draw, box.numel)
                    assert np.array_equal(checkpoint.read("w", state, a, b, box=box).numpy(), flat[a:b])
                    out = torch.empty(box.numel, dtype=torch.float64)
                    checkpoint.read("w", state, out=out, box=box)
                    assert np.array_equal(out.numpy(), flat.astype(np.float64))
        index.pieces.remove(data.draw(st.sampled_from([piece for piece in index.pieces if piece.state == "weight"])))
        assert gaps(index)


def test_columns_are_read_once(tmp_path: Path) -> None:
    """A box whose rows lie far apart reads and checks every byte of a file once, and not once for each row."""
    values = torch.arange(400 * 64, dtype=torch.float32).view(400, 64)
    pieces = [Piece("w", "weight", "element", "F32", (400 * 64,), 0, 400 * 64)]
    written = write_file(tmp_path / "rank-0.safetensors", [UnwrittenPiece(pieces[0], values)])
    index = Index(parameters=[Parameter("w", (400, 64), "F32")], pieces=written.pieces)
    index.files["rank-0.safetensors"] = written.num_bytes
    (tmp_path / "index.json").write_bytes(index.to_bytes())
    with sf.Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.read("w", box=Box((0, 16), (400, 16)))
        assert torch.equal(found.view(400, 16), values[:, 16:32])
        assert checkpoint.num_bytes_read == values.nbytes


def test_elements_that_no_box_has_are_not_made_up(tmp_path: Path) -> None:
    """Who asks for them hears how many there are; who asks for others reads them."""
    left = Piece("w", "weight", "element", "F32", (8,), 0, 8, Box((0, 0), (4, 2)))
    written = write_file(tmp_path / "rank-0.safetensors", [UnwrittenPiece(left, torch.arange(8.0))])
    index = Index(parameters=[Parameter("w", (4, 3), "F32")], pieces=written.pieces)
    index.files["rank-0.safetensors"] = written.num_bytes
    (tmp_path / "index.json").write_bytes(index.to_bytes())
    with sf.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("w", box=Box((1, 0), (2, 2))).tolist() == [2, 3, 4, 5]
        with pytest.raises(CheckpointError, match="has 2 of the elements 0 to 4 of 'weight' of 'w'"):
            checkpoint.read("w", box=Box((1, 1), (2, 2)))


# -- ranks that have boxes of one Linear ------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5),
    "Lion": partial(sf.optim.Lion, lr=1e-2),
    "AdamW8bit": partial(sf.optim.AdamW8bit, lr=1e-2, block=16, min_8bit_size=25),
}
WIDTH, HEIGHT = 6, 8


class Halves(nn.Module):
    """Two layers, the first split into rows and the second into columns, or both whole; the loss is linear in the
    weights and data are whole numbers, so each weight's gradient is the same whoever has it."""

    def __init__(self, half: int | None) -> None:
        super().__init__()
        self.half = half
        parts = 1 if half is None else 2
        self.rows = nn.Linear(WIDTH, HEIGHT // parts)
        self.columns = nn.Linear(HEIGHT // parts, WIDTH, bias=False)
        start = HEIGHT // 2 * (half or 0)
        self.mine = slice(start, start + HEIGHT // parts)
        whole = (torch.arange(HEIGHT * WIDTH).view(HEIGHT, WIDTH) % 7 - 3) / 8
        with torch.no_grad():
            self.rows.weight.copy_(whole[self.mine])
            self.rows.bias.copy_(whole[self.mine, 0])
            self.columns.weight.copy_(whole.T[:, self.mine])
        if half is not None:
            sf.mark_slice(self.rows, "weight", axis="tensor", whole=(HEIGHT, WIDTH), start=(start, 0))
            sf.mark_slice(self.rows, "bias", axis="tensor", whole=(HEIGHT,), start=(start,))
            sf.mark_slice(self.columns, "weight", axis="tensor", whole=(WIDTH, HEIGHT), start=(0, start))

    def forward(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return (self.rows(x) * u[:, self.mine]).sum() + (self.columns(y[:, self.mine]) * x).sum()


def _engine(half: int | None, optimizer: str) -> sf.Engine:
    return sf.Engine(Halves(half), optimizer=OPTIMIZERS[optimizer], layout="zero3")


def _train(engine: sf.Engine, steps: int) -> None:
    for _ in range(steps):
        draw = torch.Generator().manual_seed(engine.steps)
        x, y, u = (torch.randint(-2, 3, (3, n), generator=draw).float() for n in (WIDTH, HEIGHT, HEIGHT))
        engine.backward(engine(x, y, u))
        engine.step()


def _values(engine: sf.Engine) -> dict[str, Tensor]:
    """Weights and moments by ``STATE/PARAMETER``."""
    found = {f"weight/{name}": value for name, value in engine.state_dict().items()}
    update = engine.sharded.updater
    assert update is not None
    for state in update.state_dtypes():
        with engine.gathered(of=state) as values:
            found |= {f"{state}/{name}": value.clone() for name, value in values.items() if value is not None}
    return found


def _steps(engine: sf.Engine) -> list[Any]:
    update = engine.sharded.updater
    assert update is not None
    kept = [update.kept_once(s, i) for s in engine.sharded.segments() for i in range(len(s.spec.slots))]
    return copy.deepcopy(kept)


def _save_boxes(folder: str, half: int, names: list[str]) -> dict[str, Any]:
    """One of two processes that have a half each: its file of a checkpoint, and what says what is in it."""
    found: dict[str, Any] = {}
    for name in names:
        engine = _engine(half, name)
        _train(engine, 3)
        parts, index = collect(engine.sharded, {}, {}, {}, {})
        parts = [
            UnwrittenPiece(replace(p.piece, rank=half) if p.piece.kind == "rank" else p.piece, p.values) for p in parts
        ]
        file = f"rank-{half}-{name}.safetensors"
        written = write_file(Path(folder, file), parts)
        index.pieces, index.files = written.pieces, {file: written.num_bytes}
        found[name] = (header(engine.sharded, {}, {})[0], index, _values(engine))
        _train(engine, 2)
        found[name] += (_values(engine),)
        engine.close()
    return found


def _half() -> int:
    """The number of this process, which is a job of its own: data are all that ranks of a job may differ in."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return int(os.environ.pop("RANK"))


def _save_halves(folder: str, names: list[str]) -> dict[str, Any]:
    return _save_boxes(folder, _half(), names)


def _load_halves(folder: str, names: list[str]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]]:
    """One of two processes: loads its half of a checkpoint and goes on."""
    half = _half()
    found: dict[str, Any] = {}
    for name in names:
        engine = _engine(half, name)
        report = engine.load(f"{folder}/{name}")
        assert (report.missing, report.unexpected) == ((), ())
        before, steps = _values(engine), _steps(engine)
        _train(engine, 2)
        found[name] = before, _values(engine), steps
        engine.close()
    return found


def _joined(halves: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([h[key] for h in halves], dim=int("columns" in key)) for key in halves[0]}


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


def test_boxes_of_two_processes_are_one_parameter(ranks: Ranks, tmp_path: Path) -> None:
    """Two processes with the halves of two Linears write a checkpoint; it is whole, says the shapes of the whole, and a
    process that has all of them loads it and goes on as the halves did, bit for bit; and the halves themselves do."""
    names = list(OPTIMIZERS)
    saved = ranks.run(_save_halves, str(tmp_path), names, world_size=2, distributed=False)
    for name in names:
        (index, first, *_), (_, second, *_) = (said[name] for said in saved)
        for part in (first, second):
            index.pieces = [*index.pieces, *part.pieces]
            index.files |= part.files
            index.once |= part.once
            index.ranks = [*index.ranks, *part.ranks]
        draft = Draft(tmp_path / name, "0" * 12, latest=False)
        draft.begin()
        for file in index.files:
            (tmp_path / file).rename(draft.path / file)
        assert gaps(index) == []
        draft.commit(index.to_bytes())
        assert verify(tmp_path / name).ok
        shapes = {p.name: p.shape for p in index.parameters}
        assert shapes == {n: tuple(p.shape) for n, p in Halves(None).named_parameters()}
        expected = _joined([said[name][2] for said in saved])
        engine = _engine(None, name)
        engine.load(tmp_path / name)
        assert all(once.get("step", 3) == 3 for once in _steps(engine))
        if name == "AdamW8bit":  # blocks of the whole are others than those of a half; of those of a half it is exact
            with sf.Checkpoint(tmp_path / name) as checkpoint:
                for key, value in expected.items():
                    state, _, parameter = key.partition("/")
                    assert torch.equal(checkpoint.read(parameter, state), value.reshape(-1)), key
            _same(engine.state_dict(), {k.removeprefix("weight/"): v for k, v in expected.items() if "weight/" in k})
        else:
            _same(_values(engine), expected)
            _train(engine, 2)
            _same(_values(engine), _joined([said[name][3] for said in saved]))
        engine.close()
    loaded = ranks.run(_load_halves, str(tmp_path), names, world_size=2, distributed=False)
    for said, found in zip(saved, loaded, strict=True):
        for name in names:
            _same(found[name][0], said[name][2])
            _same(found[name][1], said[name][3])


def test_a_whole_parameter_is_loaded_into_boxes(ranks: Ranks, tmp_path: Path) -> None:
    """The way back: one process saves all, two load the half that each has, with the step counts, and go on as it."""
    names = [name for name in OPTIMIZERS if name != "AdamW8bit"]
    before: dict[str, dict[str, Tensor]] = {}
    after: dict[str, dict[str, Tensor]] = {}
    for name in names:
        engine = _engine(None, name)
        _train(engine, 3)
        engine.save(tmp_path / name, wait=True, latest=False)
        before[name] = _values(engine)
        _train(engine, 2)
        after[name] = _values(engine)
        engine.close()
    halves = ranks.run(_load_halves, str(tmp_path), names, world_size=2, distributed=False)
    for name in names:
        _same(_joined([half[name][0] for half in halves]), before[name])
        _same(_joined([half[name][1] for half in halves]), after[name])
        assert all(once.get("step", 3) == 3 for half in halves for once in half[name][2])


def test_what_is_kept_once_is_written_by_the_first_box() -> None:
    """Step counts are those of the parameter, and equal in all of its boxes: one of them has them in the index."""
    for half in (0, 1):
        engine = _engine(half, "RMSprop")
        _train(engine, 1)
        _, index = collect(engine.sharded, {}, {}, {}, {})
        assert set(index.once) == ({"rows.weight", "rows.bias", "columns.weight"} if half == 0 else set())
        engine.close()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [sf.optim.Muon, sf.optim.Adafactor, sf.optim.LAMB])
def test_an_optimizer_that_needs_the_whole_refuses_a_box(kind: Any) -> None:
    """Its update of an element reads elements that this rank does not have; element-wise groups are taken."""
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__} needs all of 'rows.weight', of which this rank has a slice"
    ):
        sf.Engine(Halves(0), optimizer=lambda p: kind([q for q in p if q.dim() == 2], lr=1e-2))
    if kind is not sf.optim.Adafactor:
        plain = {"adamw": True} if kind is sf.optim.Muon else {"adapt": False}
        engine = sf.Engine(Halves(0), optimizer=lambda p: kind([{"params": p, **plain}], lr=1e-2))
        _train(engine, 1)
        engine.close()


def test_a_checksum_needs_the_whole(tmp_path: Path) -> None:
    """Frozen boxes cannot be left out of a save; a save that left them out whole is loaded, and says what it could not
    compare."""

    def frozen(half: int | None) -> sf.Engine:
        model = Halves(half)
        model.columns.requires_grad_(False)
        return sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2))

    engine = frozen(1)
    with pytest.raises(UsageError, match=r"of all of 'columns.weight', of which this rank has a box .*frozen='keep'"):
        engine.save(tmp_path / "half", frozen="skip", wait=True)
    engine.close()
    engine = frozen(None)
    _train(engine, 1)
    engine.save(tmp_path / "whole", frozen="skip", wait=True)
    engine.close()
    engine = frozen(1)
    report = engine.load(tmp_path / "whole")
    assert any("Not compared" in note and "columns.weight" in note for note in report.notes)
    engine.close()


def _different_boxes() -> str:
    with pytest.raises(ConfigError) as error:
        _engine(torch.distributed.get_rank(), "AdamW")
    return str(error.value)


def test_data_ranks_have_the_same_box(ranks: Ranks) -> None:
    """Ranks that are to have equal values, and have other boxes, are refused before anything is sent."""
    for said in ranks.run(_different_boxes, world_size=2):
        assert "the slices of parameters of rank 1 differ from rank 0's" in said
        assert "'rows.weight' of shape (8, 6) in [4:8, 0:6] and 'rows.weight' of shape (8, 6) in [0:4, 0:6]" in said
        assert "axes of data have the same slice" in said and "parallel={'tensor': 2}" in said
