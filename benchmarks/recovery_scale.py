"""Simulated: what it takes to go on without a host, on up to 10,000 ranks.

    python benchmarks/recovery_scale.py [--hosts 2 8 64 512 1250] [--each 8] [--parameters 7e9]

The launchers' own machine (``launch/_voter.py``) runs for every host, and what they say goes through one store as
``launch/_members.py`` has it: two calls for a message, and a look every 2 ms. How long a call of PyTorch's store takes,
and what it adds for each byte, is measured here first, on the loopback; seconds that the machine itself computes are
measured as it runs, and count where they fall. Nothing else is: no network, no ranks, no silence until a host is missed
(``--patience``), no process groups, which of Gloo connect each two ranks. What of the states moves is counted from the
shards' ranges before and behind, of AdamW in fp32 under ``zero3``: bytes that a rank needs and has not.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import deque
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardfold.comm.membership import Member, Membership
from shardfold.launch._members import AWAKE
from shardfold.launch._voter import Message, Voter

STATES = 12
"""Bytes of master and two moments."""


class Costs(NamedTuple):
    """Seconds: of a call of the store, and of a byte in it; of a byte of a message that is written or read as JSON."""

    call: float
    byte: float
    text: float


def measured() -> Costs:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    few, large = 2000, 1 << 20
    begun = time.perf_counter()
    for _ in range(few):
        client.add("count", 1)
    call = (time.perf_counter() - begun) / few
    begun = time.perf_counter()
    for _ in range(20):
        client.set("large", "x" * large)
    byte = max(0.0, (time.perf_counter() - begun) / 20 - call) / large
    record = Membership(1, tuple(Member(uid, uid // 8, uid % 8) for uid in range(1000)), "10.0.0.1", 29500)
    message = Message("ACCEPT", 0, 1, 1, record=record)
    text = message.to_json()
    begun = time.perf_counter()
    for _ in range(20):
        Message.from_json(message.to_json())
    return Costs(call, byte, (time.perf_counter() - begun) / 40 / len(text))


class Launchers:
    """Of all hosts, of which the last is gone.

    Args:
        hosts, each: how many, with how many ranks.
        costs: as measured.
    """

    def __init__(self, hosts: int, each: int, costs: Costs) -> None:
        self.costs, self.hosts, self.each = costs, hosts, each
        members = tuple(Member(uid, uid // each, uid % each) for uid in range(hosts * each))
        self.voters = [Voter(host, Membership(0, members, "10.0.0.1", 29500)) for host in range(hosts)]
        self.queues: list[deque[tuple[Message, int]]] = [deque() for _ in range(hosts)]
        self.free = 0.0  # when the store has answered what it was asked
        self.calls = self.messages = self.bytes = 0
        self.sizes: dict[Any, int] = {}
        self.decided: dict[int, float] = {}

    def run(self) -> float:
        """Seconds from when the first launcher knows that the host is gone until the last one has the record."""
        looks = [(0.0, host) for host in range(self.hosts - 1)]
        gone = self.hosts - 1
        while len(self.decided) < self.hosts - 1:
            now, host = heapq.heappop(looks)
            if now == 0.0:
                mine = [member for member in self.voters[host].record.members if member.agent == host]
                now = self.act(host, now, "stop", mine, "10.0.0.1", 29500)
                if host == 0:
                    now = self.act(host, now, "suspect", gone)
            now = self.call(now)
            while self.queues[host] and self.queues[host][0][1] <= now * 1e9:
                message, _ = self.queues[host].popleft()
                size = self.size(message)
                now = self.call(now, size) + size * self.costs.text
                now = self.act(host, now, "receive", message)
            if self.voters[host].record.epoch:
                self.decided.setdefault(host, now)
            heapq.heappush(looks, (now + AWAKE, host))
        return max(self.decided.values())

    def call(self, now: float, num_bytes: int = 0) -> float:
        """When the store has answered, which does one thing after the other."""
        self.calls += 1
        self.free = max(now, self.free) + self.costs.call + num_bytes * self.costs.byte
        return self.free

    def act(self, host: int, now: float, event: str, *given: Any) -> float:
        """When a launcher has done what an event leads to."""
        begun = time.perf_counter()
        voter, sent = getattr(self.voters[host], event)(*given)
        queue, out = deque(sent), list[Message]()
        while queue:
            message = queue.popleft()
            if message.target == host:
                voter, more = voter.receive(message)
                queue.extend(more)
            else:
                out.append(message)
        self.voters[host] = voter
        now += time.perf_counter() - begun
        for message in out:
            size = self.size(message)
            now = self.call(self.call(now + size * self.costs.text), size)
            self.messages, self.bytes = self.messages + 1, self.bytes + size
            if message.target < self.hosts - 1:
                self.queues[message.target].append((message, int(now * 1e9)))
        return now

    def size(self, message: Message) -> int:
        """Bytes of it as JSON."""
        alike = (message.kind, id(message.record), len(message.members))
        if alike not in self.sizes:
            self.sizes[alike] = len(message.to_json())
        return self.sizes[alike]


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
    print(f"a call {costs.call * 1e6:.0f} us, a MB {costs.byte * 1e6 * 1e3:.1f} ms, as JSON {costs.text * 1e6:.2f} s\n")
    print("| hosts | ranks | messages | MB | calls of the store | seconds to agree | GB moved | GB of a rank |")
    print("|---" * 8 + "|")
    for hosts in options.hosts:
        launchers = Launchers(hosts, options.each, costs)
        took, ranks = launchers.run(), hosts * options.each
        whole, most = moved(ranks, ranks - options.each, range(ranks - options.each, ranks), options.parameters)
        said = f"{launchers.messages} | {launchers.bytes / 1e6:.2f} | {launchers.calls}"
        print(f"| {hosts} | {ranks} | {said} | {took:.2f} | {whole / 1e9:.1f} | {most / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()
