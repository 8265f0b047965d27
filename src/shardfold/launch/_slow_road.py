"""A road between nodes on which everything takes a while: what one node sends comes to another so much later.

Linux has a queue for that (``netem``), which many kernels are built without. So each node's interface is a tunnel,
whose packets this process reads, keeps, and gives to the node that they are for. A packet is as long as TCP makes it,
up to 64 KiB, so a road takes some hundred MB/s; its order is kept, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

__all__ = ["SlowRoad"]

TUNSETIFF, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000
NEWNET = 0x40000000
PACKET = 65535
"""Bytes of the longest packet, and of the interfaces."""


class SlowRoad:
    """
    Args:
        spaces: network namespaces of the nodes.
        interface: the name of each one's end.
        addresses: of each, as ``10.99.0.1``.
        seconds: that a packet takes.
    """

    def __init__(self, spaces: Sequence[str], interface: str, addresses: Sequence[str], seconds: float) -> None:
        self._seconds = seconds
        self._cut: set[bytes] = set()
        self._ends = [_tunnel(space, interface) for space in spaces]
        self._to = {_packed(each): end for each, end in zip(addresses, self._ends, strict=True)}
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="shardfold-road", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        on_the_way: deque[tuple[float, int, bytes]] = deque()
        while True:
            left = max(0.0, on_the_way[0][0] - monotonic()) if on_the_way else None
            for file in select.select([*self._ends, self._stop], [], [], left)[0]:  # poll() counts in milliseconds
                if file == self._stop:
                    return
                with suppress(BlockingIOError):
                    while True:
                        packet = os.read(file, PACKET)
                        by, to = packet[12:16], packet[16:20]
                        # IPv4, and for another node.
                        if packet[0] >> 4 == 4 and to in self._to and not {by, to} & self._cut:
                            on_the_way.append((monotonic() + self._seconds, self._to[to], packet))
            now = monotonic()
            while on_the_way and on_the_way[0][0] <= now:
                _, end, packet = on_the_way.popleft()
                with suppress(OSError):  # that node is gone, or is cut off
                    os.write(end, packet)

    def cut(self, address: str) -> None:
        """Nothing is taken from that node, or for it, until :meth:`heal`."""
        self._cut.add(_packed(address))

    def heal(self, address: str) -> None:
        """What :meth:`cut` was."""
        self._cut.discard(_packed(address))

    def close(self) -> None:
        """Nothing comes any more; whoever removes the nodes' ends removes their namespaces first."""
        with suppress(OSError):
            os.write(self._stopped, b"!")
        self._thread.join()
        for file in (*self._ends, self._stop, self._stopped):
            os.close(file)
        self._ends = []


def _packed(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def _tunnel(space: str, name: str) -> int:
    """An interface of that name in a network namespace; the file of what it sends and receives."""
    found: list[int] = []
    problem: list[OSError] = []

    def make() -> None:
        try:
            with open(f"/run/netns/{space}", encoding="ascii") as there:
                if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, f"{os.strerror(number)}: entering {space}")
            # Where it is opened its interface will be.
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            found.append(file)
            fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN | NO_HEADER))
        except OSError as error:
            problem.append(error)

    thread = threading.Thread(target=make)  # its own network namespace is another from then on
    thread.start()
    thread.join()
    if problem:
        for file in found:
            os.close(file)
        raise problem[0]
    return found[0]
