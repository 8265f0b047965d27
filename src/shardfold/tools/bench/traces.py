"""One step under PyTorch's profiler: recorded as plain events, and sorted into lanes by what the time went to.

The main thread's time belongs to its innermost operation. Where that is none of the known ones and a collective is
under way on another thread, the main thread waits for it; what remains is Python and dispatch, and in no lane. Where
ranks read each other's memory there is no other thread: the transport itself names what it does then (``NOTED``).

Of a step whose states rest in slower tiers there are other lanes (``MOVES``): the main thread's time belongs to the
program's operation that it is in, and below stand the threads of the drives.

A device beside the host has its own lanes (``DEVICE``): what its kernels are, by their names, and its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

__all__ = [
    "DEVICE",
    "LANES",
    "LAYOUTS",
    "MOVES",
    "Lanes",
    "ProfiledEvent",
    "Span",
    "kernels",
    "lanes",
    "lanes_of",
    "merged",
    "moves",
    "phases",
    "profiled",
]

Span = tuple[float, float]
"""Begin and end."""

#: From the top of the picture: four of the main thread, two of who sends or reads.
LANES = ("compute", "copies", "update", "waiting", "gather", "reduce")

COPIES = ("copy_", "cat", "clone", "fill_", "zero_", "contiguous", "_to_copy")  # ends of names
GATHER = (
    "gloo:broadcast",
    "gloo:all_gather",
    "gloo:allgather",
    "nccl:all_gather",
    "nccl:_all_gather",
    "nccl:broadcast",
)
SENDS = ("gloo:", "nccl:")
NOTED = {"near:gather": "gather", "near:reduce": "reduce", "near:wait": "waiting"}
COMPUTE, UPDATE = "forward and backward", "optimizer step"  # as the two halves of a step are recorded


#: Of a step with slower tiers, by the verb of the operation; and of the threads of drives.
VERBS = {
    "STORE": "STORE",
    "FETCH": "FETCH",
    "FILL": "FILL",
    "UPDATE": "UPDATE",
    "WAIT": "waiting",
    "NORM": "collectives",
    "ALL_GATHER": "collectives",
    "ALL_REDUCE": "collectives",
    "REDUCE_SCATTER": "collectives",
}
DRIVES = {"disk:read": "disk reads", "disk:written": "disk writes"}
#: Of what a device does, by a part of its name in small letters; the first that is found counts.
KERNELS = {
    "memcpy htod": "copies up",
    "memcpy dtoh": "copies down",
    "nccl": "sending",
    "flash": "attention",
    "fmha": "attention",
    "sdpa": "attention",
    "attention": "attention",
    "adam": "update",
    "multi_tensor": "update",
    "gemm": "products",
    "nvjet": "products",
    "cutlass": "products",
    "cublas": "products",
}
OTHERS, IDLE = "other kernels", "idle"


class ProfiledEvent(NamedTuple):
    """An operation on a thread, or ``there`` on a device, in microseconds since the step began."""

    name: str
    thread: int
    begin: float
    end: float
    there: bool = False


def profiled(compute: Callable[[], object], update: Callable[[], object], kind: str = "cpu") -> dict[str, Any]:
    """Runs both halves of a step and gives all events, the length in microseconds, and the main thread. Those of a
    device too, of this type: ``update`` has to wait for it."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from shardfold.torch_internals import profiler_config

    # A near transport has a thread that reads ahead.
    threads = profiler_config(profile_all_threads=True)
    there = getattr(ProfilerActivity, kind.upper(), ProfilerActivity.CPU)
    activities = list(dict.fromkeys((ProfilerActivity.CPU, there)))
    with profile(activities=activities, experimental_config=threads) as profiler:
        with record_function(COMPUTE):
            compute()
        with record_function(UPDATE):
            update()
    found = list(profiler.events() or ())
    host = {e.name for e in found if e.device_type.name == "CPU"}
    # A device repeats the names of ranges that the host is in.
    events = [
        ProfiledEvent(e.name, e.thread, e.time_range.start, e.time_range.end, e.device_type.name != "CPU")
        for e in found
        if e.device_type.name == "CPU" or e.name not in host
    ]
    first = next(event for event in events if event.name == COMPUTE)
    last = next(event for event in events if event.name == UPDATE)
    moved = [e._replace(begin=e.begin - first.begin, end=e.end - first.begin) for e in events if e.begin < last.end]
    return {"events": moved, "length": last.end - first.begin, "thread": first.thread}


def kind(names: tuple[str, ...]) -> str | None:
    """The lane of what the main thread is in, the innermost operation last, if it is known to have one."""
    if note := next((NOTED[name] for name in reversed(names) if name in NOTED), None):
        return note
    name = names[-1] if names else ""
    if name.startswith("aten::_fused_") and name.endswith("_"):
        return "update"
    if not name.startswith(("aten::", "fsdp::")):
        return None
    return "copies" if name.endswith(COPIES) else "compute"


