"""The socket transport: each rank sends to each other one what is for it, over a connection of the two.

A Gloo collective is handed to a thread, which meets the other ranks (who is to receive says so before anything is sent)
and reads by another one; who waits is woken up by the first. A step of small units spends most of its time so. Here who
begins a collective sends at once, and who waits for it reads by itself (see ``_dispatcher``): a message that has come
costs no change of threads, and its way is that of the link once.

    gather           each rank sends its chunk to all others
    reduce-scatter   each sends to each other one its chunk, which sums them block by block (see ``_block_sum``): in
                     rank order, bit for bit as the other transports, and without a temporary
    all-reduce       the same, and what is summed goes to all others, block by block
    words            small messages: each sends its values to each, who reduces by itself

Every rank sends as many bytes as with a ring. Where several ranks are on each of several hosts, a ring crosses to the
next host once and these ways once for each pair, so there Gloo's all-reduce stays. ``SHARDFOLD_SOCKETS=0`` switches all
of it off; so does what these connections cannot do (``GLOO_DEVICE_TRANSPORT``). Then the Gloo transport carries all.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from shardfold.comm._block_sum import BlockSum, SumRoom
from shardfold.comm._connecting import connect
from shardfold.comm._connection import Connection, Delivery, Incoming, Outgoing, as_memory
from shardfold.comm._dispatcher import Dispatcher
from shardfold.comm._words import REDUCED
from shardfold.comm.transport import GlooTransport, Pending, Transport, Waiter

__all__ = ["SocketTransport", "SocketWords"]

WORDS = 64 * 1024
"""Bytes that a rank sends to all others together as one small message at most."""


class _Awaiting:
    """As a ``torch.distributed`` work: that what a delivery brings has come, or, ``gone``, that what it sends has gone
    too."""

    def __init__(self, dispatcher: Dispatcher, delivery: Delivery, *, gone: bool) -> None:
        self._dispatcher, self._delivery, self._gone = dispatcher, delivery, gone

    def _over(self) -> bool:
        """Also where it has failed: to wait does not take long then."""
        left = self._delivery.coming + self._delivery.going * self._gone
        return not left or self._delivery.failure is not None

    def is_completed(self) -> bool:
        if not self._over():
            self._dispatcher.advance()
        return self._over()

    def wait(self, timeout: timedelta) -> None:
        """Returns when it is so.

        Raises:
            RuntimeError: "timed out"; or a connection has failed.
        """
        if not self._over():
            self._dispatcher.wait(self._over, timeout)
        if self._delivery.failure is not None and self._delivery.coming + self._delivery.going * self._gone:
            raise RuntimeError(self._delivery.failure)


class _Sent(Pending):
    """A collective over connections.

    Args:
        came, gone: works, that all has come and that all has gone.
        resident: what is sent stays as it is until :meth:`Transport.fence`.
    """

    def __init__(self, came: _Awaiting, gone: _Awaiting, *, resident: bool) -> None:
        super().__init__([came] if resident else [gone])
        self.gone = gone


class _Group:
    """The connections of a group.

    Attributes:
        others: by place in the group.
        size, me: of the group, and this rank's place.
        room: for blocks of sums.
        rings: a ring would cross to other hosts less often.
    """

    def __init__(self, others: Mapping[int, Connection], me: int, hosts: Sequence[str]) -> None:
        self.others, self.me, self.size = others, me, len(others) + 1
        self.room = SumRoom(self.size)
        each = Counter(hosts)
        self.rings = len(each) > 1 and max(each.values()) > 1
        self._numbers = 0

    def number(self) -> int:
        """Of the next collective."""
        self._numbers += 1
        return self._numbers


class SocketWords:
    """The small messages of one group.

    Args:
        group: whose.
        dispatcher: of its connections.
    """

    def __init__(self, group: _Group, dispatcher: Dispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def takes(self, values: Tensor, op: Any) -> bool:
        """Whether it can reduce them: the same on all ranks, which bring as many of one dtype."""
        return 0 < self._group.size * values.nbytes <= WORDS and op in REDUCED

    def reduce(self, values: Tensor, op: Any) -> _Reduced:
        """Begins to reduce a small tensor in place; the work, to be waited for."""
        group, number = self._group, self._group.number()
        said = torch.empty((group.size, values.nbytes), dtype=torch.uint8)
        said[group.me] = values.contiguous().view(-1).view(torch.uint8)
        mine = as_memory(said[group.me]).tobytes()
        delivery = Delivery(said)

        def post() -> None:
            for place, other in group.others.items():
                # Whoever has left has heard what it had to: only what it says itself may be missing.
                other.post(Outgoing(None, number, mine), Incoming(delivery, number, len(mine), as_memory(said[place])))

        self._dispatcher.begin(post)
        return _Reduced(self._dispatcher, delivery, said, values, op)


class _Reduced(_Awaiting):
    """As a ``torch.distributed`` work: values that all have sent, reduced into ``values``."""

    def __init__(self, dispatcher: Dispatcher, delivery: Delivery, said: Tensor, values: Tensor, op: Any) -> None:
        super().__init__(dispatcher, delivery, gone=False)
        self._said, self._values, self._reduce = said, values, REDUCED[op]

    def wait(self, timeout: timedelta) -> None:
        super().wait(timeout)
        rows = self._said.view(-1).view(self._values.dtype).view(len(self._said), -1)
        self._values.copy_(self._reduce(rows).view_as(self._values))


class SocketTransport(Transport):
    """
    Args:
        gloo: carries what these connections do not.
        groups: that data goes over, each with its ranks; of those that are carried otherwise no ranks.
        talking: the same of small messages.
        rank: this one.
        exchange: ``exchange(key, text)`` gives every rank's text.
    """

    def __init__(
        self,
        gloo: GlooTransport,
        groups: Sequence[tuple[Any, Sequence[int]]],
        talking: Sequence[tuple[Any, Sequence[int]]],
        rank: int,
        exchange: Callable[[str, str], list[str]],
    ) -> None:
        self._gloo = gloo
        every = [*groups, *talking]
        places = [(list(ranks).index(rank) if ranks else 0, ranks) for _, ranks in every]
        made = connect(places, rank, exchange)
        self._residents: list[tuple[Tensor, _Sent]] = []
        found: list[_Group | None] = [
            _Group(others, me, [made.hosts[r] for r in ranks]) if others is not None else None
            for others, (me, ranks) in zip(made.groups, places, strict=True)
        ]
        connections = [one for each in found if each is not None for one in each.others.values()]
        self._dispatcher = dispatcher = Dispatcher(connections, made.cores)
        data = zip(groups, found[: len(groups)], strict=True)
        words = zip(talking, found[len(groups) :], strict=True)
        self._groups = {id(group): one for (group, _), one in data if one is not None}
        self._words = {id(group): SocketWords(one, dispatcher) for (group, _), one in words if one is not None}
        self._leave = weakref.finalize(self, dispatcher.leave)
        self.kind = "sockets" if made.everywhere else gloo.kind  # of all ranks alike

    @staticmethod
    def wanted() -> bool:
        """Whether connections are to be made, as far as this rank's environment says."""
        return os.environ.get("SHARDFOLD_SOCKETS", "1") != "0"

    def carries(self, group: Any) -> bool:
        """Whether a group has connections."""
        return id(group) in self._groups

    def words(self, group: Any) -> SocketWords | None:
        return self._words.get(id(group))

    def all_gather(self, full: Tensor, group: Any, *, resident: Tensor | None = None) -> Pending:
        one = self._groups.get(id(group))
        if one is None:
            return self._gloo.all_gather(full, group)
        chunks = full.chunk(one.size)
        source = chunks[one.me] if resident is None else resident
        number, delivery, mine = one.number(), Delivery((full, source)), as_memory(source)

        def post() -> None:
            for place, other in one.others.items():
                if len(mine):
                    into = as_memory(chunks[place])
                    other.post(Outgoing(delivery, number, mine), Incoming(delivery, number, len(into), into))

        return self._begin(post, delivery, resident)

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        one = self._groups.get(id(group))
        if one is None:
            return self._gloo.reduce_scatter(full, out, group, add=add)
        chunks, number, delivery = full.chunk(one.size), one.number(), Delivery((full, out))
        whole = BlockSum(one.room, one.size, one.me, chunks[one.me], out, add=add)

        def post() -> None:
            for place, other in one.others.items():
                if size := chunks[one.me].nbytes:
                    other.post(
                        Outgoing(delivery, number, as_memory(chunks[place])),
                        Incoming(delivery, number, size, whole.place(place)),
                    )

        return self._begin(post, delivery)

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        one = self._groups.get(id(group))
        if one is None or one.rings:
            return self._gloo.all_reduce(tensor, group)
        width = -(-len(tensor) // one.size)
        bounds = [min(i * width, len(tensor)) for i in range(one.size + 1)]
        chunks = [tensor[begin:end] for begin, end in pairwise(bounds)]
        number, delivery, mine = one.number(), Delivery(tensor), chunks[one.me]
        sums = {place: Outgoing(delivery, number, as_memory(mine), 0) for place in one.others} if len(mine) else {}

        def told(num_bytes: int) -> None:
            for part in sums.values():
                part.release(num_bytes)

        whole = BlockSum(one.room, one.size, one.me, mine, mine, add=False, told=told)

        def post() -> None:
            for place, other in one.others.items():
                if len(chunks[place]):
                    other.post(Outgoing(delivery, number, as_memory(chunks[place])))
                if len(mine):
                    other.post(sums[place], Incoming(delivery, number, mine.nbytes, whole.place(place)))
                if len(chunks[place]):
                    into = as_memory(chunks[place])
                    other.post(Incoming(delivery, number, len(into), into))

        return self._begin(post, delivery)

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        one = self._groups.get(id(group))
        if one is None:
            return self._gloo.exchange(sent, to, received, by, group)
        number, delivery = one.number(), Delivery((sent, received))
        goes, comes = ([0, *accumulate(sizes)] for sizes in (to, by))
        me = one.me
        with torch.no_grad():
            received[comes[me] : comes[me + 1]].copy_(sent[goes[me] : goes[me + 1]])

        def post() -> None:
            for place, other in one.others.items():
                if to[place]:
                    other.post(Outgoing(delivery, number, as_memory(sent[goes[place] : goes[place + 1]])))
                if by[place]:
                    into = as_memory(received[comes[place] : comes[place + 1]])
                    other.post(Incoming(delivery, number, len(into), into))

        return self._begin(post, delivery)

    def _begin(self, post: Callable[[], None], delivery: Delivery, resident: Tensor | None = None) -> _Sent:
        self._dispatcher.begin(post)
        came, gone = (_Awaiting(self._dispatcher, delivery, gone=each) for each in (False, True))
        pending = _Sent(came, gone, resident=resident is not None)
        if resident is not None:
            self._residents.append((resident, pending))
        return pending

    def fence(self, waiter: Waiter, resident: Tensor | None = None) -> None:
        for tensor, pending in self._residents:
            if (resident is None or tensor is resident) and not pending.gone.is_completed():
                waiter(pending.gone)
        if resident is None:
            self._residents.clear()

    def close(self) -> None:
        self._leave.detach()
        self._dispatcher.close()

    def sever(self) -> None:
        self._dispatcher.sever()

    @property
    def room(self) -> int:
        """Bytes of others' blocks that are summed."""
        return sum(len(one.room) for one in self._groups.values())
