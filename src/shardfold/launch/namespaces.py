"""Nodes on this machine: network namespaces, each with one interface, whose other end is in a bridge.

Both ends of an interface may have a token bucket (``tbf``), which limits what goes in each direction. With a delay the
interfaces are ends of a road on which each packet takes that long (see ``_slow_road``). It needs Linux, root
(``CAP_NET_ADMIN`` and ``CAP_SYS_ADMIN``), ``ip`` and ``tc``; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from typing import Any, NoReturn

from shardfold.errors import ConfigError, UsageError
from shardfold.launch._slow_road import PACKET, SlowRoad

__all__ = ["INTERFACE", "Namespaces", "check_rate", "why_not"]

INTERFACE = "eth0"
BURST, LIMIT = "256kb", "16mb"
"""Of the token bucket: what may go at once, and what may wait. It drops nothing that TCP has under way, which would
stall it for hundreds of milliseconds."""
MOST = 10.0
"""Seconds of the longest delay."""
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


class Namespaces:
    """``nodes`` of them, until :meth:`close`, or the end of the process: a SIGTERM that nobody else handles raises
    SystemExit as long as they are there, as it would else end the process and leave them.

    Args:
        nodes: how many.
        rate: of each node's link in each direction, as ``tc`` reads it: ``"200mbit"``; None: unthrottled.
        delay: seconds that each packet takes from one node to another.

    Attributes:
        spaces: their names, for ``ip netns exec``.

    Raises:
        ConfigError: the rate is none.
        UsageError: this machine cannot; see :func:`why_not`.
    """

    def __init__(self, nodes: int, rate: str | None = None, delay: float = 0.0) -> None:
        check_rate(rate)
        if not 0 <= delay <= MOST:
            raise ConfigError(f"delay={delay!r}: it is seconds, from 0 to {MOST:g}.")
        if reason := why_not():
            raise UsageError(f"{reason}.")
        self.nodes = nodes
        self._base = f"sf{os.getpid()}-{next(_NUMBERS)}"
        self.spaces = [f"{self._base}-{number}" for number in range(nodes)]
        self._remove = weakref.finalize(self, _remove, [*self.spaces, f"{self._base}-hub"])
        self._before = _leave_at_sigterm()
        self._road: SlowRoad | None = None
        try:
            self._make(delay)
            self.limit(rate)
        except BaseException:
            self.close()
            raise

    def _make(self, delay: float) -> None:
        if delay:
            self._make_road(delay)
            return
        hub = f"{self._base}-hub"
        _do(f"ip netns add {hub}", f"ip -n {hub} link add bridge type bridge", f"ip -n {hub} link set bridge up")
        for number, space in enumerate(self.spaces):
            end = f"node{number}"
            _do(
                f"ip netns add {space}",
                f"ip link add name {INTERFACE} netns {space} type veth peer name {end} netns {hub}",
                f"ip -n {hub} link set {end} master bridge up",
                f"ip -n {space} addr add {self.address(number)}/16 dev {INTERFACE}",
                f"ip -n {space} link set {INTERFACE} up",
                f"ip -n {space} link set lo up",
            )

    def _make_road(self, delay: float) -> None:
        for space in self.spaces:
            _do(f"ip netns add {space}", f"ip -n {space} link set lo up")
        addresses = [self.address(number) for number in range(self.nodes)]
        try:
            self._road = SlowRoad(self.spaces, INTERFACE, addresses, delay)
        except OSError as error:
            raise UsageError(
                f"a link with a delay needs tunnels, which this machine does not make: {error}."
            ) from error
        for space, address in zip(self.spaces, addresses, strict=True):
            _do(
                f"ip -n {space} addr add {address}/16 dev {INTERFACE}",
                f"ip -n {space} link set {INTERFACE} mtu {PACKET} up",
            )

    def limit(self, rate: str | None, node: int | None = None) -> None:
        """From now on each link, or that of one node, carries that much, in each direction.

        Raises:
            ConfigError: it is no rate.
        """
        check_rate(rate)
        for space, end in self._ends(range(self.nodes) if node is None else (node,)):
            if rate is None:
                command = ["ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", end, "root"]
                subprocess.run(command, capture_output=True, check=False)  # there may be none
            else:
                _do(f"tc -n {space} qdisc replace dev {end} root tbf rate {rate} burst {BURST} limit {LIMIT}")

    def _ends(self, nodes: Iterable[int]) -> list[tuple[str, str]]:
        ends = [(self.spaces[number], INTERFACE) for number in nodes]
        if self._road is not None:
            return ends
        return ends + [(f"{self._base}-hub", f"node{number}") for number in nodes]

    def cut(self, node: int) -> None:
        """Nothing comes to a node or from it until :meth:`heal`; connections stay, and what was sent is sent again."""
        if self._road is not None:
            self._road.cut(self.address(node))
        else:
            _do(f"ip -n {self._base}-hub link set node{node} down")

    def heal(self, node: int) -> None:
        """What :meth:`cut` was."""
        if self._road is not None:
            self._road.heal(self.address(node))
        else:
            _do(f"ip -n {self._base}-hub link set node{node} up")

    def part(self, away: Collection[int]) -> None:
        """These nodes reach each other and none of the rest, until :meth:`rejoin`.

        Raises:
            UsageError: the links have a delay, so there is no bridge to take nodes from.
        """
        if self._road is not None:
            raise UsageError("nodes whose links have a delay cannot be parted: cut them off one by one.")
        hub = f"{self._base}-hub"
        _do(f"ip -n {hub} link add aside type bridge", f"ip -n {hub} link set aside up")
        _do(*(f"ip -n {hub} link set node{node} master aside" for node in sorted(away)))

    def rejoin(self, away: Collection[int]) -> None:
        """What :meth:`part` parted."""
        hub = f"{self._base}-hub"
        _do(*(f"ip -n {hub} link set node{node} master bridge" for node in sorted(away)), f"ip -n {hub} link del aside")

    @staticmethod
    def address(node: int) -> str:
        """Of a node."""
        return f"10.99.0.{node + 1}"

    def close(self) -> None:
        """Nodes and links are no more."""
        self._remove()
        if self._road is not None:
            self._road.close()
            self._road = None
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def _remove(spaces: Sequence[str]) -> None:
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _leave_at_sigterm() -> Any:
    """A SIGTERM raises SystemExit from now on; what handled it before, or None: it stays as it was."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None
    return signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one would end what the first one has begun
    raise SystemExit(128 + number)


def check_rate(rate: str | None) -> None:
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
