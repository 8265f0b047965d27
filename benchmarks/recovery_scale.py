"""Simulated: what it takes to go on without a host, on up to 10,000 ranks.

    python benchmarks/recovery_scale.py [--hosts 2 8 64 512 1250] [--each 8] [--parameters 7e9]

The launchers' own machine (``launch/_voter.py``) runs for every host, and what they say goes as they say it
(``launch/_mail.py``) through one store, which does one call after the other. What that costs is measured here first, on
the loopback: seconds from a call to its answer where nobody else asks, how many of them the store answers where eight
clients ask at once, and what each byte adds, the shortest of ten times. What the machine computes is measured as it
runs, in seconds of a core, and counts where it falls; that a record is read counts for each host. One launcher knows
that the host is gone, and all others hear of it from that one, at looks as often as launchers have them. Nothing else
is simulated: no network, no ranks, which all have stopped, no silence until a host is missed (``--patience``), no
process groups, which of Gloo connect each two ranks. What of the states moves is counted from the shards' ranges before
and behind, of AdamW in fp32 under ``zero3``: bytes that a rank needs and has not. Signs of life
(``launch/_rendezvous.py``) are what all hosts ask of the store in a tenth of the patience.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardfold.comm.membership import Member, Membership
from shardfold.launch._mail import Mail
from shardfold.launch._members import pause
from shardfold.launch._rendezvous import Attempts, RankWaits
from shardfold.launch._voter import Message, Sent, Voter
from shardfold.plan.patience import Patience

STATES = 12
"""Bytes of master and two moments."""


class Costs(NamedTuple):
    """Seconds: from a call of the store to its answer; that the store has to do for it; and for a byte in it."""

    answer: float
    call: float
    byte: float


def measured() -> Costs:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(8)]
    few, large = 1000, 1 << 20

    def ask(client: TCPStore) -> None:
        for _ in range(few):
            client.add("count", 1)

    def seconds(act: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        act()
        return time.perf_counter() - begun

    with ThreadPoolExecutor(len(clients)) as pool:
        each = [
            (
                seconds(lambda: ask(clients[0])) / few,
                seconds(lambda: list(pool.map(ask, clients))) / few / len(clients),
                seconds(lambda: clients[0].set("large", "x" * large)) / large,
            )
            for _ in range(10)
        ]
    answer, call, byte = map(min, zip(*each, strict=True))
    return Costs(max(answer, call), call, byte)


class TimedStore:
    """What is asked of a store, and when its answers are there.

    Args:
        costs: as measured.

    Attributes:
        now: of who asks.
        calls, bytes, busy: so many, of which its texts have so many, and for how many seconds it does something.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._free, self.now = costs, 0.0, 0.0
        self._values: dict[str, list[tuple[float, str]]] = {}
        self.calls, self.bytes, self.busy = 0, 0, 0.0

    def begin(self) -> None:
        """What is there was there before, and from now on time is counted."""
        self._values = {key: [(0.0, values[-1][1])] for key, values in self._values.items()}
        self._free = self.now = 0.0
        self.calls, self.bytes, self.busy = 0, 0, 0.0

    def _ask(self, *texts: str) -> float:
        """When it is done; the answer comes somewhat later."""
        count = sum(map(len, texts))
        self.calls, self.bytes = self.calls + 1, self.bytes + count
        takes = self._costs.call + count * self._costs.byte
        done = self._free = max(self.now, self._free) + takes
        self.busy += takes
        self.now = done + self._costs.answer - self._costs.call
        return done

    def _read(self, key: str, at: float) -> str:
        return next((value for when, value in reversed(self._values.get(key, ())) if when <= at), "")

    def _write(self, key: str, value: str, at: float) -> None:
        self._values.setdefault(key, []).append((at, value))

    def set(self, key: str, value: str) -> None:
        self._write(key, value, self._ask(key, value))

    def add(self, key: str, amount: int) -> int:
        at, values = self._ask(key), self._values.get(key)
        count = int(values[-1][1] if values else 0) + amount
        self._write(key, str(count), at)
        return count

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        at = self._ask(key, value)
        if key not in self._values:
            self._write(key, value, at)
        return self._values[key][-1][1].encode()

    def check(self, keys: Sequence[str]) -> bool:
        at = self._ask(*keys)
        return all(self._read(key, at) for key in keys)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self._read(key, self.now) for key in keys]
        at = self._ask(*keys, *found)
        return [self._read(key, at).encode() for key in keys]


