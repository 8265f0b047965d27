"""Inputs of recomputed units in slices over ranks of tensor, and in slower tiers: training stays, to the bit."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.activations.partitioned_inputs import SliceBuffer, Sliced, Slicer, tensor_axis
from shardfold.errors import ConfigError, LayoutError, ShardfoldError, UsageError
from shardfold.plan.axes import Axis, Mesh
from shardfold.plan.report import SavedRow
from shardfold.testing import Ranks
from shardfold.torch_internals import expired, weak_storage

SLICED = partial(sf.Activations, mode="recompute", over="tensor", smallest=0)
CPU = torch.device("cpu")

# -- of one call


class OneOf:
    """One of some ranks that are all here; the n-th gather of each gives the same."""

    def __init__(self, rank: int, board: list[list[Tensor]], maxima: Tensor | None = None) -> None:
        self.rank, self.size, self._board, self._maxima = rank, len(board), board, maxima
        self._gathers = 0
        self.compared: list[Tensor] = []

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self._board[self.rank].append(tensor)
        self._gathers += 1
        return torch.cat([pieces[self._gathers - 1] for pieces in self._board])

    def max(self, tensor: Tensor) -> Tensor:
        self.compared.append(tensor)
        return tensor if self._maxima is None else torch.maximum(tensor, self._maxima)


def _cut(leaves: list[Any], ranks: int, smallest: int = 0) -> tuple[list[Any], Sliced]:
    """What the last rank keeps, and what makes it whole."""
    board: list[list[Tensor]] = [[] for _ in range(ranks)]
    cut = [Slicer(OneOf(r, board), _large, CPU).cut(leaves, smallest, "it", compare=True) for r in range(ranks)]
    for rank, (kept, _) in enumerate(cut[:-1]):
        board[rank] += [piece.view(torch.uint8) for piece in kept if isinstance(piece, Tensor) and piece.dim() == 1]
    return cut[-1]


def _large(tensor: Tensor, smallest: int) -> bool:
    return tensor.nbytes >= max(smallest, 1)


def _arguments() -> list[Any]:
    x = torch.randn(3, 5, 7, requires_grad=True)
    stack = torch.arange(2.0 * 9 * 11).view(2, 9, 11)
    mask = torch.rand(1, 1, 5, 5) > 0.5
    return [
        x, "a word", x, x.transpose(0, 2), x.detach()[1:], torch.randn(6, 4).t(), torch.arange(13), mask,
        mask.expand(3, 2, 5, 5), stack[1], None, stack[:, :, 3:9], torch.randn(7, dtype=torch.bfloat16),
        torch.randn(5, dtype=torch.complex64), torch.tensor(2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_arguments_come_back_as_they_were(ranks: int) -> None:
    """Values to the bit, sizes, strides, what requires a gradient and what shares memory, of views, gaps, expanded
    masks and all dtypes; lengths that do not divide too. Of memory that several arguments share a rank keeps one."""
    given = _arguments()
    kept, cut = _cut(given, ranks)
    back = cut.whole(kept)
    assert [type(each) for each in back] == [type(each) for each in given]
    for was, now in zip(given, back, strict=True):
        if isinstance(was, Tensor):
            assert (now.shape, now.stride(), now.dtype, now.requires_grad) == (
                was.shape, was.stride(), was.dtype, was.requires_grad,
            )  # fmt: skip
            assert torch.equal(now, was)
        else:
            assert now is was
    shared = {back[i].untyped_storage().data_ptr() for i in (0, 2, 3, 4)}
    assert len(shared) == 1
    assert sum(each is None for each in kept) == 1 + 3 + 1 + 1  # None itself, x again, the expanded, the stack


def test_a_rank_keeps_its_part() -> None:
    """1/N of the bytes of what is cut; smaller tensors, and small parts of a large tensor in pieces, stay whole."""
    x, small, gaps = torch.randn(64, 16), torch.randn(3), torch.randn(64, 64)[:, ::16]
    for ranks in (2, 4):
        kept, _ = _cut([x, small, gaps], ranks, smallest=64)
        assert kept[0].untyped_storage().nbytes() == x.nbytes // ranks
        assert kept[1] is small and kept[2] is gaps


def test_what_several_calls_are_given_is_kept_once() -> None:
    """While a tensor lives and is not changed, calls share a slice of it; nobody keeps one that is gone."""
    slicer, mask, x = Slicer(OneOf(0, [[], []]), _large, CPU), torch.ones(8), torch.ones(4)
    first, second = (slicer.cut([mask, x], 0, "it", compare=False)[0] for _ in range(2))
    assert first[0] is second[0] and first[1] is second[1]
    mask.zero_()
    assert slicer.cut([mask], 0, "it", compare=False)[0][0] is not first[0]
    del mask, x, first, second
    gc.collect()
    assert not slicer._known


@pytest.mark.parametrize("changed", ["value", "shape", "number", "place"])
def test_other_arguments_on_a_rank_are_refused(changed: str) -> None:
    """In one element, in shape alone, in number, or in order: by name, on each rank of the axis."""
    given: list[Any] = [torch.arange(24.0).view(4, 6), torch.zeros(2, 3)]
    other = {
        "value": [given[0].clone(), torch.zeros(2, 3)],
        "shape": [given[0].view(6, 4), given[1]],
        "number": given[:1],
        "place": [given[0].flip(0), given[1]],
    }[changed]
    if changed == "value":
        other[0][3, 5] = torch.nextafter(other[0][3, 5], torch.tensor(0.0))
    said: list[Tensor] = []
    for leaves in (given, other):
        here = OneOf(0, [[], []])
        Slicer(here, _large, CPU).cut(leaves, 0, "it", compare=True)
        said += here.compared
    for mine, theirs in ((given, said[1]), (other, said[0])):
        with pytest.raises(UsageError, match=r"'blocks\.1' is called with other tensors on each of the 2 ranks"):
            Slicer(OneOf(0, [[], []], theirs), _large, CPU).cut(mine, 0, "'blocks.1'", compare=True)


def test_room_is_used_again_and_is_not_exceeded() -> None:
    """Slices of a number of checkpoints lie in one piece of memory, whatever comes and goes; one more is refused."""
    slicer, room = Slicer(OneOf(0, [[], []]), _large, CPU), SliceBuffer(2)
    one, two = (slicer.cut([torch.randn(8)], 0, "it", compare=False, room=room) for _ in range(2))
    places = {one[0][0].data_ptr(), two[0][0].data_ptr()}
    assert len({each[0][0].untyped_storage().data_ptr() for each in (one, two)}) == 1 and room.nbytes == 2 * 4 * 4
    with pytest.raises(UsageError, match="for the inputs of 2 checkpoints, and one more"):
        slicer.cut([torch.randn(8)], 0, "it", compare=False, room=room)
    gc.collect()
    del one
    gc.collect()
    three = slicer.cut([torch.randn(8)], 0, "it", compare=False, room=room)
    assert three[0][0].data_ptr() in places and room.nbytes == 2 * 4 * 4


# -- what is refused where it is written


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"over": "tensor"}, "over says what becomes of the inputs of what is recomputed, but mode is 'keep'"),
        ({"mode": "host", "inputs": "host"}, "inputs says what becomes of the inputs"),
        ({"mode": "fit:1GiB", "over": "tensor"}, "mode is 'fit:1GiB'"),
        ({"mode": "recompute", "over": ("tensor",)}, "it is the name of an axis"),
        ({"mode": "recompute", "inputs": "hots"}, "which is not a tier. Did you mean 'host'"),
        ({"mode": "recompute", "contiguous": 4}, "goes with over="),
        ({"mode": "recompute", "over": "tensor", "contiguous": -1}, "a number of units, or 0"),
        ({"mode": "recompute", "over": "tensor", "inputs": "host", "contiguous": 4}, "without inputs="),
        ({"mode": "recompute", "inputs": "host", "folder": "/tmp"}, "folder is for 'disk'"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], said: str) -> None:
    """One sentence names the field."""
    with pytest.raises(ConfigError, match=said):
        sf.Activations(**given)


def test_axes_that_do_not_hold_the_same_are_refused() -> None:
    """An axis that the mesh does not have, one of data or of sequence, and one of two; the role is a name too."""
    mesh = Mesh([Axis("intra", 2), Axis("sequence", 2), Axis("heads", 2, "tensor")])
    assert tensor_axis("tensor", mesh) == tensor_axis("heads", mesh) == "heads"
    for over in ("intra", "sequence"):
        with pytest.raises(LayoutError, match="read other things"):
            tensor_axis(over, mesh)
    with pytest.raises(LayoutError, match="'tensro', and parallel= has intra=2 x sequence=2 x heads=2"):
        tensor_axis("tensro", mesh)
    with pytest.raises(LayoutError, match="over 'tensor', and parallel= has"):
        sf.Engine(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), activations=SLICED())


def test_tables_show_it() -> None:
    """A table's last cell has the axis and the tier."""
    table = sf.PRESETS["zero3"].edit("activations", mode="recompute", over="tensor", inputs="host")
    assert str(table).split("\n")[-2].split() == [
        "activations", "tensor", "as", "made", "recomputed,", "inputs", "on", "host",
    ]  # fmt: skip