def innermost(events: Iterable[ProfiledEvent], length: float) -> Iterator[tuple[float, float, tuple[str, ...]]]:
    """Begin, end, and the names of the operations that one thread is in, the innermost last."""
    stack: list[ProfiledEvent] = []
    at = 0.0

    def until(moment: float) -> Iterator[tuple[float, float, tuple[str, ...]]]:
        nonlocal at
        if moment > at:
            yield at, moment, tuple(event.name for event in stack)
            at = moment

    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        while stack and stack[-1].end <= event.begin:
            yield from until(stack[-1].end)
            stack.pop()
        yield from until(event.begin)
        stack.append(event)
    while stack:
        yield from until(min(stack[-1].end, length))
        stack.pop()


def _host_events(trace: dict[str, Any]) -> list[ProfiledEvent]:
    return [event for event in (ProfiledEvent(*each) for each in trace["events"]) if not event.there]


def kernels(trace: dict[str, Any]) -> dict[str, list[Span]]:
    """Spans by lane of what the device does, copies beside kernels among them; idle: it does nothing at all."""
    found: dict[str, list[Span]] = {name: [] for name in DEVICE.names}
    for event in (ProfiledEvent(*each) for each in trace["events"]):
        if event.there:
            name = event.name.lower()
            lane = next((lane for part, lane in KERNELS.items() if part in name), OTHERS)
            found[lane].append((max(event.begin, 0.0), min(event.end, trace["length"])))
    found = {name: merged(spans) for name, spans in found.items()}
    at = 0.0
    for begin, end in [*merged(span for spans in found.values() for span in spans), (trace["length"], trace["length"])]:
        if begin > at:
            found[IDLE].append((at, begin))
        at = max(at, end)
    return found


def lanes(trace: dict[str, Any]) -> dict[str, list[Span]]:
    """Spans by lane; those of one lane do not overlap."""
    events = _host_events(trace)
    found: dict[str, list[Span]] = {name: [] for name in LANES}
    for event in events:
        if event.name.startswith(SENDS):
            lane = "gather" if event.name.startswith(GATHER) else "reduce"
            found[lane].append((max(event.begin, 0.0), min(event.end, trace["length"])))
        elif event.name in NOTED and event.thread != trace["thread"]:
            found[NOTED[event.name]].append((event.begin, event.end))
    for name in ("gather", "reduce"):
        found[name] = merged(found[name])
    sending = merged([*found["gather"], *found["reduce"]])
    idle: list[Span] = []
    for begin, end, names in innermost((e for e in events if e.thread == trace["thread"]), trace["length"]):
        lane = kind(names)
        if lane is None:
            idle.append((begin, end))
        else:
            found[lane].append((begin, end))
    found["waiting"] += _common(idle, sending)
    return {name: merged(spans) for name, spans in found.items()}


def moves(trace: dict[str, Any]) -> dict[str, list[Span]]:
    """Spans by lane of a step whose states rest in slower tiers; those of one lane do not overlap."""
    events = _host_events(trace)
    found: dict[str, list[Span]] = {name: [] for name in MOVES.names}
    for event in events:
        if lane := DRIVES.get(event.name):
            found[lane].append((max(event.begin, 0.0), min(event.end, trace["length"])))
    for begin, end, names in innermost((e for e in events if e.thread == trace["thread"]), trace["length"]):
        if lane := _moving(names):
            found[lane].append((begin, end))
    return {name: merged(spans) for name, spans in found.items()}


def _moving(names: tuple[str, ...]) -> str | None:
    """The lane of what the main thread is in: an operation of the program, or what the model computes."""
    for name in reversed(names):
        if name in NOTED:
            return "waiting" if name == "near:wait" else "collectives"
        if lane := VERBS.get(name.partition(" ")[0]):
            return lane
    return "compute" if any(name.startswith("aten::") for name in names) else None


def merged(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """The union of spans, where those at most ``gap`` apart are one."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1] + gap:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def phases(trace: dict[str, Any]) -> dict[str, Span]:
    """When forward, backward and the optimizer step run."""
    events = _host_events(trace)
    backward = min((e.begin for e in events if e.name.startswith("autograd::engine")), default=0.0)
    update = next(event.begin for event in events if event.name == UPDATE)
    return {"forward": (0.0, backward), "backward": (backward, update), "step": (update, trace["length"])}


class Lanes(NamedTuple):
    """How a picture sorts a step.

    Attributes:
        names: of the lanes, from the top.
        own: how many of them are the main thread's.
        sort: spans by lane, of a trace.
    """

    names: tuple[str, ...]
    own: int
    sort: Callable[[dict[str, Any]], dict[str, list[Span]]]


LAYOUTS = Lanes(LANES, 4, lanes)
MOVES = Lanes(
    ("compute", "collectives", "waiting", "STORE", "FETCH", "UPDATE", "FILL", "disk reads", "disk writes"), 7, moves
)
DEVICE = Lanes(("products", "attention", "update", OTHERS, IDLE, "copies up", "copies down", "sending"), 5, kernels)


def lanes_of(trace: dict[str, Any], job: str) -> Lanes:
    """Those that say most of a step: the device's, where it has one."""
    if any(ProfiledEvent(*each).there for each in trace["events"]):
        return DEVICE
    return MOVES if job == "offload" else LAYOUTS


def _common(one: list[Span], other: list[Span]) -> Iterator[Span]:
    """What is in both; each is sorted and does not overlap itself."""
    place = 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        at = place
        while at < len(other) and other[at][0] < end:
            yield max(begin, other[at][0]), min(end, other[at][1])
            at += 1
