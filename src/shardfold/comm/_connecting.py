"""Connections between the ranks of groups, each of which belongs to one group and two of its ranks.

Each rank listens at an address that the others find in the store that all of them share, and connects to those of
smaller numbers. Who connects says the word that stands there beside the address, so that nobody else is taken for a
rank. The address is that of the interface that ``GLOO_SOCKET_IFNAME`` names, or of this host's name, as Gloo's is.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from shardfold.comm._connection import Connection
from shardfold.comm.cores import allowed, machine, share

__all__ = ["Connected", "connect"]

LIMIT = 20.0
"""Seconds until connections that are not made are given up: Gloo carries what they would have."""
HELLO = struct.Struct("<16sII")
WELCOME = b"+"
SIOCGIFADDR = 0x8915

Group = tuple[int, Sequence[int]]
"""This rank's place in a group, and its ranks."""
Found = dict[tuple[int, int], socket.socket]
"""By number of the group and rank."""


class Connected(NamedTuple):
    """
    Attributes:
        groups: by place in a group the connection to that rank; None in place of groups that have none.
        hosts: by rank, what tells hosts apart.
        cores: how many this rank has to itself.
        everywhere: whether all groups of all ranks have them.
    """

    groups: list[dict[int, Connection] | None]
    hosts: list[str]
    cores: float
    everywhere: bool


def connect(groups: Sequence[Group], rank: int, exchange: Callable[[str, str], list[str]]) -> Connected:
    """Connects the ranks of these groups. All ranks call it, with as many groups, of which the same are empty for all
    their ranks.

    Args:
        groups: of this rank; None of them is needed where it has fewer than two ranks.
        rank: this one.
        exchange: ``exchange(key, text)`` gives every rank's text.
    """
    token, listener = secrets.token_bytes(16), _listener(sum(len(ranks) for _, ranks in groups))
    mine: dict[str, Any] = {"host": _host(), "machine": machine(), "cores": allowed()}
    if listener is not None:
        mine |= {"address": listener.getsockname()[:2], "token": token.hex()}
    said = [json.loads(text) for text in exchange("sockets/addresses", json.dumps(mine))]
    found: Found = {}
    if listener is not None and all("address" in each for each in said):
        with listener, suppress(OSError):
            deadline = monotonic() + LIMIT
            _call(groups, rank, said, found, deadline)
            _answer(listener, token, _expected(groups, rank), found, deadline)
    whole = [all((i, r) in found for r in ranks if r != rank) for i, (_, ranks) in enumerate(groups)]
    heard = [json.loads(text) for text in exchange("sockets/made", json.dumps(whole))]
    made: list[dict[int, Connection] | None] = []
    for i, (_, ranks) in enumerate(groups):
        if len(ranks) > 1 and all(heard[r][i] for r in ranks):
            made.append({place: Connection(found.pop((i, r)), r) for place, r in enumerate(ranks) if r != rank})
        else:
            made.append(None)
    for sock in found.values():
        sock.close()
    users = [each["cores"] for each in said if each["machine"] == mine["machine"]]
    return Connected(made, [each["host"] for each in said], share(mine["cores"], users), all(map(all, heard)))


def _expected(groups: Sequence[Group], rank: int) -> set[tuple[int, int]]:
    """Who connects to this rank."""
    return {(i, other) for i, (_, ranks) in enumerate(groups) for other in ranks if other > rank}


def _call(groups: Sequence[Group], rank: int, said: Sequence[Mapping[str, Any]], found: Found, deadline: float) -> None:
    """Connects to the ranks that wait for it."""
    for i, (_, ranks) in enumerate(groups):
        for other in (r for r in ranks if r < rank):
            sock = socket.create_connection(tuple(said[other]["address"]), max(deadline - monotonic(), 0.1))
            found[i, other] = sock
            sock.sendall(HELLO.pack(bytes.fromhex(said[other]["token"]), i, rank))
    for (_, other), sock in list(found.items()):
        if sock.recv(1) != WELCOME:
            raise OSError(f"rank {other} is not there")


def _answer(
    listener: socket.socket, token: bytes, expected: set[tuple[int, int]], found: Found, deadline: float
) -> None:
    """Takes the connections of those that are expected, and of nobody else."""
    while expected and (left := deadline - monotonic()) > 0:
        listener.settimeout(left)
        sock, _ = listener.accept()
        sock.settimeout(left)
        with suppress(OSError):
            said, number, other = HELLO.unpack(_read(sock, HELLO.size))
            if secrets.compare_digest(said, token) and (number, other) in expected:
                sock.sendall(WELCOME)
                expected.discard((number, other))
                found[number, other] = sock
                continue
        sock.close()


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := sock.recv(size - len(data))):
            raise OSError("closed")
        data += more
    return data


def _host() -> str:
    """What ranks of one host, or of one container, have in common."""
    with suppress(OSError):
        return f"{machine()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def _listener(backlog: int) -> socket.socket | None:
    """Where others connect to this rank; None: there is no such address."""
    for family, address in _addresses():
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.bind((address, 0))
            sock.listen(backlog)
        except OSError:
            sock.close()
        else:
            return sock
    return None


def _addresses() -> list[tuple[socket.AddressFamily, str]]:
    """Of this rank, the first that it can be reached at first."""
    if os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") != "TCP":
        return []  # encrypted, or of another kind, which these connections are not
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        address = _address_of(name)
        return [(socket.AF_INET, address)] if address else []
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [(family, str(where[0])) for family, _, _, _, where in found]
    return [(socket.AF_INET, "127.0.0.1")]


def _address_of(interface: str) -> str:
    """Its IPv4 address; empty: it has none, or this system does not say."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        told = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(told[20:24])
    return ""
