"""Nodes on this machine, with links between them that are really slow, counted and cut.

    with Links(nodes=2, ranks=2, rate="100mbit") as links:       # 4 ranks; 0 and 1 are on node 0
        results = links.run(function, *args)                     # on every rank, as with ``run_ranks``
        links.limit("1gbit")                                     # from now on; None: as fast as it goes
        links.cut(1)                                             # node 1 hears nothing ...
        links.heal(1)                                            # ... until now

A node is a network namespace with one interface, ``eth0``, whose other end is in a bridge. Between ranks of a node
traffic goes over the namespace's own ``lo`` (or their memory), unthrottled and uncounted; between nodes every byte
passes ``eth0``, both ends of which a token bucket (``tbf``) limits. ``sent()``, called on a rank, is what its node's
interface has sent so far: payload and the headers of Ethernet, IP and TCP, and acknowledgements.

It needs Linux, root (``CAP_NET_ADMIN`` and ``CAP_SYS_ADMIN``), ``ip`` and ``tc``; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardfold.errors import ConfigError, UsageError
from shardfold.testing.ranks import Ranks

__all__ = ["Links", "sent", "why_not"]

INTERFACE = "eth0"
BURST, LIMIT = "256kb", "16mb"
"""Of the token bucket: what may go at once, and what may wait. It drops nothing that TCP has under way, which would
stall it for hundreds of milliseconds."""
NEWNET = 0x40000000
_NUMBERS = count()


def why_not() -> str:
    """What is missing here to make links; empty: nothing."""
    if sys.platform != "linux":
        return f"links between nodes are network namespaces, which {sys.platform} does not have: use Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"links between nodes need the command {tool!r} of iproute2, which is not installed"
    name = f"sf-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"links between nodes need root, or CAP_NET_ADMIN and CAP_SYS_ADMIN ({made.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


def sent() -> int:
    """Bytes that the node of this rank has sent to others, headers included."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.strip().startswith(INTERFACE))
    return int(line.split(":")[1].split()[8])


class Links:
    """``nodes`` with ``ranks`` processes each. Ranks are kept between calls, and end with it.

    Args:
        nodes: how many.
        ranks: of each node.
        rate: of each node's link in each direction, as ``tc`` reads it: ``"200mbit"``; None: unthrottled.

    Raises:
        ConfigError: the rate is none.
        UsageError: this machine cannot; see :func:`why_not`.
    """

    def __init__(self, nodes: int = 2, ranks: int = 2, rate: str | None = None) -> None:
        _check(rate)
        if reason := why_not():
            raise UsageError(f"{reason}.")
        self.nodes, self.ranks = nodes, ranks
        self._base = f"sf{os.getpid()}-{next(_NUMBERS)}"
        self._spaces = [f"{self._base}-{number}" for number in range(nodes)]
        self._folder = Path(tempfile.mkdtemp(prefix="shardfold-links-"))
        self._calls = 0
        self._pool: Ranks | None = None
        try:
            self._make()
            self.limit(rate)
            self._pool = Ranks(nodes * ranks)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        hub = f"{self._base}-hub"
        _do(f"ip netns add {hub}", f"ip -n {hub} link add bridge type bridge", f"ip -n {hub} link set bridge up")
        for number, space in enumerate(self._spaces):
            end = f"node{number}"
            _do(
                f"ip netns add {space}",
                f"ip link add name {INTERFACE} netns {space} type veth peer name {end} netns {hub}",
                f"ip -n {hub} link set {end} master bridge up",
                f"ip -n {space} addr add 10.99.0.{number + 1}/16 dev {INTERFACE}",
                f"ip -n {space} link set {INTERFACE} up",
                f"ip -n {space} link set lo up",
            )

    def limit(self, rate: str | None) -> None:
        """From now on each link carries that much, in each direction.

        Raises:
            ConfigError: it is no rate.
        """
        _check(rate)
        for space, end in self._ends():
            if rate is None:
                command = ["ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", end, "root"]
                subprocess.run(command, capture_output=True, check=False)  # there may be none
            else:
                _do(f"tc -n {space} qdisc replace dev {end} root tbf rate {rate} burst {BURST} limit {LIMIT}")

    def _ends(self) -> list[tuple[str, str]]:
        ends = [(space, INTERFACE) for space in self._spaces]
        return ends + [(f"{self._base}-hub", f"node{number}") for number in range(self.nodes)]

    def cut(self, node: int) -> None:
        """Nothing comes to a node or from it until :meth:`heal`; connections stay, and what was sent is sent again."""
        _do(f"ip -n {self._base}-hub link set node{node} down")

    def heal(self, node: int) -> None:
        """What :meth:`cut` was."""
        _do(f"ip -n {self._base}-hub link set node{node} up")

    @property
    def pids(self) -> list[int]:
        """The processes of ranks, by rank."""
        assert self._pool is not None
        return self._pool.pids

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """``fn(*args, **kwargs)`` on every rank, in a group of all; by rank what it returns. See :meth:`Ranks.run`."""
        assert self._pool is not None
        self._calls += 1
        store = str(self._folder / f"store-{self._calls}")
        return self._pool.run(
            _on_node, tuple(self._spaces), self.ranks, store, timeout + 60, fn, args, kwargs, timeout=timeout,
            distributed=False,
        )  # fmt: skip

    def close(self) -> None:
        """Ends the ranks, and removes nodes and links."""
        if self._pool is not None:
            self._pool.close()
        for space in (*self._spaces, f"{self._base}-hub"):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
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
        GLOO_SOCKET_IFNAME=INTERFACE, LOCAL_RANK=str(rank % ranks), LOCAL_WORLD_SIZE=str(ranks),
    )  # fmt: skip
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


def _check(rate: str | None) -> None:
    if rate is not None and not (isinstance(rate, str) and re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", rate)):
        raise ConfigError(f"rate={rate!r}: it is what tc reads, as '200mbit' or '1gbit', or None.")


def _do(*commands: str) -> None:
    """
    Raises:
        UsageError: one of them fails.
    """
    for command in commands:
        made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if made.returncode:
            raise UsageError(f"`{command}` failed: {made.stderr.strip()}.")
