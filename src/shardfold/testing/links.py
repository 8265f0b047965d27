"""Nodes on this machine, with links between them that are really slow, counted and cut.

    with Links(nodes=2, ranks=2, rate="100mbit") as links:       # 4 ranks; 0 and 1 are on node 0
        results = links.run(function, *args)                     # on every rank, as with ``run_ranks``
        links.limit("1gbit")                                     # from now on; None: as fast as it goes
        links.cut(1)                                             # node 1 hears nothing ...
        links.heal(1)                                            # ... until now
    far = Links(nodes=2, ranks=1, delay=0.01)                # what one node sends comes to the other 10 ms later

A node is a network namespace with one interface, ``eth0``, whose other end is in a bridge. Between ranks of a node
traffic goes over the namespace's own ``lo`` (or their memory), unthrottled and uncounted; between nodes every byte
passes ``eth0``, both ends of which a token bucket (``tbf``) limits. ``sent()``, called on a rank, is what its node's
interface has sent so far: payload and the headers of Ethernet, IP and TCP, and acknowledgements.

It needs Linux, root (``CAP_NET_ADMIN`` and ``CAP_SYS_ADMIN``), ``ip`` and ``tc``; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardfold.launch.namespaces import INTERFACE, Namespaces, why_not
from shardfold.testing.ranks import Ranks

__all__ = ["Links", "sent", "why_not"]

NEWNET = 0x40000000


def sent() -> int:
    """Bytes that the node of this rank has sent to others, headers included."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.strip().startswith(INTERFACE))
    return int(line.split(":")[1].split()[8])


class Links(Namespaces):
    """``nodes`` with ``ranks`` processes each. Ranks are kept between calls, and end with it.

    Args:
        nodes: how many.
        ranks: of each node.
        rate: of each node's link in each direction, as ``tc`` reads it: ``"200mbit"``; None: unthrottled.
        delay: seconds that each packet takes from one node to another.

    Raises:
        ConfigError: the rate or the delay is none.
        UsageError: this machine cannot; see :func:`why_not`.
    """

    def __init__(self, nodes: int = 2, ranks: int = 2, rate: str | None = None, delay: float = 0.0) -> None:
        self._pool: Ranks | None = None
        self._folder: Path | None = None
        super().__init__(nodes, rate, delay)
        self.ranks, self._calls = ranks, 0
        self._folder = Path(tempfile.mkdtemp(prefix="shardfold-links-"))
        try:
            self._pool = Ranks(nodes * ranks)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes of ranks, by rank."""
        assert self._pool is not None
        return self._pool.pids

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """``fn(*args, **kwargs)`` on every rank, in a group of all; by rank what it returns. See :meth:`Ranks.run`."""
        assert self._pool is not None
        self._calls += 1
        store = f"{self._folder}/store-{self._calls}"
        return self._pool.run(
            _on_node,
            tuple(self.spaces),
            self.ranks,
            store,
            timeout + 60,
            fn,
            args,
            kwargs,
            timeout=timeout,
            distributed=False,
        )

    def close(self) -> None:
        """Ends the ranks, and removes nodes and links."""
        if self._pool is not None:
            self._pool.close()
        super().close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _on_node(
    spaces: tuple[str, ...], ranks: int, store: str, timeout: float, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs ``fn`` in this rank's node."""
    rank, world = int(os.environ["RANK"]), len(spaces) * ranks
    _enter(spaces[rank // ranks])
    os.environ.update(
        GLOO_SOCKET_IFNAME=INTERFACE,
        LOCAL_RANK=str(rank % ranks),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    limit = timedelta(seconds=timeout)
    made = dist.FileStore(store, world)  # pyright: ignore[reportPrivateImportUsage]
    made.set_timeout(limit)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=world, timeout=limit)
    return fn(*args, **kwargs)  # the worker leaves the group when all ranks have answered


def _enter(space: str) -> None:
    """This process's main thread is in a network namespace from now on, and so is what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}", encoding="ascii") as file:
        if libc.setns(file.fileno(), NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: entering {space}")
