"""What a mark says of a parameter: on which axes it is distinct, and which box of the whole a rank has."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.plan.axes import Mesh
from shardfold.plan.placement import Box
from shardfold.sharding.slices import Slice, slices_on
from shardfold.testing import Ranks


def _of(module: nn.Module, mesh: Mapping[str, int], **coords: int) -> dict[str, Slice]:
    place = Mesh([sf.Axis(name, size, "data" if name == "intra" else "tensor") for name, size in mesh.items()])
    found = slices_on(module, place, {**dict.fromkeys(mesh, 0), **coords})
    return {name: found[id(p)] for name, p in module.named_parameters() if id(p) in found}


def test_equal_parts_along_a_dimension() -> None:
    """Rows and columns by the place on the axis; a mesh without the axis, or with one rank on it, has the whole."""
    layer = nn.Linear(3, 4)
    sf.mark_slice(layer, "weight", axis="tensor", dim=-1)
    sf.mark_slice(layer, "bias", axis="tensor", dim=0)
    assert _of(layer, {"intra": 2, "tensor": 3}, intra=1, tensor=2) == {
        "weight": Slice(("tensor",), ((4, 9), (0, 6))),
        "bias": Slice(("tensor",), ((12,), (8,))),
    }
    whole = {"weight": Slice((), None), "bias": Slice((), None)}
    assert _of(layer, {"intra": 2}) == _of(layer, {"intra": 2, "tensor": 1}) == whole


@pytest.mark.parametrize("dims", [(0, 1), (0, 0)])
def test_parts_over_two_axes(dims: tuple[int, int]) -> None:
    """Each axis divides once more, the slowest first: the ranks' parts are the whole, each element once."""
    layer = nn.Linear(2, 3, bias=False)
    for axis, dim in zip(("rows", "columns"), dims, strict=True):
        sf.mark_slice(layer, "weight", axis=axis, dim=dim)
    seen = None
    for rank in range(6):
        part = _of(layer, {"rows": 3, "columns": 2}, rows=rank // 2, columns=rank % 2)["weight"]
        assert part.axes == ("rows", "columns") and part.box is not None
        whole, (row, column) = part.box
        seen = torch.zeros(whole) if seen is None else seen
        seen[row : row + 3, column : column + 2] += 1
        if dims == (0, 0):
            assert row == 3 * rank  # in the order of the ranks
    assert seen is not None and bool((seen == 1).all())


def test_parts_that_are_not_equal() -> None:
    """A shape and an index say so, on a mesh without the axis too; so do they where a rank has all of it and
    others none, but not where there are no others."""
    layer = nn.Linear(2, 3)
    sf.mark_slice(layer, "weight", axis="tensor", whole=(7, 2), start=(4, 0))
    sf.mark_slice(layer, "bias", axis="tensor", whole=(3,), start=(0,))
    box = ((7, 2), (4, 0))
    assert _of(layer, {"tensor": 2}) == {"weight": Slice(("tensor",), box), "bias": Slice(("tensor",), ((3,), (0,)))}
    assert _of(layer, {"intra": 2}) == {"weight": Slice((), box), "bias": Slice((), None)}


def test_the_later_mark_holds_and_copies_have_it() -> None:
    """A subclass may say otherwise than its base; ``deepcopy`` and pickles keep the marks."""
    layer = nn.Linear(2, 3)
    sf.mark_slice(layer, "weight", axis="tensor")
    assert _of(layer, {"tensor": 2})["weight"] == Slice(("tensor",), None)  # distinct, and nobody says what of
    sf.mark_slice(layer, "weight", axis="tensor", dim=0)
    for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert _of(other, {"tensor": 2})["weight"] == Slice(("tensor",), ((6, 2), (0, 0)))


def test_a_slot_has_the_box_and_the_mark_comes_before_the_engine() -> None:
    """A parameter without memory before the engine has its mark too, and keeps what is written on it; behind the engine
    a mark would do nothing, and is refused."""
    with sf.meta_init():
        model = nn.Linear(4, 2)
    sf.mark_slice(model, "weight", axis="tensor", whole=(8, 4), start=(2, 0))
    model.bias.of_mine = "stays"  # pyright: ignore
    engine = sf.Engine(model)
    assert model.bias.of_mine == "stays"  # pyright: ignore
    assert [slot.box for s in engine.sharded.segments() for slot in s.spec.slots] == [Box((2, 0), (2, 4)), None]
    with pytest.raises(UsageError, match="an engine has 'weight' already: mark it before the engine is made"):
        sf.mark_slice(model, "weight", axis="tensor", dim=0)
    engine.close()


REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("wieght",), {"dim": 0}, "has no parameter 'wieght' of its own. Did you mean 'weight'?"),
    ((), {"dim": 0}, "names no parameter"),
    (("empty",), {"dim": 0}, "no parameter 'empty'"),
    ((3,), {"dim": 0}, "no parameter 3"),
    (("weight",), {"axis": "a b"}, "the axis is 'a b'"),
    (("weight",), {"axis": 1}, "the axis is 1"),
    (("weight",), {"dim": 2}, "dim=2 is none of its dimensions"),
    (("weight",), {"dim": -3}, "dim=-3 is none"),
    (("weight",), {"dim": True}, "dim=True is none"),
    (("weight",), {"dim": "rows"}, "dim='rows' is none"),
    (("weight", "bias"), {"dim": 1}, "'bias' has the shape (2,), and dim=1"),
    (("weight",), {"whole": (8, 4), "start": (7, 0)}, "does not lie at start=(7, 0)"),
    (("weight",), {"whole": (8,), "start": (0,)}, "does not lie"),
    (("weight",), {"whole": (8, 4), "start": (-1, 0)}, "one whole number from 0 on"),
    (("weight",), {"whole": 8, "start": (0, 0)}, "one whole number from 0 on"),
    (("weight",), {"whole": (8, 4)}, "start=None"),
    (("weight",), {"whole": (8, 4), "start": (0, 0), "dim": 0}, "give dim= where"),
]


