"""Ranks that run one program agree among themselves, at a cost in the store that does not grow with their number."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.comm.agreement import Agreement
from shardfold.comm.mesh import DataMesh
from shardfold.comm.peers import HEAD, SMALL, Peers
from shardfold.errors import OrderError
from shardfold.testing import Ranks
from tests.support import models

STORE: Any = dist.Store  # pyright: ignore[reportPrivateImportUsage]
OPERATIONS = (
    "set", "get", "add", "check", "wait", "multi_get", "multi_set", "append", "compare_set", "delete_key",
)  # fmt: skip


class _Counted:
    """While entered, counts what this package asks of key-value stores, not what PyTorch does."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._plain = {name: getattr(STORE, name) for name in OPERATIONS}

    def __enter__(self) -> Counter[str]:
        for name, plain in self._plain.items():
            setattr(STORE, name, self._counting(name, plain))
        return self.asked

    def _counting(self, name: str, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("shardfold."):
                self.asked[name] += 1
            return plain(*args, **options)

        return call

    def __exit__(self, *_: object) -> None:
        for name, plain in self._plain.items():
            setattr(STORE, name, plain)


def _operations() -> list[int]:
    """Of the store: to make an engine, in three steps in which orders are adopted, and in an exchange of long words."""
    counts: list[int] = []
    torch.manual_seed(0)
    with _Counted() as asked:
        engine = sf.Engine(models.small(), optimizer=partial(torch.optim.AdamW, lr=1e-2), layout="zero3")
        counts.append(asked.total())
        for batch in models.batches(3):
            engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))
            engine.step()
        counts.append(asked.total())
        said = engine.sharded.comm.agreement.exchange("words", str(engine.rank) * 5 * HEAD)
        counts.append(asked.total())
    assert said == [str(rank) * 5 * HEAD for rank in range(engine.world_size)]
    engine.close()
    return counts


@pytest.mark.soak
def test_operations_of_the_store_do_not_grow_with_the_ranks(ranks: Ranks) -> None:
    # 7, one more of the rank that is first, as it makes the entries of all, and one more of the one that comes last.
    for counts in (*ranks.run(_operations, world_size=2), *ranks.run(_operations, world_size=4)):
        assert 7 <= counts[0] <= 9 and counts == counts[:1] * 3, "steps and an exchange ask nothing"


def _looks() -> tuple[int, int]:
    """Operations of the store in a look at what others published, when nothing is new and when it is."""
    mesh = DataMesh(None, torch.device("cpu"), timedelta(seconds=30))
    agreement = Agreement(mesh, 30.0, 30.0)
    watch: Any = agreement._watch
    agreement.exchange("all are here", "")
    with _Counted() as asked:
        for _ in range(3):
            watch.read()
        same = asked.total() // 3
    agreement.exchange("all have looked", "")
    if mesh.rank == 0:
        watch.publish("busy", "at work")
    agreement.exchange("it is said", "")
    with _Counted() as asked:
        found = watch.read()
        new = asked.total()
    assert mesh.rank == 0 or found[0].what == "at work"
    agreement.close()
    mesh.close()
    return same, new


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_look_at_what_the_others_do_is_one_operation_or_two(ranks: Ranks, world_size: int) -> None:
    assert ranks.run(_looks, world_size=world_size) == [(1, 2)] * world_size


def _exchanged() -> bool:
    mesh = DataMesh(None, torch.device("cpu"), timedelta(seconds=30))
    agreement = Agreement(mesh, 30.0, 30.0)
    right = True
    for length in (0, 1, HEAD - 9, HEAD - 8, HEAD - 7, 3 * HEAD):
        said = agreement.exchange("words", "ä" * (length * mesh.rank))
        right &= said == ["ä" * (length * rank) for rank in range(mesh.world)]
    agreement.close()
    mesh.close()
    return right


def test_an_exchange_brings_texts_of_any_length(ranks: Ranks) -> None:
    """Also of none, of one that just fits the first message, and of bytes that are no letters by themselves."""
    assert ranks.run(_exchanged, world_size=3) == [True] * 3


