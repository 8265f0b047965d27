"""The process group of the simulated device behaves as NCCL does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfold import torch_internals
from shardfold.testing.simulated import is_supported, simulated
from shardfold.torch_internals import all_gather_single, reduce_scatter_single
from tests.support.simulated import on_device

pytestmark = pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")
MODES = pytest.mark.parametrize("mode", ["check", "lazy"])


def _module() -> Any:
    return torch.get_device_module("sim")


def _store() -> Any:
    return torch_internals.default_store()


def _ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n, device="sim")


def _all_gather(me: int) -> list[Any]:
    full = torch.zeros(4, device="sim")
    mine = full[2 * me : 2 * me + 2].fill_(me + 1)
    all_gather_single(full, mine)  # in place
    parts = [torch.empty(2, device="sim") for _ in range(2)]
    dist.all_gather(parts, mine)
    return [full.tolist(), [part.tolist() for part in parts]]


def _reduce_scatter(me: int) -> list[Any]:
    out, other = torch.empty(2, device="sim"), torch.empty(2, device="sim")
    full = torch.arange(4.0, device="sim") * (me + 1)
    reduce_scatter_single(out, full)
    dist.reduce_scatter(other, list(full.chunk(2)))
    return [out.tolist() == other.tolist() == [3.0 * (2 * me), 3.0 * (2 * me + 1)]]


def _all_reduce(me: int) -> list[Any]:
    total, mean, most = (_ones() * (me + 1) for _ in range(3))
    dist.all_reduce(total)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return [total.tolist(), mean.tolist(), most.tolist()]


def _all_to_all(me: int) -> list[Any]:
    source = torch.arange(3.0, device="sim") + 10 * me
    out, parts = torch.empty(2 + 2 * me if me else 2, device="sim"), [torch.empty(1, device="sim") for _ in range(2)]
    sends, receives = ([1, 2], [1, 1]) if me == 0 else ([1, 2], [2, 2])
    dist.all_to_all_single(out, source, receives, sends)
    dist.all_to_all(parts, list((_ones(2) * me).chunk(2)))
    right = [0.0, 10.0] if me == 0 else [1.0, 2.0, 11.0, 12.0]
    return [out.tolist() == right, [part.item() for part in parts]]


def _from_one(me: int) -> list[Any]:
    x, one, many = _ones() * (me + 3), torch.empty(2, device="sim"), [torch.empty(1, device="sim") for _ in range(2)]
    dist.broadcast(x, src=1)
    dist.scatter(one, list(torch.arange(4.0, device="sim").chunk(2)) if me == 0 else None, src=0)
    dist.gather(_ones(1) * me, many if me == 0 else None, dst=0)
    total = _ones() * (me + 1)
    dist.reduce(total, dst=0)
    return [x.tolist(), one.tolist() == [2.0 * me, 2.0 * me + 1], me or [each.item() for each in many] == [0.0, 1.0],
            me or total.tolist() == [3.0] * 4]  # fmt: skip


def _messages(me: int) -> list[Any]:
    x = _ones() * (me + 1)
    if me == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        y = torch.empty_like(x)
        dist.recv(y, 0)
        dist.send(y * 5, 0)
        x = y
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - me), dist.P2POp(dist.irecv, z := torch.empty_like(x), 1 - me)]
    )
    for work in works:
        work.wait()
    return [z.tolist() == ([1.0] * 4 if me == 0 else [5.0] * 4)]


def _objects(me: int) -> list[Any]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": me})
    one = [f"from {me}"]
    dist.broadcast_object_list(one, src=0)
    dist.barrier(device_ids=[0])
    return [found, one]


COLLECTIVES: dict[str, tuple[Callable[[int], list[Any]], list[Any]]] = {
    "all-gather": (_all_gather, [[1.0, 1.0, 2.0, 2.0], [[1.0, 1.0], [2.0, 2.0]]]),
    "reduce-scatter": (_reduce_scatter, [True]),
    "all-reduce": (_all_reduce, [[3.0] * 4, [1.5] * 4, [2.0] * 4]),
    "all-to-all": (_all_to_all, [True, [0.0, 1.0]]),
    "from and to one": (_from_one, [[4.0] * 4, True, True, True]),
    "messages": (_messages, [True]),
    "objects": (_objects, [[{"rank": 0}, {"rank": 1}], ["from 0"]]),
}


@pytest.mark.sampled(14)
@MODES
@pytest.mark.parametrize("name", COLLECTIVES)
@on_device(ranks=2)
def test_collectives(name: str, mode: str) -> None:
    """Each gives what torch.distributed says, and orders streams as it should."""
    run, expected = COLLECTIVES[name]
    with simulated(mode, seed=dist.get_rank(), lag=500) as sim:
        got = run(dist.get_rank())
        assert [True if value == dist.get_rank() and value == 1 else value for value in got] == expected, got
        sim.expect_clean()


@MODES
@on_device(ranks=2)
def test_waiting_orders_streams_and_does_not_stop_the_host(mode: str) -> None:
    """wait() returns at once; what is queued behind it sees the result."""
    with simulated(mode, seed=dist.get_rank(), lag=500) as sim:
        x = _ones()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 2
        assert not sim.host_syncs
        assert y.tolist() == [4.0] * 4
        assert work.is_completed() and work.is_success() and work.exception() is None
        sim.expect_clean()


@on_device(ranks=2)
def test_a_result_that_nobody_waited_for_is_reported() -> None:
    """With the line that reads it and the line of the collective, and that wait() orders them."""
    with simulated() as sim:
        x = _ones()
        work = dist.all_reduce(x, async_op=True)
        y = x * 2
        work.wait()
        (race,) = sim.races
        assert race.kind == "unordered" and race.before is not None and race.before.what == "all_reduce"
        assert "wait() of the collective" in str(race) and all("test_group.py" in site for site in race.sites)
        del y


@on_device(ranks=2)
def test_a_tensor_that_is_changed_while_it_is_sent_is_reported() -> None:
    """The collective reads it until somebody has waited."""
    with simulated() as sim:
        full, mine = torch.zeros(4, device="sim"), _ones(2)
        work = all_gather_single(full, mine, async_op=True)
        mine.zero_()
        work.wait()
        assert [race.kind for race in sim.races] == ["unordered"]


@on_device(ranks=2)
def test_a_tensor_that_is_dropped_while_it_is_sent_stays_alive() -> None:
    """As NCCL keeps what it sends until wait(); dropped behind it, its memory is used in order."""
    with simulated() as sim:
        full = torch.zeros(4, device="sim")
        work = all_gather_single(full, _ones(2), async_op=True)
        torch.zeros(2, device="sim")
        work.wait()
        torch.zeros(2, device="sim")
        sim.expect_clean()


@on_device(ranks=2)
def test_a_barrier_stops_the_host() -> None:
    """As NCCL's does."""
    with simulated() as sim:
        dist.barrier(device_ids=[0])
        assert [what for what, _ in sim.host_syncs] == ["barrier"]


