"""``destroy_process_group()`` ends the threads of engines that nobody closed, and does not return before; groups begin
on all ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import shardfold as sf
from shardfold.comm.polling import come
from shardfold.testing import Ranks
from tests.support import models


def of_engines() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name in ("shardfold-watch", "shardfold-near")}


def _trained() -> tuple[set[str], set[str]]:
    """The threads before and behind the end of the group; the engine is closed behind that, which does no harm."""
    engine = sf.Engine(models.tied(), optimizer=SGD, layout="zero3")
    before = of_engines()
    dist.destroy_process_group()
    behind = of_engines()
    engine.close()
    return before, behind


def _ends() -> tuple[list[set[str]], bool]:
    rank, port = dist.get_rank(), [0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port[0] = store.port if store is not None else 0
    dist.broadcast_object_list(port)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
    seen = [*_trained()]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)  # as a process may join another
    seen += _trained()
    marks = dist.distributed_c10d._world.pg_coalesce_state  # pyright: ignore[reportPrivateUsage]
    return seen, bool(marks)


def test_threads_end_with_the_process_group(ranks: Ranks) -> None:
    for seen, marks in ranks.run(_ends, world_size=2):
        assert "shardfold-watch" in seen[0] and seen[2] == seen[0]
        assert seen[1] == seen[3] == set() and not marks


def _closed() -> tuple[set[str], bool]:
    for _ in range(3):
        sf.Engine(models.tied(), optimizer=SGD, layout="zero1").close()
    return of_engines(), bool(dist.distributed_c10d._world.pg_coalesce_state)  # pyright: ignore[reportPrivateUsage]


def test_engines_that_are_closed_leave_nothing_in_the_group(ranks: Ranks) -> None:
    for left, marks in ranks.run(_closed, world_size=2):
        assert not left and not marks


def _while_another_connects() -> list[bool]:
    """Whether rank 0 has a group of its own while rank 1 still makes it."""
    engine = sf.Engine(nn.Linear(4, 4), optimizer=SGD, layout="zero3")
    mesh, make, seen = engine.sharded.comm.mesh, dist.new_group, list[bool]()

    def looked(*given: Any, **options: Any) -> Any:
        group = make(*given, **options)
        seen.append(come(mesh.asked, ["went on"], 0.5))
        return group

    if engine.rank == 1:
        dist.new_group = looked
    try:
        mesh.host_group("intra")
        if engine.rank == 0:
            mesh.asked.set("went on", "1")
    finally:
        dist.new_group = make
    engine.close()
    return seen


def test_no_rank_has_a_group_before_all_have_it(ranks: Ranks) -> None:
    """It might give the group back at once, and cut off who still connects."""
    assert ranks.run(_while_another_connects, world_size=2) == [[], [False]]
