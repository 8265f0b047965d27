"""A rank's share of its machine's cores."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch

import shardfold as sf
from shardfold.comm.cores import share_of_cores
from shardfold.testing import Ranks
from tests.support import models


@pytest.mark.parametrize(
    ("masks", "shares"),
    [
        ([("a", range(8))], [8]),
        ([("a", range(8))] * 2, [4, 4]),  # nobody is bound: equal parts
        ([("a", range(4)), ("a", range(4, 8))], [4, 4]),  # each is bound to cores of its own, and has them all
        ([("a", range(8)), ("b", range(8))], [8, 8]),  # cores of two machines have the same numbers
        ([("a", range(8)), ("a", range(2))], [7, 1]),
        ([("a", range(4))] * 3, [1, 1, 1]),  # rounded down, so that no core has two
        ([("a", range(1))] * 4, [1, 1, 1, 1]),  # and never nothing
        ([("a", range(49))] * 49, [1] * 49),
    ],
)
def test_a_core_that_several_ranks_may_run_on_is_shared(
    monkeypatch: pytest.MonkeyPatch, masks: list[tuple[str, range]], shares: list[int]
) -> None:
    """A rank's share is the sum over its cores of one over the ranks of that machine that may run on each, rounded
    down, and at least one."""
    texts = [json.dumps([machine, list(cores)]) for machine, cores in masks]
    for (machine, cores), share in zip(masks, shares, strict=True):
        monkeypatch.setattr("shardfold.comm.cores.machine", lambda machine=machine: machine)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(cores))
        assert max(1, int(share_of_cores(lambda key, text: texts))) == share


def _threads() -> tuple[int, int, str | None]:
    engine = sf.Engine(models.small(), optimizer=partial(torch.optim.AdamW, lr=1e-3), layout="zero1")
    assert engine._updater is not None
    count = engine._updater._threads.count
    engine.close()
    return count, len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")


def test_ranks_share_the_cores_that_they_may_all_run_on(ranks: Ranks) -> None:
    """Two ranks of one machine update with half of its cores each, though ``OMP_NUM_THREADS`` is 1."""
    for count, cores, told in ranks.run(_threads, world_size=2):
        assert told == "1" and count == max(1, cores // 2)