# -- in training

ROWS, TIME, WIDTH = 3, 5, 8
INPUT = ROWS * TIME * WIDTH * 4
"""Bytes of a block's input on each rank, and of the mask that all blocks are called with."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.25) * mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = (tokens > 3).float().unsqueeze(-1).repeat(1, 1, WIDTH)
        for block in self.blocks:
            x = block(x, mask=mask)
        return x.square().mean()


PLAN = {"*.up": "column", "*.down": "row"}


def _trains(size: int, modes: list[sf.Activations | str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for mode in modes:
        torch.manual_seed(0)
        engine = sf.Engine(
            Net(),
            optimizer=partial(torch.optim.AdamW, lr=0.01),
            layout="zero3",
            parallel=sf.Parallel(mesh={"tensor": size}, tensor=PLAN),
            activations=mode,
            accumulate=2,
        )
        torch.manual_seed(engine.data_rank)
        draw = torch.Generator().manual_seed(engine.data_rank)
        losses: list[float] = []
        rows: tuple[SavedRow, ...] = ()
        for _ in range(4):
            tokens = torch.randint(16, (ROWS, TIME), generator=draw)
            with engine.count_saved() as saved:
                loss = engine(tokens)
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            rows = saved.rows[-3:]
        sent = {(row.purpose, row.op): row.sent for row in engine.traffic().rows}
        found.append({
            "losses": losses, "state": {k: v.clone() for k, v in engine.state_dict().items()}, "sent": sent,
            "saved": [(row.device, row.outside) for row in rows], "held": engine.memory().activations,
            "explained": engine.explain(),
        })  # fmt: skip
        engine.close()
    return found


MODES: list[sf.Activations | str] = [
    "recompute", SLICED(), SLICED(inputs="host"), SLICED(contiguous=3), SLICED(mode="select"),
    SLICED(over="", inputs="host"), SLICED(over="", inputs="disk"),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 4])
def test_trains_as_with_whole_inputs(ranks: Ranks, size: int) -> None:
    """Losses and parameters are those of recomputation with whole inputs, to the bit, with dropout, under ``zero3``
    over the ranks of data: in slices, these on the host and in one region, products kept too; whole on the host and on
    disk. Each rank keeps 1/N of the inputs, sends (N - 1)/N of them once more per pass, and nothing else."""
    for plain, *others in ranks.run(_trains, size, MODES, world_size=4):
        for mode, each in zip(MODES[1:], others, strict=True):
            assert each["losses"] == plain["losses"] and not each["held"], mode
            assert all(torch.equal(each["state"][key], value) for key, value in plain["state"].items()), mode
        sliced, away, room, _, host, disk = others
        assert plain["saved"] == [(2 * INPUT, 0), (INPUT, 0), (INPUT, 0)]
        assert sliced["saved"] == [(2 * INPUT // size, 0), (INPUT // size, 0), (INPUT // size, 0)]
        assert away["saved"] == [(0, 2 * INPUT // size), (0, INPUT // size), (0, INPUT // size)]
        assert room["saved"] == [(2 * 3 * INPUT // size, 0), (0, 0), (0, 0)]  # a region for each argument
        assert host["saved"] == disk["saved"] == [(0, 2 * INPUT), (0, INPUT), (0, INPUT)]
        gathered = {("layers", "ALL_GATHER"): 2 * 3 * 2 * INPUT * (size - 1) // size}  # of two passes, three blocks
        assert sliced["sent"] == {**plain["sent"], **gathered}
        assert "recompute over tensor\n" in sliced["explained"]
        assert "recompute over tensor, inputs on host\n" in away["explained"]


def _after_forward(rest: str) -> tuple[list[bool], int]:
    """Whether the memory of each block's input lives behind a forward; and how many slices do that Python knows."""
    engine = sf.Engine(
        Net(), layout="ddp", parallel=sf.Parallel(mesh={"tensor": 2}, tensor=PLAN), activations=SLICED(inputs=rest)
    )
    inputs: list[Any] = []
    for block in engine.module.get_submodule("blocks").children():
        block.register_forward_pre_hook(lambda module, args: inputs.append(weak_storage(args[0].untyped_storage())))
    loss = engine(torch.arange(ROWS * TIME).view(ROWS, TIME) % 16)
    alive = [not expired(memory) for memory in inputs]
    slices = sum(type(o) is Tensor and o.dim() == 1 and o.nbytes == INPUT // 2 for o in gc.get_objects())
    engine.backward(loss)
    engine.close()
    return alive, slices


@pytest.mark.parametrize("rest", ["device", "host"])
def test_originals_are_let_go(ranks: Ranks, rest: str) -> None:
    """Behind a forward nobody keeps what blocks were called with, but the slices; nor these where they rest elsewhere:
    three inputs and the mask are there once."""
    for alive, slices in ranks.run(_after_forward, rest, world_size=2):
        assert alive == [False] * 3 and slices <= 4


class Parts(nn.Module):
    """A block between columns and rows, whose input each rank has another part of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Sequential(nn.GELU(), nn.Tanh()), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))).square().mean()


def _differing() -> str:
    torch.manual_seed(0)
    engine = sf.Engine(
        Parts(),
        layout="ddp",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor={"up": "column", "down": "row"}),
        init=sf.Init(units=["act"]),
        activations={"act": SLICED(), "*": "keep"},
    )
    try:
        engine(torch.randn(4, 8))
    except ShardfoldError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_parts_are_not_taken_for_wholes(ranks: Ranks) -> None:
    """A unit whose input each rank has another part of is refused on every rank, by name, before anything is wrong."""
    for said in ranks.run(_differing, world_size=2):
        assert said.startswith("'act' is called with other tensors on each of the 2 ranks")
