"""What collectives take over the links that ranks have, and what formats take on the device: measured, and the same on
all ranks.

A collective of a few bytes gives the latency, one that takes :data:`LONG` seconds the rate. It goes over the transport
that carries the data, all groups of an axis at once, so that ranks that share a link share it here too; what counts is
the slowest rank. What was measured is kept in the store that the ranks of the job share, so that the next engine of
that job finds it.

Whose link is slow is told by pairs of hosts: each of them has two with others, beside each other on a ring, and is in
one at a time. A slow link makes both of its host's pairs slow, and of any other host's one at most.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.agreement import Agreement
from shardfold.comm.comm import Comm
from shardfold.comm.cores import occupied
from shardfold.comm.dtypes import TORCH_DTYPES
from shardfold.comm.transport import Pending
from shardfold.plan.auto_wire import SUMMED, LinkFigure, Measured
from shardfold.plan.cost import Codec, ring_bytes
from shardfold.plan.formats import FORMATS, ITEMSIZE, Format
from shardfold.plan.layout import Axes

__all__ = ["host_of_slow_link", "measured"]

SMALL, FIRST, MOST = 256, 2**16, 2**22
"""Elements of fp32 for each rank of a group: a message that is all latency, the first that may show a rate, the
largest."""
LONG, TIMES, OFTEN = 0.03, 2, 5
"""Seconds that show a rate; how often what took them is done again, when what lets a burst through is empty; and how
often a small one is done. Of each the shortest counts: what else goes on makes others longer, and none shorter."""
CODED, MANY = 2**18, 2**12
"""Elements that show what a format takes, and how often they are encoded at most in :data:`LONG` seconds. In less time
than that ranks that share a processor would encode one after the other, each as fast as if it were alone."""
PAIR, LARGEST, AGAIN, APART = 2**16, 2**26, 3, 2.0
"""Bytes of the first message between two hosts, and of the largest; how often each is sent; and how many times as slow
as any other host's a link has to be."""
VERBS = {"ALL_GATHER": "ALL_GATHER", "EXCHANGE": "REDUCE_SCATTER"}
"""What others send as much as."""


def measured(comm: Comm, links: Collection[tuple[str, Axes]], formats: Collection[str]) -> Measured:
    """Of these kinds of collectives over axes, and formats, what they take; all ranks of the job call it, and those of
    some may need more than those of others."""
    key = f"shardfold/links/{comm.mesh.device.type}/{json.dumps(list(comm.mesh.sizes.items()))}"
    store = comm.mesh.default_store
    known = json.loads(store.get(key)) if store is not None and store.check([key]) else {}
    mine = [[kind, *axes] for kind, axes in sorted(links)] + [["", name] for name in sorted(formats)]
    said = [json.loads(text) for text in comm.job.exchange("links", json.dumps([mine, sorted(known)]))]
    kept = set[str].intersection(*(set(found) for _, found in said))
    found = {name: figures for name, figures in known.items() if name in kept}
    for need in sorted({tuple(need) for needed, _ in said for need in needed}):
        name = " ".join(need)
        if name not in found:
            found[name] = list(_link(comm, need[0], need[1:]) if need[0] else _codec(comm, FORMATS[need[1]]))
    if store is not None and comm.mesh.rank == 0:
        store.set(key, json.dumps(found))
    return Measured(
        {(kind, axes): LinkFigure(*found[" ".join((kind, *axes))]) for kind, axes in links},
        {name: Codec(*found[f" {name}"]) for name in formats},
    )


def _slowest(comm: Comm, do: Callable[[], object]) -> float:
    """Seconds of the rank that takes longest, if all begin at once."""
    comm.control([0.0], dist.ReduceOp.MAX)
    begun = perf_counter()
    do()
    accelerator.synchronize(comm.mesh.device)
    return comm.control([perf_counter() - begun], dist.ReduceOp.MAX)[0]


def _link(comm: Comm, kind: str, axes: Axes) -> LinkFigure:
    verb, _, dtype = kind.partition(":")
    dtype = dtype or SUMMED

    def seconds(each: int, times: int) -> float:
        return min(_slowest(comm, lambda: _send(comm, verb, dtype, axes, each)) for _ in range(times))

    _send(comm, verb, dtype, axes, SMALL)  # connections are made
    latency, each = seconds(SMALL, OFTEN), FIRST
    while seconds(each, 1) < LONG and each < MOST:
        each *= 4
    ranks, (took, working) = comm.mesh.parts(axes), _working(comm, partial(seconds, each, TIMES))
    while took < LONG and each < MOST:  # what took longer before was not the link
        each *= 4
        took, working = _working(comm, partial(seconds, each, TIMES))
    sent = ring_bytes(VERBS.get(verb, verb), float(ITEMSIZE[dtype]) * each * ranks, ranks)
    return LinkFigure(sent / max(took - latency, took / 10), latency, working)


def _working(comm: Comm, do: Callable[[], float]) -> tuple[float, float]:
    """What it returns, and for which part of its time processors work, on average over the ranks. Where the tensors are
    those of a device it does not matter: its processors are others."""
    begun, before = perf_counter(), occupied()
    found = do()
    part = min(1.0, (occupied() - before) / (perf_counter() - begun)) if comm.mesh.device.type == "cpu" else 0.0
    return found, comm.control([part], dist.ReduceOp.SUM)[0] / comm.mesh.world