class Launchers:
    """Of all hosts, of which the last is gone.

    Args:
        hosts, each: how many, with how many ranks.
        costs: as measured.
    """

    def __init__(self, hosts: int, each: int, costs: Costs) -> None:
        self.hosts, self.store, self.messages = hosts, TimedStore(costs), 0
        members = tuple(Member(uid, uid // each, uid % each) for uid in range(hosts * each))
        record = Membership(0, members, "10.0.0.1", 29500, len(members))
        self.voters = [Voter(host, record) for host in range(hosts)]
        self.mine = [members[host * each : (host + 1) * each] for host in range(hosts)]
        self.mails = [Mail(self.store, host) for host in range(hosts - 1)]
        self.store.begin()
        self.decided: dict[int, float] = {}
        text, begun = json.dumps(Membership.listed(members)), time.thread_time()
        Membership.members_of(json.loads(text))
        self.reads = 2 * (time.thread_time() - begun)  # what is known, and the new one

    def run(self) -> float:
        """Seconds from when the first launcher knows that the host is gone until the last one has the record."""
        idle = pause(self.voters[0], self.hosts)
        looks = [(idle * host / self.hosts, host) for host in range(self.hosts - 1)]
        while len(self.decided) < self.hosts - 1:
            self.store.now, host = heapq.heappop(looks)
            if host == 0 and not self.voters[0].needed and not self.decided:
                self.take(host, self.voters[host].suspect(self.hosts - 1))
            for message in self.timed(self.mails[host].read):
                self.take(host, self.timed(lambda h=host, said=message: self.voters[h].receive(said)))
            if self.voters[host].needed and self.voters[host].mine is None:
                self.take(host, self.timed(lambda h=host: self.voters[h].stop(self.mine[h], "10.0.0.1", 29500)))
            if self.voters[host].record.epoch and host not in self.decided:
                self.decided[host] = self.store.now = self.store.now + self.reads * (host > 0)
            heapq.heappush(looks, (self.store.now + pause(self.voters[host], self.hosts), host))
        return max(self.decided.values())

    def timed(self, act: Any) -> Any:
        """What a launcher computes takes its time; what the store's stand-in does of that here is little."""
        begun = time.thread_time()
        done = act()
        self.store.now += time.thread_time() - begun
        return done

    def take(self, host: int, done: tuple[Voter, Sent]) -> None:
        """As ``Members._take``."""
        voter, said = done
        queue, out = deque(said), list[Message]()
        while queue:
            message = queue.popleft()
            if message.target == host:
                voter, more = self.timed(lambda v=voter, heard=message: v.receive(heard))
                queue.extend(more)
            else:
                out.append(message)
        self.voters[host], self.messages = voter, self.messages + len(out)
        self.timed(lambda: self.mails[host].send(out))


def signs_of_life(hosts: int, costs: Costs) -> tuple[int, float]:
    """Calls of the store that those of all hosts take, once each, and for how many seconds it is busy with them."""
    store, nodes = TimedStore(costs), list[Attempts]()
    for host in range(hosts):
        node = Attempts(None, f"host-{host}", None, None, 60.0, Patience())  # pyright: ignore[reportArgumentType]
        node.node_rank, node.num_nodes, node.store, node.voting = host, hosts, store, range(hosts)
        nodes.append(node)
    nodes[0].prepare(store)
    for _ in range(2):
        store.begin()
        for node in nodes:
            node._beaten = 0.0  # it is time for one
            node.beat(lambda _: False)
            node.awaited(RankWaits())
            node.without()
    return store.calls, store.busy


def moved(before: int, behind: int, gone: range, numel: float) -> tuple[float, float]:
    """Bytes that all ranks together need and have not, and the one that needs most: of ``before`` ranks those of
    ``gone``, a host, are no more, and each of the others had the copy of the host before, too."""
    left = [rank for rank in range(before) if rank not in gone]
    needs = list[float]()
    for place, rank in enumerate(left):
        low, high = numel * place / behind, numel * (place + 1) / behind
        has = 0.0
        for owner in {rank, (rank - len(gone)) % before}:
            a, b = numel * owner / before, numel * (owner + 1) / before
            has += max(0.0, min(b, high) - max(a, low))
        needs.append(STATES * (high - low - has))
    return sum(needs), max(needs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[3, 8, 64, 512, 1250])
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--parameters", type=float, default=7e9)
    options = parser.parse_args()
    costs = measured()
    print(f"an answer {costs.answer * 1e6:.0f} us, a call {costs.call * 1e6:.0f} us, a MB {costs.byte * 1e9:.1f} ms\n")
    print("| hosts | ranks | messages | MB | calls | seconds to agree | GB moved | GB of a rank | signs of life, ms |")
    print("|---" * 9 + "|")
    for hosts in options.hosts:
        launchers = Launchers(hosts, options.each, costs)
        took, ranks = launchers.run(), hosts * options.each
        whole, most = moved(ranks, ranks - options.each, range(ranks - options.each, ranks), options.parameters)
        said = f"{launchers.messages} | {launchers.store.bytes / 1e6:.2f} | {launchers.store.calls}"
        calls, busy = signs_of_life(hosts, costs)
        life = f"{calls}, {busy * 1e3:.1f}"
        print(
            f"| {hosts} | {ranks} | {said} | {took:.2f} | {whole / 1e9:.1f} | {most / 1e9:.2f} | {life} |", flush=True
        )


if __name__ == "__main__":
    main()
