"""What layers ask of the ranks along an axis: each call against the same sums and parts made on one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import UsageError
from shardfold.nn.axis_group import AxisGroup
from shardfold.parallel.module_group import ModuleGroup, group_of
from shardfold.testing import Ranks


class Linked(nn.Module):
    """A layer that asks for the ranks along tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        group_of(self, "tensor")

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y + group_of(self, "tensor").all_reduce(y)


def everyones(ranks: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(ranks)]


def _calls(ranks: int) -> dict[str, Any]:
    engine = sf.Engine(Linked(), parallel={"tensor": ranks}, layout="ddp")
    group: AxisGroup = group_of(engine.module, "tensor")
    me, n = group.rank, group.size
    assert (n, group.axis) == (ranks, "tensor")
    whole = everyones(n, 2 * n, 3 * n, 2)
    mine, before = whole[me], whole[me].clone()
    total = sum(whole[1:], whole[0])
    same = torch.testing.assert_close
    same(group.all_reduce(mine), total, rtol=1e-14, atol=1e-14)
    assert torch.equal(group.max(mine), torch.stack(whole).amax(0))
    for dim in (0, 1, -1):
        assert torch.equal(group.all_gather(mine, dim), torch.cat(whole, dim))
    for dim in (0, 1):
        same(group.reduce_scatter(mine, dim), total.chunk(n, dim)[me], rtol=1e-14, atol=1e-14)
    for split, concat in ((1, 0), (0, 1), (0, 0)):
        expected = torch.cat([each.chunk(n, split)[me] for each in whole], concat)
        assert torch.equal(group.all_to_all(mine, split, concat), expected)
    for to in (1, -1):
        a, b = group.shift([mine, mine.float()[:1]], to).wait()
        assert torch.equal(a, whole[(me - to) % n]) and torch.equal(b, whole[(me - to) % n].float()[:1])
    assert torch.equal(mine, before)  # nothing writes into what it is given
    narrow = [each.bfloat16() for each in whole]
    wide = sum((each.float() for each in narrow[1:]), narrow[0].float()).bfloat16()
    assert torch.equal(group.all_reduce(narrow[me]), wide)
    sizes = [2 + r for r in range(n)]  # parts that are not equal
    apart = [each[:size] for each, size in zip(everyones(n, n + 1, 2), sizes, strict=True)]
    assert torch.equal(group.all_gather(apart[me], 0, sizes), torch.cat(apart))
    summed = everyones(n, sum(sizes), 2)
    expected = sum(summed[1:], summed[0]).split(sizes)[me]
    same(group.reduce_scatter(summed[me], 0, sizes), expected, rtol=1e-14, atol=1e-14)
    came = group.shift([apart[me]], 1, [apart[(me - 1) % n].shape]).wait()[0]
    assert torch.equal(came, apart[(me - 1) % n])
    rows = [each[: sizes[r]] for r, each in enumerate(everyones(n, n + 1, sum(sizes)))]
    got = group.all_to_all(rows[me], 1, 0, split_sizes=sizes, concat_sizes=sizes)
    assert torch.equal(got, torch.cat([each.split(sizes, 1)[me] for each in rows]))
    engine.close()
    with pytest.raises(UsageError, match="no engine connects it"):
        group.all_reduce(mine)
    return {"done": True}


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_calls(ranks: Ranks, world: int) -> None:
    """Sums, largest values, gathers, scatters, exchanges and shifts, of equal parts and not, are what one process makes
    of all ranks' tensors; after the engine was closed calls say so."""
    ranks.run(_calls, world, world_size=world)


def _counted() -> list[tuple[Any, ...]]:
    model = nn.Sequential(Linked(), Linked())
    mesh = [sf.Axis("columns", 2, "tensor")]  # which layers ask for by its role
    engine = sf.Engine(model, parallel=mesh, layout="ddp", optimizer=torch.optim.SGD)
    engine.backward(engine(torch.ones(3, 2)).sum())
    engine.step()
    rows = [tuple(row) for row in engine.traffic().rows if row.purpose == "layers"]
    engine.close()
    return rows


def test_bytes_are_counted_under_the_axis(ranks: Ranks) -> None:
    """Two sums of 3 x 2 fp32 numbers over two ranks: each sends 24 bytes of each."""
    rows = ranks.run(_counted, world_size=2)[0]
    assert rows == [("layers", "ALL_REDUCE", ("columns",), 2, 48.0, 48)]


def test_without_other_ranks() -> None:
    """A group that no engine has bound, one on an axis of one rank, copies and pickles give back what they get."""
    layer = Linked()
    engine = sf.Engine(layer)
    group, x = group_of(layer, "tensor"), torch.ones(2)
    for one in (group, copy.deepcopy(group), pickle.loads(pickle.dumps(group)), ModuleGroup("any")):
        assert (one.size, one.rank) == (1, 0)
        for given in (one.all_reduce(x), one.max(x), one.all_gather(x, 0), one.reduce_scatter(x, 0)):
            assert given is x
        assert one.shift([x]).wait()[0] is x and one.all_to_all(x, 0, 0) is x
    engine.close()


def test_the_former_name_is_told() -> None:
    with pytest.raises(ImportError, match=r"write from shardfold.parallel.module_group import group_of\.$"):
        exec("from shardfold.parallel.link import link_of")