def _two_programs() -> list[Any]:
    """Ranks 0 and 1 run one program, 2 and 3 another, which they disagree on in the end."""
    mesh = DataMesh({"inter": 2, "intra": 2}, torch.device("cpu"), timedelta(seconds=30))
    mine = [0, 1] if mesh.rank < 2 else [2, 3]
    agreement = Agreement(mesh, 30.0, 30.0, Peers(mesh, mine, lambda: mesh.group(("intra",))))
    first = mine[0] == 0
    got: list[Any] = []
    for _ in range(1 if first else 3):
        got.append(agreement.meet("a forward" if first else "a backward").together)
    got.append(agreement.exchange("words", json.dumps(mesh.rank)))
    try:
        got.append(agreement.meet("a step" if first or mesh.rank == 2 else "a save").together)
    except OrderError as error:
        got.append(str(error))
    dist.barrier()
    agreement.close()
    mesh.close()
    return got


def test_each_program_has_its_own_agreement(ranks: Ranks) -> None:
    """Meetings, words and a disagreement of one group of ranks are nothing to the other."""
    first, second, third, fourth = ranks.run(_two_programs, world_size=4)
    assert first == second == [True, ["0", "1"], True]
    assert third == fourth
    assert third[:4] == [True, True, True, ["2", "3"]]
    assert "rank 2: a step; rank 3: a save" in third[4]


def _apart(layout: str) -> list[float]:
    """Rank 1 comes to its backward when rank 0 is inside of its own, before it sends a gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    # What is behind the middle is the root's, which is sent at the end.
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), layout=layout, init=sf.Init(units=["0"]))
    losses: list[float] = []
    inside: list[torch.Tensor] = []  # what a module in the middle returned: its gradient comes inside of the backward
    model[1].register_forward_hook(lambda module, given, output: inside.append(output))
    for step in range(4):
        loss = engine(torch.full((2, 8), 1.0 + engine.rank)).sum()
        losses.append(float(loss.detach()))
        if step == 3 and engine.rank:
            dist.barrier()
        elif step == 3:
            inside[-1].register_hook(lambda _: dist.barrier())
        engine.backward(loss)
        engine.step()
    engine.close()
    return losses


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2"])
def test_a_backward_begins_before_the_others_have_come_to_theirs(ranks: Ranks, layout: str) -> None:
    """Ranks that meet before it would wait for each other: one in the meeting, one in the barrier."""
    first, second = ranks.run(_apart, layout, world_size=2)
    assert len(first) == len(second) == 4


def _announced(layout: str) -> str:
    """In a step whose order is known, rank 0 runs a backward and rank 1 does something else."""
    torch.manual_seed(0)
    engine = sf.Engine(
        torch.nn.Linear(8, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        layout=layout,
        runtime=sf.Runtime(patience=3.0),
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    try:
        loss = engine(torch.ones(2, 8)).sum()
        if engine.rank == 0:
            engine.backward(loss)
        else:
            engine.state_dict()
    except OrderError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_ranks_that_announce_different_passes_raise_on_every_rank(ranks: Ranks, layout: str) -> None:
    first, second = ranks.run(_announced, layout, world_size=2)
    first, _, program = first.partition("\n")  # rank 0 has begun its backward: it has come to the first collective
    assert first == second and program.startswith("last:")
    assert "rank 0: a backward pass (1 of 1); rank 1: engine.state_dict(" in first


def _reduced(bytes_of_each: int) -> list[list[float]]:
    """Over Gloo, small ones and those that it reduces by itself."""
    mesh = DataMesh(None, torch.device("cpu"), timedelta(seconds=30))
    peers, found = Peers(mesh), []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM):
        for dtype in (torch.uint8, torch.float64):
            values = torch.ones(bytes_of_each // dtype.itemsize, dtype=dtype)
            values[:3] = torch.tensor([mesh.rank, 3 - mesh.rank, 2], dtype=dtype)
            peers.reduce(values, op).wait(timedelta(seconds=30))
            found.append(values[:4].tolist())
    mesh.close()
    return found


@pytest.mark.parametrize("bytes_of_each", [64, SMALL])
def test_small_messages_are_reduced_as_large_ones_are(ranks: Ranks, bytes_of_each: int) -> None:
    """Of ranks 0, 1 and 2."""
    expected = [[2.0, 3.0, 2.0, 1.0]] * 2 + [[0.0, 1.0, 2.0, 1.0]] * 2 + [[3.0, 6.0, 6.0, 3.0]] * 2
    assert ranks.run(_reduced, bytes_of_each, world_size=3) == [expected] * 3
