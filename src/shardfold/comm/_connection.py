"""One connection to another rank: what goes over it, and what comes, in an order that both ends know.

``[Note: one order]`` Ranks of a group begin its collectives in one order, and a connection belongs to one group. So
what one end sends is in the order in which the other expects it, and nothing has to be kept for later: what comes goes
straight to where it belongs. A part that can be sent only when something else has come (the second half of an
all-reduce) has its place in that order from the beginning, and what is behind it waits. In front of each part are its
number and its length, so that ranks which do not do the same are found, and no byte is taken for another.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

__all__ = ["BLOCK", "Connection", "Delivery", "Incoming", "Outgoing", "as_memory"]

BLOCK = 256 * 1024
"""Bytes that are sent, read and summed at a time: they stay in a core's cache from one to the other."""
WAKING = 128 * 1024
"""Bytes that who waits for more of them than that is woken up for."""
HEAD = struct.Struct("<QQ")
QUIET = getattr(socket, "MSG_NOSIGNAL", 0)


def as_memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU; it has to be kept elsewhere."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Delivery:
    """What is to go and to come of one collective.

    Attributes:
        coming, going: parts that are still to come, and to go.
        failure: why they will not.
        kept: what their memory is of, as long as it is written and read.
    """

    __slots__ = ("coming", "failure", "going", "kept")

    def __init__(self, kept: Any) -> None:
        self.coming = self.going = 0
        self.failure: str | None = None
        self.kept: Any = kept

    def came(self) -> None:
        """One part has come."""
        self.coming -= 1
        self._forget()

    def went(self) -> None:
        """One part has gone."""
        self.going -= 1
        self._forget()

    def add(self, coming: int, going: int) -> None:
        """So many parts more."""
        self.coming += coming
        self.going += going

    def fail(self, why: str | None) -> None:
        """What is left of it neither comes nor goes."""
        self.failure = why

    def _forget(self) -> None:
        if not self.coming and not self.going:
            self.kept = None


class Outgoing:
    """A part that goes to the other rank.

    Args:
        delivery: of which it is one; None: nobody waits until it has gone.
        number: of the collective.
        view: its bytes.
        ready: how many of them may be sent already.
    """

    __slots__ = ("delivery", "head", "ready", "sent", "view")

    def __init__(
        self, delivery: Delivery | None, number: int, view: memoryview | bytes, ready: int | None = None
    ) -> None:
        self.delivery, self.view = delivery, view
        self.head = HEAD.pack(number, len(view))
        self.ready = len(view) if ready is None else ready
        self.sent = 0  # with the head
        if delivery is not None:
            delivery.add(0, 1)

    def release(self, num_bytes: int) -> None:
        """So many may be sent from now on."""
        self.ready = num_bytes

    def count(self, num_bytes: int) -> bool:
        """So many more have been sent; whether these were the last."""
        self.sent += num_bytes
        return self.sent == HEAD.size + len(self.view)


class Landing(Protocol):
    """Where what comes goes."""

    def room(self) -> memoryview | None:
        """For the next bytes; None: there is none yet."""
        ...

    def take(self, count: int) -> None:
        """So many bytes are there."""
        ...


class Straight:
    """What comes is read to where it belongs.

    Args:
        view: where that is.
    """

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def room(self) -> memoryview:
        return self._view[self._at :]

    def take(self, count: int) -> None:
        self._at += count


class Incoming:
    """A part that comes from the other rank.

    Args:
        delivery: of which it is one.
        number: of the collective.
        size: bytes.
        place: where they go.
    """

    __slots__ = ("delivery", "expected", "got", "head", "number", "place", "size")

    def __init__(self, delivery: Delivery, number: int, size: int, place: Landing | memoryview) -> None:
        self.delivery, self.number, self.size = delivery, number, size
        self.place: Landing = Straight(place) if isinstance(place, memoryview) else place
        self.head = memoryview(bytearray(HEAD.size))
        self.expected = HEAD.pack(number, size)
        self.got = 0  # with the head
        delivery.add(1, 0)

    def count(self, num_bytes: int) -> bool:
        """So many more have come; whether these were the last."""
        self.got += num_bytes
        return self.got == HEAD.size + self.size