@on_device(ranks=2)
def test_what_nccl_refuses_is_refused() -> None:
    """Tensors of the CPU, those that are not contiguous, sizes that do not fit."""
    with simulated():
        with pytest.raises(RuntimeError, match="all_reduce of a tensor on cpu"):
            dist.all_reduce(torch.ones(4))
        with pytest.raises(RuntimeError, match="not contiguous"):
            dist.broadcast(torch.ones(4, 2, device="sim").t(), src=0)
        with pytest.raises(ValueError, match="2 times the elements"):
            all_gather_single(_ones(5), _ones(2))


@MODES
@on_device(ranks=2)
def test_groups_of_some_ranks(mode: str) -> None:
    """new_group makes groups with streams of their own, which are in no order with each other."""
    with simulated(mode, seed=dist.get_rank()) as sim:
        both, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][dist.get_rank()]
        x, y = _ones(), _ones()
        works = [dist.all_reduce(x, group=both, async_op=True), dist.all_reduce(y, group=alone, async_op=True)]
        for work in works:
            work.wait()
        assert (x + y).tolist() == [3.0] * 4
        sim.expect_clean()


@on_device(ranks=2)
def test_ddp_of_pytorch_trains() -> None:
    """DistributedDataParallel goes through it, without a race."""
    with simulated() as sim:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to("sim"))
        model(_ones()[None] * (dist.get_rank() + 1)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5] * 4] * 4
        sim.expect_clean()


def _peer_that_does_not_come(mode: str) -> Any:
    with simulated(mode, lag=500):
        if dist.get_rank() == 1:
            _store().wait(["told"], timedelta(seconds=60))  # not before the other has its error
            return None
        x = _ones()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        pending = work.exception() is None  # it fails after the timeout
        try:
            x.sum().item()
        except RuntimeError as error:
            return pending, str(error), str(work.exception()), work.is_success()
        finally:
            _store().set("told", "")


@MODES
def test_a_peer_that_does_not_come_is_told_where_the_host_waits(mode: str) -> None:
    """wait() goes on; the next value that the host reads raises, with the collective's line; exception() has it too."""
    from shardfold.testing import run_ranks

    told = run_ranks(_peer_that_does_not_come, 2, mode, group_timeout=1.5, device="sim")[0]
    early, text, exception, good = told
    assert early and "simccl: all_reduce at" in text and "test_group.py" in text and text == exception and not good


def _aborts(mode: str) -> Any:
    with simulated(mode, lag=500):
        group: Any = dist.group.WORLD
        store = _store()
        if dist.get_rank() == 1:
            store.wait(["told"])
            return None
        x = _ones()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        behind = _module().current_stream().record_event()
        assert not behind.query() and not work.is_completed() and not _module().current_stream().query()
        group.abort()
        _module().synchronize()
        store.set("told", "")
        return work.is_completed() and behind.query(), str(work.exception())


@MODES
def test_abort_ends_what_is_under_way(mode: str) -> None:
    """Without the peer, and long before the group's timeout."""
    from shardfold.testing import run_ranks

    done, why = run_ranks(_aborts, 2, mode, device="sim", timeout=60)[0]
    assert done and "aborted" in why


def _dies() -> Any:
    with simulated():
        if dist.get_rank() == 1:
            raise ValueError("rank one gives up")
        x = _ones()
        dist.all_reduce(x)
        return x.sum().item()


def test_a_peer_that_dies_is_told() -> None:
    """The first to fail is named, and the other hears of it through its collective."""
    from shardfold.testing import RanksFailed, run_ranks

    with pytest.raises(RanksFailed) as failed:
        run_ranks(_dies, 2, device="sim")
    assert failed.value.failures[0].rank == 1 and "rank one gives up" in str(failed.value)
