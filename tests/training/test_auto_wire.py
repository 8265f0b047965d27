"""``wire="auto"``: links are measured once, every rank takes the same wires, and says why."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.testing import Ranks, RanksFailed, run_ranks
from shardfold.testing.links import Links, why_not

SGD = partial(torch.optim.SGD, lr=0.1)
MESH = {"inter": 2, "intra": 2}
REASON = why_not()


def _chosen(wire: Any, layout: str = "zero3", width: int = 256, mesh: Any = MESH) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    engine = sf.Engine(model, optimizer=SGD, layout=layout, wire=wire, parallel=mesh, init=sf.Init(units=["*"]))
    first = engine.sharded.comm.agreement.sequence
    again = sf.Engine(nn.Linear(width, width), optimizer=SGD, layout=layout, wire=wire, parallel=mesh)
    second = again.sharded.comm.agreement.sequence
    again.close()
    other = sf.Engine(nn.Linear(width, width), optimizer=SGD, layout=layout, wire=wire)  # all ranks are of one node
    third = other.sharded.comm.agreement.sequence
    other.close()
    losses: list[float] = []
    for step in range(2):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(2 * step + engine.rank))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    rows = [(row.program, row.sent) for row in engine.traffic().rows]
    found = {"wires": (str(engine.layout.gather), str(engine.layout.reduce)), "text": engine.explain(), "rows": rows,
             "issued": (first, second, third), "losses": losses}  # fmt: skip
    engine.close()
    return found


def test_links_are_measured_once_and_all_ranks_take_the_same(ranks: Ranks) -> None:
    """And say so. A second engine of the job measures nothing, but one with another mesh does, and sums in two hops are
    those in one."""
    found = ranks.run(_chosen, "auto", world_size=4)
    plain = ranks.run(_chosen, None, world_size=4)
    assert (
        len({each["wires"] for each in found}) == len({each["text"].split("bytes at rest")[0] for each in found}) == 1
    )
    for each, beside in zip(found, plain, strict=True):
        assert {wire.removesuffix("x2") for wire in each["wires"]} == {"fp32"}
        assert each["losses"] == pytest.approx(beside["losses"], rel=2e-6)
        assert all(program == sent > 0 for program, sent in each["rows"])
        first, second, third = each["issued"]
        assert first > 4 * second < third
    text = found[0]["text"]
    assert "wires, chosen for the links that were measured (auto):" in text
    assert text.count("<-- taken") == 2 and "computex2" in text and "loses nothing   <-- taken" in text
    assert "wires, chosen" not in plain[0]["text"]


@pytest.mark.soak
def test_on_one_machine_wires_stay_plain() -> None:
    """Although they need not: ranks read each other's memory, which takes less than to encode."""
    for found in run_ranks(_chosen, 2, "auto:0.2", mesh={"intra": 2}, width=512):
        assert found["wires"] == ("fp32", "fp32"), found["text"]


def _put_together(bucket: str | None) -> tuple[list[str], str, list[float], list[tuple[float, int]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)])
    engine = sf.Engine(model, optimizer=SGD, layout="zero3", overlap=sf.Overlap(bucket=bucket))
    losses: list[float] = []
    for step in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + engine.rank))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    rows = [(row.program, row.sent) for row in engine.traffic().rows]
    found = [unit.name for unit in engine.units], engine.explain(), losses, rows
    engine.close()
    return found


def test_small_blocks_are_put_together_by_the_links(ranks: Ranks) -> None:
    """To as many MiB on all ranks as is said, here all that a list allows, 16 KiB each; what is sent is what the
    program says, and training is that of the same bytes by their number."""
    found = ranks.run(_put_together, "auto", world_size=2)
    (said,) = {line for _, text, _, _ in found for line in text.splitlines() if "put together" in line}
    size = said.partition(" MiB")[0].rpartition(" ")[2]
    assert 1 <= int(size) <= 25 and "ms and" in said
    for (names, _, losses, rows), (same, text, others, _) in zip(
        found, ranks.run(_put_together, f"{size}MiB", world_size=2), strict=True
    ):
        assert names == same and len(names) == 4 and losses == others and "put together" not in text
        assert all(program == sent > 0 for program, sent in rows)


def _other_buckets() -> None:
    rank = int(torch.distributed.get_rank())
    sf.Engine(nn.Linear(8, 8), optimizer=SGD, overlap=sf.Overlap(bucket="auto" if rank else "8MiB"))


def test_ranks_of_which_one_measures_links_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="bucket"):
        ranks.run(_other_buckets, world_size=2)


def _apart() -> None:
    rank = int(torch.distributed.get_rank())
    sf.Engine(nn.Linear(8, 8), optimizer=SGD, wire="auto:0.01" if rank else "auto")


def test_ranks_that_were_allowed_other_things_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"wire= of rank 1 differ from rank 0's \(auto:0.01 and auto\)"):
        ranks.run(_apart, world_size=2)


def test_one_rank_has_nothing_to_choose() -> None:
    engine = sf.Engine(nn.Linear(8, 8), optimizer=SGD, wire="auto:0.5")
    assert str(engine.layout.gather) == "fp32"
    engine.close()


@pytest.mark.soak
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_over_a_slow_link_as_little_is_sent_as_is_allowed() -> None:
    """100 Mbit/s, where a byte that is not sent saves more than any codec costs. Sums cross between nodes as 3/4 of a
    flat in one hop and 1/2 in two: whether that is a quarter faster is up to the link within a node and to the codec,
    which are slow where processors have much else to do."""
    with Links(2, 2, "100mbit") as links:
        for wire, gather, reduce in (
            ("auto", "fp32x2", "fp32"),
            ("auto:0.01", "int8/256x2", "int8/256"),
            ("auto:0.2", "int4/256x2", "int4/256"),
        ):
            for found in links.run(_chosen, wire, width=512, timeout=300):
                gathered, reduced = found["wires"]
                assert gathered == gather and reduced.removesuffix("x2") == reduce, found["text"]