class Connection:
    """To one other rank of a group.

    Args:
        sock: connected.
        other: number of that rank in the job, for messages.

    Attributes:
        sock: its socket.
        out, into: parts that go and come, in their order.
        failure: why nothing comes any more.
        cut: why nothing goes any more.
        is_full: whether the system takes no more bytes of what is ready to be sent.
    """

    __slots__ = ("_least", "cut", "failure", "into", "is_full", "other", "out", "sock")

    def __init__(self, sock: socket.socket, other: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.other = sock, other
        self.out: deque[Outgoing] = deque()
        self.into: deque[Incoming] = deque()
        self.failure: str | None = None
        self.cut: str | None = None
        self.is_full = False
        self._least = 1

    def post(self, *parts: Outgoing | Incoming) -> None:
        """These are to go and to come behind what there is."""
        for part in parts:
            if isinstance(part, Outgoing):
                self.out.append(part)
                if self.cut is not None:
                    self._stop_sending(self.cut)
            else:
                self.into.append(part)
                if self.failure is not None:
                    self._stop_reading(self.failure)

    def expects(self) -> bool:
        """Whether there is room for what comes next. The system is told how much of it makes a waking worth while: it
        comes in many pieces."""
        room = self.into[0].place.room() if self.into else None
        if room is None:
            return False
        least = min(max(HEAD.size - self.into[0].got, 0) + len(room), WAKING)
        if least != self._least:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least
        return True

    # -- sending

    def send(self) -> bool:
        """Sends up to a block of what is ready; whether anything went."""
        moved, budget = False, BLOCK
        self.is_full = False
        while self.out and budget > 0:
            part = self.out[0]
            begin = max(part.sent - HEAD.size, 0)
            stop = min(part.ready, begin + budget)
            if begin >= stop and not (part.sent < HEAD.size and part.ready == len(part.view)):
                break
            try:
                if part.sent < HEAD.size:
                    pieces = [part.head[part.sent :], part.view[:stop]]
                    sent, asked = self.sock.sendmsg(pieces, [], QUIET), len(pieces[0]) + stop
                else:
                    sent, asked = self.sock.send(part.view[begin:stop], QUIET), stop - begin
            except BlockingIOError:
                sent, asked = 0, 1
            except OSError as error:
                self._stop_sending(self._closed(error))
                return moved
            moved |= sent > 0
            budget -= sent
            if part.count(sent):
                self.out.popleft()
                if part.delivery is not None:
                    part.delivery.went()
            elif sent < asked:
                self.is_full = True
                break
        return moved

    # -- receiving

    def receive(self) -> bool:
        """Reads up to a block of what has come; whether anything had."""
        moved, budget = False, BLOCK
        while self.into and budget > 0:
            part = self.into[0]
            room = part.place.room()
            if room is None:
                break
            room, missing = room[:budget], max(HEAD.size - part.got, 0)
            try:
                if missing:
                    got = self.sock.recvmsg_into([part.head[part.got :], room])[0]
                else:
                    got = self.sock.recv_into(room)
            except BlockingIOError:
                break
            except OSError as error:
                self._stop_reading(self._closed(error))
                return moved
            if not got:
                self._stop_reading(self._closed())
                return moved
            moved = True
            budget -= got
            is_last = part.count(got)
            if missing and got >= missing and part.head != part.expected:
                self._refuse(part)
                return moved
            if got > missing and not self._place(part, got - missing):
                return moved
            if is_last:
                self.into.popleft()
                part.delivery.came()
            elif got < missing + len(room):
                break  # nothing more has come
        return moved

    def _place(self, part: Incoming, count: int) -> bool:
        """Whether what has come could be placed. If not, whoever waits for it is to hear so, on whichever thread it
        came; it is not tried again, as it may have been summed in place."""
        try:
            part.place.take(count)
        except Exception as error:
            self._stop_reading(f"what rank {self.other} sent could not be placed ({type(error).__name__}: {error})")
            return False
        return True

    def _refuse(self, part: Incoming) -> None:
        number, size = HEAD.unpack(part.head)
        why = (
            f"rank {self.other} sent {size} bytes of its collective {number} where {part.size} of collective "
            f"{part.number} were expected"
        )
        self._stop_sending(why)
        self._stop_reading(why)

    # -- failing

    def _closed(self, error: OSError | None = None) -> str:
        return f"connection closed by rank {self.other}" + (f": {error.strerror}" if error is not None else "")

    def _stop_sending(self, why: str) -> None:
        """What had come before is still read."""
        self.cut = self.cut or why
        for part in self.out:
            if part.delivery is not None:
                part.delivery.fail(self.cut)
        self.out.clear()

    def _stop_reading(self, why: str) -> None:
        self.failure = self.failure or why
        for part in self.into:
            part.delivery.fail(self.failure)
        self.into.clear()

    def sever(self) -> None:
        """On any thread: nothing goes or comes any more, and whoever waits for it raises; the other end, too."""
        with suppress(OSError):  # that end is gone
            self.sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Nothing more is sent from here, which the other end sees behind what was."""
        with suppress(OSError):  # that end is gone
            self.sock.shutdown(socket.SHUT_WR)
