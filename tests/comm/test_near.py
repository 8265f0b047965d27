"""The near wire gives bit for bit what the Gloo wire gives, depends on no rank's timing, and says who is gone."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.comm import _neighbours as neighbours
from shardfold.comm._boards import possible
from shardfold.comm._near import NearTransport
from shardfold.comm._neighbours import SLOTS
from shardfold.comm.mesh import DataMesh
from shardfold.comm.transport import GlooTransport
from shardfold.errors import CollectiveError
from shardfold.testing import Ranks, RanksFailed
from tests.support import models
from tests.support.wires import LIMIT, compare, exchanges, plain
from tests.support.wires import exchange as _exchange
from tests.support.wires import wait as _wait

pytestmark = pytest.mark.skipif(not possible(), reason="this system has no cross memory attach")


def _wires() -> tuple[GlooTransport, NearTransport, Any, DataMesh]:
    mesh = DataMesh(None, torch.device("cpu"), LIMIT)
    gloo = plain()
    wire = NearTransport(gloo, mesh.groups(), mesh.rank, _exchange, _wait)
    assert wire.near(mesh.everyone)
    return gloo, wire, mesh.everyone, mesh


def _compare() -> list[str]:
    gloo, wire, _, mesh = _wires()
    wrong = compare(gloo, wire, mesh)
    mesh.close()
    return wrong


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_is_read_is_bit_for_bit_what_gloo_brings(ranks: Ranks, world_size: int) -> None:
    assert ranks.run(_compare, world_size=world_size) == [[]] * world_size


def _exchanged() -> bool:
    _, wire, _, mesh = _wires()
    right = exchanges(wire, mesh)
    mesh.close()
    return right


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exchange_brings_each_rank_its_parts(ranks: Ranks, world_size: int) -> None:
    """Whatever the others have for it, in their order."""
    assert ranks.run(_exchanged, world_size=world_size) == [True] * world_size


def _many() -> bool:
    _, wire, group, mesh = _wires()
    right = True
    full = torch.empty(2 * mesh.world)
    for i in range(SLOTS * 2 + 7):
        full.chunk(mesh.world)[mesh.rank].fill_(float(i + mesh.rank))
        wire.all_gather(full, group).wait(_wait)
        right &= full[::2].tolist() == [float(i + rank) for rank in range(mesh.world)]
    mesh.close()
    return right


@pytest.mark.soak
def test_a_board_has_room_for_any_number_of_collectives(ranks: Ranks) -> None:
    assert ranks.run(_many, world_size=3) == [True] * 3


class _Shards:
    """Two tensors that rest on this rank, gathered by name, with what a gather of each brought."""

    def __init__(self) -> None:
        _, self.wire, self.group, self.mesh = _wires()
        self.shards = {name: torch.full((1000,), float(self.mesh.rank)) for name in "ab"}

    def fill(self, name: str, value: float) -> None:
        """Whoever writes has made sure that nobody reads."""
        self.shards[name].fill_(value + self.mesh.rank)

    def begin(self, name: str) -> tuple[torch.Tensor, Any]:
        shard = self.shards[name]
        full = torch.cat([shard] * self.mesh.world)
        return full, self.wire.all_gather(full, self.group, resident=shard)

    def gather(self, name: str) -> list[float]:
        full, pending = self.begin(name)
        pending.wait(_wait)
        return full[::1000].tolist()

    def a_pass(self) -> list[float]:
        got = [*self.gather("a"), *self.gather("b")]
        self.wire.fence(_wait)
        return got


def _at_once() -> list[float]:
    """Rank 1 begins its second gather only when rank 0 has the result of its own."""
    shards = _Shards()
    shards.a_pass()
    shards.gather("a")
    if shards.mesh.rank:
        dist.barrier()
    got = shards.gather("b")
    if not shards.mesh.rank:
        dist.barrier()
    shards.wire.fence(_wait)
    shards.mesh.close()
    return got


def test_what_is_resident_is_read_without_waiting_once_all_are_past_the_last_fence(ranks: Ranks) -> None:
    assert ranks.run(_at_once, world_size=2) == [[0.0, 1.0]] * 2


def _changed(how: str) -> list[float]:
    """Rank 1 writes into its shard before its gather, when rank 0 has begun the same gather already."""
    shards = _Shards()
    for name in "ab":
        shards.fill(name, 0.0)
    for _ in range(2):
        shards.a_pass()
    name = "a"
    if how == "behind a gather":
        shards.gather("a")
        shards.gather("b")
        shards.wire.fence(_wait, shards.shards["a"])  # of this rank's own
    elif how == "made anew":
        for other in "ab":
            shards.shards[other] = torch.full((1000,), float(shards.mesh.rank))
        shards.gather("a")
        name = "b"
    if shards.mesh.rank == 0:
        full, pending = shards.begin(name)
        began = pending.done()
        dist.barrier()
        pending.wait(_wait)
        got = [float(began), *full[::1000].tolist()]
    else:
        dist.barrier()
        shards.fill(name, 10.0)
        got = [0.0, *shards.gather(name)]
    shards.wire.fence(_wait)
    shards.mesh.close()
    return got


@pytest.mark.parametrize("how", ["behind a fence", "behind a gather", "made anew"])
def test_what_was_resident_and_has_changed_is_read_as_it_is_now(ranks: Ranks, how: str) -> None:
    """Rank 0 waits for rank 1, as none has shown yet that it is past the fence, or has gathered it before since."""
    assert ranks.run(_changed, how, world_size=2) == [[0.0, 0.0, 11.0]] * 2


def _fence() -> bool:
    """Rank 1 reads only when rank 0 waits for it at the fence; whether it had to."""
    shards = _Shards()
    store, waited = dist.distributed_c10d._get_default_store(), False
    if shards.mesh.rank:
        read = neighbours.Group.read
        neighbours.Group.read = lambda *args: (store.wait(["go"], LIMIT), read(*args))[1]  # type: ignore[assignment]

    def wait(work: Any) -> None:
        nonlocal waited
        waited = True
        store.set("go", "")
        work.wait(LIMIT)

    try:
        shards.gather("a")
        shards.wire.fence(wait)
        store.set("go", "")
    finally:
        if shards.mesh.rank:
            neighbours.Group.read = read  # type: ignore[assignment]
    shards.mesh.close()
    return waited


def test_behind_a_fence_no_other_rank_reads(ranks: Ranks) -> None:
    assert ranks.run(_fence, world_size=2)[0]


class _Writing(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
            self.bias.mul_(0.5)
        return super().forward(input)


def _fences() -> tuple[int, int, list[bool]]:
    """Of one step of a model that writes into its weights: fences at the ends of passes, of single shards, and whether
    each of these had its old values."""
    model = torch.nn.Sequential(*[_Writing(8, 8) for _ in range(4)])
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.0), layout="zero3", init=sf.Init(units=["*"]))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    ends, old, fence = 0, [], NearTransport.fence
    rests: list[Any] = [segment.rest for unit in engine.sharded.units for segment in unit.segments]
    before = {id(rest): rest.clone() for rest in rests}

    def noted(self: Any, waiter: Any, resident: torch.Tensor | None = None) -> None:
        nonlocal ends
        if resident is None:
            ends += 1
        elif id(resident) in before:
            old.append(torch.equal(resident, before[id(resident)]))
        fence(self, waiter, resident)

    NearTransport.fence = noted  # type: ignore[method-assign]
    try:
        for unit in engine.sharded.units:
            unit._fence = partial(noted, engine.sharded.comm.transport, engine.sharded.comm.agreement.wait)
        engine.backward(engine(torch.ones(1, 8)).sum())
    finally:
        NearTransport.fence = fence  # type: ignore[method-assign]
    changed = sum(not torch.equal(rest, before[id(rest)]) for rest in rests)
    engine.close()
    return ends, changed, old


def test_passes_end_with_a_fence_and_shards_written_inside_of_one_have_their_own(ranks: Ranks) -> None:
    for ends, changed, old in ranks.run(_fences, world_size=2):
        assert ends == 2
        assert changed == 4
        assert old == [True] * 4


def _late(mode: Any) -> list[float]:
    """Rank 0 waits for what rank 1 has begun but does not wait for, as it stands in something else."""
    _, wire, group, mesh = _wires()
    found: list[float] = []
    with mode():
        for collective in ("sum", "exchange"):
            tensor = torch.full((600_000,), 1.0 + mesh.rank)
            if collective == "sum":
                pending, out = wire.all_reduce(tensor, group), tensor
            else:
                each = [600_000 // dist.get_world_size()] * dist.get_world_size()
                out = torch.zeros(600_000)
                pending = wire.exchange(tensor, each, out, each, group)
            if mesh.rank == 0:
                pending.wait(_wait)
            dist.barrier()
            pending.wait(_wait)
            found.append(float(out.sum()))
    tensor = torch.full((1000,), 1.0 + mesh.rank)
    wire.all_reduce(tensor, group).wait(_wait)  # through the room that was made in that mode
    mesh.close()
    return [*found, float(tensor.sum())]


@pytest.mark.parametrize(("mode", "world_size"), [(torch.no_grad, 2), (torch.inference_mode, 3)])
def test_a_rank_goes_on_with_what_it_began_while_it_stands_elsewhere(ranks: Ranks, mode: Any, world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    want = [600_000 * total, 600_000 / world_size * total, 1_000 * total]
    assert ranks.run(_late, mode, world_size=world_size) == [want] * world_size


def _fails_once() -> bool:
    """A sum in place that fails behind its first block on rank 0, on the thread that goes on while rank 1 waits."""
    _, wire, group, mesh = _wires()
    tensor, summed = torch.full((200_000,), 1.0 + mesh.rank), wire._adder.sum
    failed = threading.Event()

    def fail(near: Any, number: int, full: torch.Tensor, start: int, out: torch.Tensor, add: bool) -> None:
        summed(near, number, full, start, out, add)
        if not failed.is_set():
            failed.set()
            raise MemoryError("no room for the next block")

    if mesh.rank == 0:
        wire._adder.sum = fail
    pending = wire.all_reduce(tensor, group)
    if mesh.rank == 0:
        assert failed.wait(LIMIT.total_seconds())
        with pytest.raises(MemoryError, match="no room for the next"):
            pending.wait(_wait)
    else:
        with pytest.raises(RuntimeError, match="timed out"):
            pending.wait(lambda work: work.wait(timedelta(seconds=1)))
    dist.barrier()
    mesh.close()
    return torch.equal(tensor.sort().values.unique(), torch.tensor([1.0 + mesh.rank, 3.0]))


def test_a_sum_that_failed_half_way_is_not_done_again(ranks: Ranks) -> None:
    assert ranks.run(_fails_once, world_size=2) == [True, True]


def _losses(off: tuple[int, ...], layout: str, precision: str) -> tuple[list[float], bool]:
    """Of a few steps on batches of this rank's own; ``off``: ranks on which the wire is switched off."""
    if dist.get_rank() in off:
        os.environ["SHARDFOLD_NEAR"] = "0"
    try:
        mesh = {"inter": 2, "intra": 2} if layout in ("hsdp", "hpz") else None
        torch.manual_seed(0)
        adamw = partial(torch.optim.AdamW, lr=1e-2)
        engine = sf.Engine(
            models.small(), optimizer=adamw, layout=layout, precision=precision, parallel=mesh, accumulate=2
        )
    finally:
        os.environ.pop("SHARDFOLD_NEAR", None)
    wire: Any = engine.sharded.comm.transport
    used = wire.near(engine.mesh.everyone)
    losses: list[float] = []
    for batch in models.batches(6):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.close()
    return losses, used


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "fsdp2", "hsdp", "hpz"])
def test_training_is_the_same_to_the_bit_over_either_wire(ranks: Ranks, layout: str) -> None:
    """In bf16; where all-reduces send gradients, which Gloo adds in a dtype of its own if they are in bf16, in fp32: of
    two ranks' numbers there is one sum."""
    precision = "fp32" if layout in ("ddp", "hsdp") else "bf16"
    world = 4 if layout in ("hsdp", "hpz") else 2
    read = ranks.run(_losses, (), layout, precision, world_size=world)
    sent = ranks.run(_losses, (1,), layout, precision, world_size=world)
    assert [used for _, used in read] == [True] * world
    assert [used for _, used in sent] == [False] * world, "one rank that cannot be read sends its group to Gloo"
    assert [losses for losses, _ in read] == [losses for losses, _ in sent]
    assert len({tuple(losses) for losses, _ in read}) == world  # or wrong sums would look like right ones


