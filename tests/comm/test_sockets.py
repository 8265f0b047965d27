"""The socket wire gives bit for bit what Gloo gives, depends on no rank's timing, says who is gone, and takes nobody
else for a rank."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.comm._connection import Connection
from shardfold.comm._sockets import SocketTransport
from shardfold.comm.mesh import DataMesh
from shardfold.testing import Ranks, RanksFailed
from tests.support import models
from tests.support.wires import LIMIT, compare, exchange, exchanges, plain, values_of, wait

LARGE = 16 * 2**20  # bytes that no system's buffers take at once
SOON = 20.0  # seconds, of which nobody who is told has to wait for


@contextmanager
def _wired(exchange_by: Callable[[str, str], list[str]] = exchange) -> Iterator[tuple[SocketTransport, DataMesh]]:
    mesh = DataMesh(None, torch.device("cpu"), LIMIT)
    talking = [(mesh.control, list(range(mesh.world)))]
    wire = SocketTransport(plain(), mesh.groups(), talking, mesh.rank, exchange_by)
    try:
        yield wire, mesh
    finally:
        wire.close()
        mesh.close()


def _compared() -> tuple[list[str], bool, str]:
    with _wired() as (wire, mesh):
        return compare(plain(), wire, mesh), exchanges(wire, mesh), wire.kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_is_sent_is_bit_for_bit_what_gloo_brings(ranks: Ranks, world_size: int) -> None:
    assert ranks.run(_compared, world_size=world_size, timeout=120) == [([], True, "sockets")] * world_size


# -- many at once


def _drawn(seed: int) -> list[str]:
    """Collectives of drawn kinds and lengths, all begun before one is waited for, in an order of this rank's own; small
    messages between them."""
    alike, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    wrong: list[str] = []
    with _wired() as (wire, mesh):
        world, me, group = mesh.world, mesh.rank, mesh.everyone
        words: Any = wire.words(mesh.control)
        pending: list[tuple[str, Any, torch.Tensor, torch.Tensor]] = []
        for number in range(25):
            kind, chunk = alike.choice(["gather", "scatter", "sum", "words"]), alike.choice([1, 77, 4096, 150_000])
            values = [values_of(world * chunk, torch.float32, 100 * number + rank) for rank in range(world)]
            mine, total = values[me].clone(), sum(values[1:], values[0].clone())
            if kind == "gather":
                whole = torch.cat([values[rank].chunk(world)[rank] for rank in range(world)])
                pending.append((kind, wire.all_gather(mine, group), mine, whole))
            elif kind == "scatter":
                out = torch.empty(chunk)
                pending.append((kind, wire.reduce_scatter(mine, out, group, add=False), out, total.chunk(world)[me]))
            elif kind == "sum":
                pending.append((kind, wire.all_reduce(mine, group), mine, total))
            else:
                few = torch.tensor([float(number + me), float(-me)], dtype=torch.float64)
                work = words.reduce(few, dist.ReduceOp.MAX)
                expected = torch.tensor([float(number + world - 1), 0.0], dtype=torch.float64)
                pending.append((kind, work, few, expected))
        own.shuffle(pending)
        for kind, each, found, expected in pending:
            each.wait(LIMIT if kind == "words" else wait)
            if not torch.equal(found, expected):
                wrong.append(f"{kind} of {found.numel()}")
    return wrong


@pytest.mark.parametrize(("seed", "world_size"), [(0, 2), (1, 3)])
def test_collectives_under_way_at_once_do_not_mix(ranks: Ranks, seed: int, world_size: int) -> None:
    assert ranks.run(_drawn, seed, world_size=world_size) == [[]] * world_size


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 22))
def test_collectives_under_way_at_once_do_not_mix_whatever_is_drawn(ranks: Ranks, seed: int) -> None:
    world = 2 + seed % 3
    assert ranks.run(_drawn, seed, world_size=world, timeout=240) == [[]] * world


def _stands_elsewhere(kind: str) -> float:
    """Rank 0 waits for what rank 1 has begun and does not wait for: it stands in something of the user's."""
    with _wired() as (wire, mesh):
        tensor = torch.full((mesh.world * LARGE // 4,), 1.0 + mesh.rank)
        if kind == "sum":
            pending = wire.all_reduce(tensor, mesh.everyone)
        else:
            pending = wire.all_gather(tensor, mesh.everyone)
        if mesh.rank == 0:
            pending.wait(wait)
        dist.barrier()
        pending.wait(wait)
        return float(tensor.mean())


@pytest.mark.parametrize(("kind", "result"), [("sum", 3.0), ("gather", 1.5)])
def test_a_rank_goes_on_with_what_it_began_while_it_stands_elsewhere(ranks: Ranks, kind: str, result: float) -> None:
    assert ranks.run(_stands_elsewhere, kind, world_size=2) == [result] * 2


@contextmanager
def _late() -> Iterator[None]:
    """Inside, this rank reads nothing for a while: what another one changes too early comes changed."""
    receive, since = Connection.receive, time.monotonic()
    Connection.receive = lambda self: time.monotonic() - since > 0.5 and receive(self)
    try:
        yield
    finally:
        Connection.receive = receive


def _fenced() -> list[float]:
    """Rank 0 changes what is resident behind a fence, and rank 1 reads late."""
    with _wired() as (wire, mesh), _late() if mesh.rank == 1 else nullcontext():
        shard = torch.full((LARGE // 4,), 1.0 + mesh.rank)
        full = torch.cat([shard] * 2)
        pending = wire.all_gather(full, mesh.everyone, resident=shard)
        pending.wait(wait)
        wire.fence(wait)
        shard.fill_(7.0)
        dist.barrier()
        return [float(each.mean()) for each in full.chunk(2)]


def test_behind_a_fence_what_was_resident_has_gone(ranks: Ranks) -> None:
    assert ranks.run(_fenced, world_size=2) == [[1.0, 2.0]] * 2


# -- who does something else, and who is gone


def _longer() -> str:
    with _wired() as (wire, mesh):
        with pytest.raises(RuntimeError) as raised:
            wire.all_gather(torch.zeros(2 * 1000 * (1 + mesh.rank)), mesh.everyone).wait(wait)
        dist.barrier()
        return str(raised.value)


def test_ranks_that_send_other_lengths_say_so(ranks: Ranks) -> None:
    first, second = ranks.run(_longer, world_size=2)
    assert "rank 1 sent 8000 bytes of its collective 1 where 4000 of collective 1 were expected" in first
    assert "rank 0 sent 4000 bytes of its collective 1 where 8000 of collective 1 were expected" in second


def _killed(folder: str, forks: bool) -> None:
    """Rank 1 is killed in the middle of a collective; a child of its may live on, as one that reads data does."""
    with _wired() as (wire, mesh):
        wire.all_reduce(torch.zeros(10), mesh.everyone).wait(wait)
        if mesh.rank == 0:  # it sends nothing, and nothing of its own is unread there: the end is all that is read
            begun = wire.exchange(torch.zeros(0), [0, 0], torch.zeros(8), [0, 8], mesh.everyone)
        dist.barrier()
        if mesh.rank == 1:
            if forks and not os.fork():
                time.sleep(3 * SOON)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        since = time.monotonic()
        with pytest.raises(RuntimeError, match="closed by rank 1"):
            begun.wait(wait)
        with pytest.raises(RuntimeError, match="closed by rank 1"):
            wire.all_gather(torch.zeros(LARGE), mesh.everyone).wait(wait)
        Path(folder, "said").write_text(str(time.monotonic() - since < SOON))


@pytest.mark.parametrize("forks", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_rank_that_was_killed_is_told_of_at_once(ranks: Ranks, tmp_path: Path, forks: bool) -> None:
    with pytest.raises(RanksFailed):
        ranks.run(_killed, str(tmp_path), forks, world_size=2, timeout=90)
    assert (tmp_path / "said").read_text() == "True"


# -- how connections come about


def _strangers() -> tuple[str, list[float]]:
    """Somebody else connects to rank 0 first, with a word of their own, and says nothing else, or is rank 1."""
    strangers: list[socket.socket] = []

    def told(key: str, text: str) -> list[str]:
        said = exchange(key, text)
        if key == "sockets/addresses" and dist.get_rank() == 1:
            for hello in (b"x" * 24, bytes(16) + (0).to_bytes(4, "little") + (1).to_bytes(4, "little"), b"short"):
                strangers.append(socket.create_connection(tuple(json.loads(said[0])["address"]), 10))
                strangers[-1].sendall(hello)
            strangers[-1].close()
        return said

    with _wired(told) as (wire, mesh):
        tensor = torch.full((4,), 1.0 + mesh.rank)
        wire.all_reduce(tensor, mesh.everyone).wait(wait)
        answered = [b"+" if each.fileno() >= 0 and each.recv(1) == b"+" else b"" for each in strangers]
        for each in strangers:
            each.close()
        return f"{wire.kind} {b''.join(answered)!r}", tensor.tolist()


def test_nobody_else_is_taken_for_a_rank(ranks: Ranks) -> None:
    assert ranks.run(_strangers, world_size=2) == [("sockets b''", [3.0] * 4)] * 2


@contextmanager
def _environment(**names: str) -> Iterator[None]:
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _trained(off: dict[int, dict[str, str]], layout: str) -> tuple[str, list[float]]:
    """Losses of a few steps, and what carried them; ``off``: the environment of ranks when engines are made."""
    torch.manual_seed(0)
    with _environment(SHARDFOLD_NEAR="0", **off.get(dist.get_rank(), {})):
        adamw = partial(torch.optim.AdamW, lr=1e-2)
        engine = sf.Engine(models.small(), optimizer=adamw, layout=layout, clip_norm=1.0)
    losses: list[float] = []
    for batch in models.batches(4):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    kind = engine.sharded.comm.transport.kind
    engine.close()
    return kind, losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
def test_training_is_the_same_to_the_bit_with_and_without(ranks: Ranks, layout: str) -> None:
    """One rank that does without, or whose connections would have to be encrypted, leaves all of them without."""
    with_them = ranks.run(_trained, {}, layout, world_size=2)
    without = ranks.run(_trained, {1: {"SHARDFOLD_SOCKETS": "0"}}, layout, world_size=2)
    other = ranks.run(_trained, {0: {"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}}, layout, world_size=2)
    assert [kind for kind, _ in with_them] == ["sockets"] * 2
    assert [kind for kind, _ in without + other] == ["gloo"] * 4
    assert [losses for _, losses in with_them] == [losses for _, losses in without] == [losses for _, losses in other]


def _waits_at_once() -> list[bool]:
    """Of each reduction of a backward, whether it is waited for before anything else is done."""
    with _environment(SHARDFOLD_NEAR="0"):
        engine = sf.Engine(models.small(), optimizer=torch.optim.SGD, layout="zero2", init=sf.Init(units=["*"]))
    ops = engine.program.last
    engine.close()
    return [behind.verb == "WAIT" for op, behind in pairwise(ops) if op.verb == "REDUCE_SCATTER"]


def test_gradients_go_on_their_way_beside_backward(ranks: Ranks) -> None:
    """A unit's while the next one's are computed; what follows on nothing is waited for."""
    for at_once in ranks.run(_waits_at_once, world_size=2):
        assert len(at_once) > 1 and not any(at_once[:-1])