@pytest.mark.parametrize(("names", "given", "says"), REFUSED)
def test_marks_that_are_none(names: tuple[Any, ...], given: dict[str, Any], says: str) -> None:
    """Each with one sentence, and nothing is marked."""
    layer = nn.Linear(4, 2)
    layer.register_parameter("empty", None)
    with pytest.raises(ConfigError) as raised:
        sf.mark_slice(layer, *names, **{"axis": "tensor", **given})
    assert says in str(raised.value)
    assert _of(layer, {"tensor": 2}) == {}


@pytest.mark.parametrize("module", ["l", None, nn.Linear, nn.Linear(2, 2).weight])
def test_a_mark_is_of_a_module(module: Any) -> None:
    with pytest.raises(ConfigError, match=r"give the torch.nn.Module that owns the parameters, and their names"):
        sf.mark_slice(module, "weight", axis="tensor", dim=0)


def test_marks_that_contradict_each_other() -> None:
    """Boxes of one parameter that differ by axis; a tied one that is marked in one place; a shape that has changed."""
    layer = nn.Linear(4, 2)
    sf.mark_slice(layer, "weight", axis="rows", whole=(4, 4), start=(0, 0))
    with pytest.raises(ConfigError, match="with different boxes"):
        sf.mark_slice(layer, "weight", axis="columns", dim=1)
    sf.mark_slice(layer, "weight", axis="columns", whole=(4, 4), start=(0, 0))
    layer.weight = nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(ConfigError, match=r"'weight' has the shape \(5, 4\), which does not lie"):
        _of(layer, {"rows": 2, "columns": 2})
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    sf.mark_slice(tied[0], "weight", axis="tensor", dim=0)
    with pytest.raises(
        ModelError, match=r"'0.weight' and '1.weight' are one parameter, .* was told of '0.weight' only"
    ):
        _of(tied, {"tensor": 2})
    sf.mark_slice(tied[1], "weight", axis="tensor", dim=1)
    with pytest.raises(ModelError, match="different things of them: mark it alike in both modules"):
        _of(tied, {"tensor": 2})
    sf.mark_slice(tied[1], "weight", axis="tensor", dim=0)
    assert _of(tied, {"tensor": 2})["0.weight"].box == ((4, 2), (0, 0))


def test_a_module_without_parameters_of_its_own_is_not_marked() -> None:
    """The sentence says where they are."""
    with pytest.raises(
        ConfigError, match=r"Sequential has no parameter 'weight' of its own. It has none: give the layer"
    ):
        sf.mark_slice(nn.Sequential(nn.Linear(2, 2)), "weight", axis="tensor", dim=0)


class Rows(nn.Module):
    """So many of them, with what is said of them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 2))
        sf.mark_slice(self, "weight", axis="tensor", dim=0)


def _unequal() -> str:
    with pytest.raises(ConfigError) as raised:
        sf.Engine(Rows(3 + dist.get_rank()), parallel={"tensor": 2})
    return str(raised.value)


def test_parts_of_a_dimension_that_are_not_equal_are_refused(ranks: Ranks) -> None:
    """``dim=`` takes them to be equal: the sentence says so, and what to give instead."""
    for said in ranks.run(_unequal, world_size=2):
        assert "'weight' of shape (8, 2)" in said and "'weight' of shape (6, 2)" in said, said
        assert "mark_slice() takes whole= and start= in place of dim=" in said, said
