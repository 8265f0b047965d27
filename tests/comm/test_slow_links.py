"""Of hosts (network namespaces) that one is found whose link is slow, and none where it is no single one."""

from __future__ import annotations

import ctypes
import socket
import subprocess
from functools import partial

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.comm.links import host_of_slow_link
from shardfold.testing.links import Links, why_not
from tests.chaos.warm import CLONE_NEWUTS

REASON = why_not()
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(REASON), reason=REASON)]


def whose(ranks: int) -> str:
    """Whose link is slow."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = sf.Engine(nn.Linear(4, 4), optimizer=sgd, layout="ddp")  # pyright: ignore[reportArgumentType]
    assert not ctypes.CDLL(None).unshare(CLONE_NEWUTS)
    socket.sethostname(f"n{engine.rank // ranks}")
    found = host_of_slow_link(engine.sharded.comm.agreement)
    engine.close()
    return found


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (4, 2)])
def test_the_host_whose_link_is_slow_is_found(nodes: int, ranks: int) -> None:
    """Each host in turn, in both directions or what it sends only; not where two are slow, or all, or there are two."""
    with Links(nodes, ranks, "400mbit") as links:

        def found() -> str:
            (one,) = set(links.run(whose, ranks))
            return one

        assert not found()
        for node in range(nodes):
            links.limit("40mbit", node)
            assert found() == (f"n{node}" if nodes > 2 else "")
            links.limit("400mbit", node)
        one = ["tc", "-n", links.spaces[1], "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        subprocess.run([*one, "rate", "40mbit", "burst", "256kb", "limit", "16mb"], check=True)
        assert found() == ("n1" if nodes > 2 else "")
        links.limit("40mbit", nodes - 1)
        links.limit("40mbit", 0)
        links.limit("400mbit", 1)
        assert not found()
        links.limit("40mbit")
        assert not found()