def _send(comm: Comm, verb: str, dtype: str, axes: Axes, each: int) -> None:
    group, ranks, device = comm.mesh.group(axes), comm.mesh.parts(axes), comm.mesh.device
    full = torch.zeros(each * ranks, dtype=TORCH_DTYPES[dtype], device=device)
    with comm.agreement.uninterrupted():
        comm.agreement.issue(f"measuring {verb} over {'+'.join(axes)}")
        if verb == "ALL_GATHER":
            pending: Pending = comm.transport.all_gather(full, group)
        elif verb == "REDUCE_SCATTER":
            pending = comm.transport.reduce_scatter(full, torch.empty(each, device=device), group, add=False)
        elif verb == "ALL_REDUCE":
            pending = comm.transport.all_reduce(full, group)
        else:
            received, sizes = torch.empty_like(full), [each] * ranks
            pending = comm.transport.exchange(full, sizes, received, sizes, group)
        pending.wait(comm.agreement.wait)


def _codec(comm: Comm, form: Format) -> Codec:
    """What a format takes where every rank has as much to encode at the same time: processors may be fewer."""
    device = comm.mesh.device

    def seconds(length: int, steps: tuple[str, ...]) -> float:
        """Of one time, in the fastest of a few runs of :data:`LONG` seconds."""
        do = partial(_code, form, _coded(form, length, device), steps)
        times = 1
        while (took := _slowest(comm, partial(_often, do, times))) < LONG and times < MANY:
            times *= 4
        return min(took, *(_slowest(comm, partial(_often, do, times)) for _ in range(TIMES))) / times

    few, many = form.block, -(-CODED // form.block) * form.block
    call = seconds(few, ("encode", "decode"))
    encode, decode, add = (seconds(many, steps) / many for steps in (("encode",), ("decode",), ("decode", "add")))
    return Codec(encode, decode, add, call)


def _coded(form: Format, length: int, device: torch.device) -> dict[str, Tensor]:
    """Values of that length, and what they become."""
    values = torch.linspace(-1, 1, length, device=device).view(1, -1)
    made = {"values": values, "payload": torch.empty(1, form.nbytes(length), dtype=torch.uint8, device=device)}
    made |= {"sum": torch.zeros_like(values)} | ({"state": torch.zeros_like(values)} if form.state is not None else {})
    form.encode(values, made["payload"], made.get("state"))
    return made


def _code(form: Format, made: Mapping[str, Tensor], steps: Sequence[str]) -> None:
    if "encode" in steps:
        form.encode(made["values"], made["payload"], made.get("state"))
    if "decode" in steps:
        form.decode(made["payload"], made["values"])
    if "add" in steps:
        made["sum"].add_(made["values"])


def _often(do: Callable[[], object], times: int) -> None:
    for _ in range(times):
        do()


def host_of_slow_link(agreement: Agreement) -> str:
    """The name of the host whose link is slower than that of every other; empty: it is no single one, or there are
    fewer than three, of which each pair is as slow as the other. All peers call it."""
    said = agreement.exchange("hosts", socket.gethostname())
    hosts = list(dict.fromkeys(said))
    if (count := len(hosts)) < 3:
        return ""
    places, rounds, each, slowest, last = [said.index(host) for host in hosts], _rounds(count), PAIR, 0.0, 0.0
    best, seconds, more = [0.0] * count, [0.0] * count, True
    while more:  # once more behind the first that is long, as what lets a burst through is empty then
        more = slowest < LONG and each < LARGEST
        took = [[_together(agreement, places, pairs, each) for pairs in rounds] for _ in range(AGAIN)]
        mine = [min(times) for times in zip(*took, strict=True)]
        told = [json.loads(text) for text in agreement.exchange("seconds between hosts", json.dumps(mine))]
        for number, pairs in enumerate(rounds):
            for one in pairs:
                seconds[one] = max(told[places[end]][number] for end in (one, (one + 1) % count))
        best = [min(seconds[one - 1], seconds[one]) for one in range(count)]
        last, slowest = sorted(best)[-2:]
        each *= 4
    return hosts[best.index(slowest)] if slowest > APART * last else ""


def _rounds(count: int) -> list[Sequence[int]]:
    """Pairs of a host and the next one on a ring, by the first of them, of which no two in a round share a host."""
    if count % 2:
        return [range(0, count - 1, 2), range(1, count - 1, 2), [count - 1]]
    return [range(0, count, 2), range(1, count, 2)]


def _together(agreement: Agreement, places: Sequence[int], pairs: Sequence[int], each: int) -> float:
    """Seconds in which the first ranks of these pairs of hosts send each other so many bytes, at this rank."""
    sizes = [0] * agreement.peers.size
    for one in pairs:
        ends = places[one], places[(one + 1) % len(places)]
        for end, other in (ends, ends[::-1]):
            if agreement.peers.ranks[end] == agreement.peers.rank:
                sizes[other] = each
    sent = torch.zeros(sum(sizes), dtype=torch.uint8)
    agreement.exchange("beginning", "")
    with agreement.uninterrupted():
        agreement.issue("measuring links between hosts")
        begun = perf_counter()
        work = dist.all_to_all_single(
            torch.empty_like(sent), sent, sizes, sizes, group=agreement.peers.group, async_op=True
        )
        agreement.wait(work, control=True)
        return perf_counter() - begun