def _until_ended(process: str) -> None:
    stat = Path(f"/proc/{process}/stat")
    with suppress(OSError):  # it is gone
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            pass


def _leaves(how: str, folder: str) -> str:
    """Rank 1 leaves in the first unit of a forward, in which rank 0 is."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    engine = sf.Engine(model, layout="zero3", init=sf.Init(units=["*"]))
    process = _exchange("process", str(os.getpid()))[1]

    def leave(*_: Any) -> None:
        if engine.rank == 0:
            if how == "end":
                _until_ended(process)
        elif how == "end":
            os._exit(3)
        else:
            raise LookupError

    with torch.no_grad():
        for _ in range(2):
            engine(torch.ones(1, 8))
        model[0].register_forward_hook(leave)
        try:
            engine(torch.ones(1, 8))
        except LookupError:
            engine.close()
            return ""
        except CollectiveError as error:
            Path(folder, "said").write_text(str(error))
            return str(error)
    return "nothing was raised"


def test_a_rank_that_closes_its_engine_inside_of_a_pass_is_named(ranks: Ranks, tmp_path: Path) -> None:
    said, _ = ranks.run(_leaves, "close", str(tmp_path), world_size=2, timeout=60)
    assert "rank 1 has closed its engine" in said


def test_a_rank_that_ends_inside_of_a_pass_raises_the_same_as_over_gloo(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        ranks.run(_leaves, "end", str(tmp_path), world_size=2, timeout=60)
    assert "another rank has probably died" in (tmp_path / "said").read_text()


def _ends_after(folder: str, reads: bool) -> None:
    """Rank 1 reads what is resident or does not, and its process ends before rank 0 looks whether it has."""
    _, wire, group, mesh = _wires()
    full = torch.full((2 * 1000,), float(mesh.rank))
    resident = full.chunk(2)[mesh.rank].clone()
    process = _exchange("process", str(os.getpid()))[1]
    pending = wire.all_gather(full, group, resident=resident)
    if reads or mesh.rank == 0:
        pending.wait(_wait)
    dist.barrier()
    if mesh.rank == 1:
        os._exit(0)
    _until_ended(process)
    wire.fence(_wait)
    Path(folder, "sum").write_text(str(full.sum().item()))


@pytest.mark.parametrize("reads", [True, False])
def test_a_rank_that_has_ended_reads_no_more(ranks: Ranks, tmp_path: Path, reads: bool) -> None:
    with pytest.raises(RanksFailed):
        ranks.run(_ends_after, str(tmp_path), reads, world_size=2, timeout=60)
    assert (tmp_path / "sum").read_text() == "1000.0"


def _forked() -> list[float]:
    """A child that lets go of what its parent made says nothing to the others."""
    _, wire, group, mesh = _wires()
    child = os.fork()
    if not child:
        wire.close()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    tensor = torch.full((10,), 1.0 + mesh.rank)
    if mesh.rank == 0:
        wire.all_reduce(tensor, group).wait(_wait)
        dist.barrier()
    else:
        pending = wire.all_reduce(tensor, group)
        dist.barrier()  # rank 0 has waited for longer than until its first look
        pending.wait(_wait)
    mesh.close()
    return tensor.tolist()


def test_a_fork_does_not_close_what_its_parent_made(ranks: Ranks) -> None:
    assert ranks.run(_forked, world_size=2) == [[3.0] * 10] * 2


def _ends() -> None:
    _, wire, group, mesh = _wires()
    if mesh.rank == 1:
        os._exit(3)
    full = torch.zeros(1000)
    wire.all_gather(full, group).wait(_wait)


def test_a_rank_that_has_ended_is_told_of(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="a rank on this host, has ended"):
        ranks.run(_ends, world_size=2, timeout=60)
