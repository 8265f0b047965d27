"""Rewrites of programs: each takes a list of operations and gives a list that does the same at better moments.

How much and when is a :class:`Overlap`, a value of its own: the table says what is held and sent, the overlap only
moves it in time. No rewrite adds, drops or changes an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from shardfold.errors import ConfigError
from shardfold.plan.checks import check_flags, described, is_integer, known_arguments, parse_bytes
from shardfold.plan.layout import Tier
from shardfold.plan.program import MARKERS, REDUCTIONS, Op, Program

__all__ = ["Overlap", "apply", "closing", "defer_reduce", "delay_waits", "late", "prefetch", "updates_beside"]

GATHERS = ("CAST", "READ", "FILL", "ALL_GATHER", "DECODE")
AUTO, UNKNOWN = "auto", 25 * 1024 * 1024
"""A bucket that is chosen from the links, and its bytes while nothing is known of these."""
AHEAD = 32 * 1024 * 1024
"""Bytes on their way from a disk to which small units are fetched further ahead: what keeps a drive at its rate while
each is asked for by itself, and a fourth of the tier's own buffers."""


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How far ahead things are done.

    Attributes:
        prefetch: how many units ahead of its use a unit is gathered, and its state fetched for its update where that
            rests in a slower tier; ``prefetch + 1`` units are full at a time. From a disk states of more units are
            fetched ahead as long as those have at most 32 MiB; 0: of none.
        reduces_in_flight: units whose gradients may be on their way while the next unit runs backward, 0 or 1; None
            chooses: 1 on a GPU and over sockets; 0 where ranks of the CPU read each other's memory, which takes the
            cores that backward needs.
        block: elements that one call of a fused update handles; 0 chooses by device (64K on CPU, so that a block
            stays in cache, and 64M on a GPU).
        order: ``"recorded"``: the first passes find the order in which units run, later ones follow it; ranks may leave
            units out but not run them in contradicting orders. ``"any"``: ranks ask each other before every unit, which
            costs a small message each time and allows everything.
        update_thread: whether a thread of its own updates one unit after the other, so that a unit whose parameters are
            gathered behind their update is gathered while the next one is updated.
        compiled_update: whether the update of 16-bit parameters by AdamW or Adam, with the casts and the factor of
            gradients, is one pass made by ``torch.compile``. It needs a C++ compiler in host memory and Triton on a
            GPU, and up to a minute when the engine is made, once per machine.
        speculate: bytes of host memory, as in ``"2GiB"``, for snapshots of units that are updated in host memory while
            backward still computes, before the norm and overflows are known. Where the step turns out to be another
            (clipped, skipped, with another learning rate), the snapshot is restored and the unit updated again: every
            step is the same to the bit. Units whose snapshot has no room are updated in the step. None: all are.
        delayed_update: whether updates in host memory go on behind their step, while the next one's forward and
            backward run, which read the parameters of the step before (ZeRO-Offload, arXiv 2101.06840, section 5). It
            changes the maths. Master and moments may rest on disk: they are read and written there meanwhile, too.
        reduce_once: where gradients are split (``zero2``, ``zero3``), whether each rank keeps whole gradients over the
            micro-batches of a step and reduces them in the last, instead of in each: with several micro-batches less is
            sent, and the memory of whole gradients is held meanwhile.
        bucket: bytes, as in ``"8MiB"``, of gradients up to which small blocks that follow each other in a list are one
            unit: gathered, reduced and updated together. A list keeps at least four units; larger blocks, those that
            ``Init(units=...)`` names, and those of a pipeline stay alone. None: all do. ``"auto"``: as many as the
            links ask for, which are measured when the engine is made (``plan/auto_wire.bucket_for``); 25 MiB, as in
            DDP, where nothing is known of them.

    Raises:
        ConfigError: a value is negative or unknown.

    Examples:
        >>> ahead = sf.Engine(nn.Linear(8, 8), optimizer=adam, overlap=sf.Overlap(prefetch=2))
        >>> ahead.close()
    """

    prefetch: int = 1
    reduces_in_flight: int | None = None
    block: int = 0
    order: str = "recorded"
    update_thread: bool = False
    compiled_update: bool = False
    speculate: str | None = None
    delayed_update: bool = False
    reduce_once: bool = False
    bucket: str | None = "8MiB"

    def __post_init__(self) -> None:
        check_flags(
            "Overlap",
            update_thread=self.update_thread,
            compiled_update=self.compiled_update,
            delayed_update=self.delayed_update,
            reduce_once=self.reduce_once,
        )
        for name in ("speculate", "update_thread"):
            if self.delayed_update and getattr(self, name):
                raise ConfigError(
                    f"Overlap(delayed_update=True, {name}={getattr(self, name)!r}): updates are behind their step, or "
                    "in it and before: give one of the two."
                )
        if self.order not in ("recorded", "any"):
            raise ConfigError(f"Overlap.order is {self.order!r}: it is 'recorded' or 'any'.")
        if self.reduces_in_flight is not None and not is_integer(self.reduces_in_flight, 0, 1):
            raise ConfigError(f"Overlap.reduces_in_flight is {described(self.reduces_in_flight)}: it is 0, 1 or None.")
        for name in ("prefetch", "block"):
            if not is_integer(getattr(self, name), 0):
                raise ConfigError(
                    f"Overlap.{name} is {described(getattr(self, name))}: it is an integer and cannot be negative."
                )
        for name, example in (("speculate", "2GiB"), ("bucket", "8MiB")):
            if (value := getattr(self, name)) is not None and not _bytes(value) and (name, value) != ("bucket", AUTO):
                others = f", {AUTO!r}, or None" if name == "bucket" else ", or None"
                raise ConfigError(
                    f"Overlap.{name} is {described(value)}: it is bytes as a text, such as {example!r}{others}."
                )

    @property
    def snapshot_bytes(self) -> int:
        """Bytes for snapshots; 0: no unit is updated before its step."""
        return _bytes(self.speculate)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a unit that is made of several blocks; 0: none is."""
        return UNKNOWN if self.asks_links else _bytes(self.bucket)

    @property
    def asks_links(self) -> bool:
        """Whether links are to be measured for :attr:`bucket`."""
        return self.bucket == AUTO


def _bytes(text: str | None) -> int:
    """0: there are none, or what was given is no number of them."""
    return parse_bytes(text) or 0 if isinstance(text, str) else 0


def prefetch(
    ops: tuple[Op, ...],
    depth: int,
    moved: tuple[str, ...] = GATHERS,
    markers: tuple[str, ...] = MARKERS,
    from_disk: Callable[[Op], float] | None = None,
) -> tuple[Op, ...]:
    """Moves what brings each unit's values ``depth`` markers earlier; never before the pass begins or the unit is
    freed. What comes from a file to fill what is gathered moves one more, so that it is there when that is filled. In a
    step, or behind it, ``FETCH`` moves, past the updates of other units; ``from_disk`` gives the bytes of one, and with
    it it moves past more of them while all that is on its way has at most :data:`AHEAD` bytes."""
    if depth == 0:
        return ops
    groups = _between(ops, markers)
    reach = _reach(groups, moved, from_disk) if from_disk is not None else range(len(groups))
    fetched: list[list[Op]] = [
        [] for _ in groups
    ]  # by the group they move to; the last follows END and fetches nothing
    freed: dict[str, int] = {}  # the group in which a unit was freed last
    for i, group in enumerate(groups):
        for op in group:
            if op.verb == "FREE":
                freed[op.unit] = i
            elif op.verb in moved:
                # A second hop has the first to wait for, which is slow, and what is decoded has no use for more memory.
                ahead = 0 if op.source == "node" or op.verb == "DECODE" else depth
                there = min(i - ahead - (op.verb == "READ"), reach[i] if op.tier == Tier.DISK else i)
                fetched[max(0, there, freed.get(op.unit, 0))].append(op)
    out: list[Op] = []
    for group, fetches in zip(groups, fetched, strict=True):
        out.extend(op for op in group if op.verb not in (*moved, *markers))
        # A second hop waits for its first: what comes next is encoded, and on its way, before that.
        out.extend(sorted(fetches, key=lambda op: op.source == "node"))
        out.extend(op for op in group if op.verb in markers)
    return tuple(out)


def _reach(groups: list[list[Op]], moved: tuple[str, ...], nbytes: Callable[[Op], float]) -> list[int]:
    """By group the earliest one from which on all that comes from a disk for those behind it, up to this one, is at
    most :data:`AHEAD` bytes."""
    sizes = [sum(nbytes(op) for op in group if op.verb in moved and op.tier == Tier.DISK) for group in groups]
    found, first, ahead = [0], 0, 0.0
    for i in range(1, len(groups)):
        ahead += sizes[i]
        while ahead > AHEAD:
            first += 1
            ahead -= sizes[first]
        found.append(first)
    return found


def defer_reduce(ops: tuple[Op, ...], units: frozenset[str]) -> tuple[Op, ...]:
    """Moves the reductions of ``units`` behind END, for units whose gradients are complete only then."""
    late = tuple(op for op in ops if op.is_sum and op.unit in units)
    return tuple(op for op in ops if op not in late) + late


def delay_waits(ops: tuple[Op, ...], in_flight: int) -> tuple[Op, ...]:
    """Moves the end of each unit's reduction, WAIT, STORE and DROP, so that it goes on beside what comes next, until
    ``in_flight`` units' are on their way and another's begins; none outlasts the section."""
    if not in_flight:
        return ops
    out: list[Op] = []
    waiting: list[list[Op]] = []  # by unit
    reduced = ""  # the unit whose reduction is under way in ``ops``
    for op in ops:
        if op.verb in REDUCTIONS:
            if op.unit == reduced:  # a second one, of what the first one gives
                out += waiting.pop()
            while len(waiting) > max(0, in_flight - 1):
                out += waiting.pop(0)
            out.append(op)
            waiting.append([])
            reduced = op.unit
        elif op.is_sum and op.unit == reduced and waiting:
            waiting[-1].append(op)
        else:
            out.append(op)
    return (*out, *(op for ends in waiting for op in ends))


def reduced_once(program: Program) -> Program:
    """The same without reductions but in the last micro-batch; the buffers of gradients stay until then."""
    return replace(program, backward=tuple(op for op in program.backward if not op.is_sum and op.verb != "ADD"))


def updates_beside(program: Program) -> Program:
    """Moves updates, and what brings their states, into a section of their own; what stays waits for its unit."""
    own = ("FETCH", "FILL", "UPDATE", "STORE")
    step = tuple(op if op.verb != "UPDATE" else Op("JOIN", op.unit) for op in program.step)
    return replace(
        program,
        step=tuple(op for op in step if op.verb not in own),
        beside=tuple(op for op in program.step if op.verb in own),
    )


def apply(
    program: Program,
    overlap: Overlap,
    late: frozenset[str] = frozenset(),
    fetched: Callable[[Op], float] | None = None,
) -> Program:
    """The program that will run: ``program`` with the rewrites that ``overlap`` asks for, and ``late`` units reduced at
    the end. ``fetched`` gives the bytes of a ``FETCH`` (see :func:`prefetch`)."""
    if overlap.reduce_once:
        program = reduced_once(program)

    def backward(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return delay_waits(defer_reduce(prefetch(ops, overlap.prefetch), late), overlap.reduces_in_flight or 0)

    def updates(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return prefetch(ops, overlap.prefetch, ("FETCH",), ("UPDATE", "MIRROR"), fetched)

    made = Program(
        first=prefetch(program.first, overlap.prefetch),
        forward=prefetch(program.forward, overlap.prefetch),
        backward=backward(program.backward),
        last=backward(program.last),
        step=updates(program.step),
        behind=updates(program.behind),
        arrive=program.arrive,
        shared=program.shared,
        together=program.together,
        outer_send=program.outer_send,
        outer_step=program.outer_step,
        outer_take=program.outer_take,
    )
    if overlap.order == "any":  # passes ask before each unit: nothing of them is moved
        passes = {name: program.section(name) for name in ("first", "forward", "backward", "last")}
        made = replace(made, **passes)
    return updates_beside(made) if overlap.update_thread else made


def closing(program: Program, overlap: Overlap) -> tuple[Op, ...]:
    """A section behind a backward that was not known to be the last of its step: what only ``last`` reduces."""
    done = {(op.unit, op.verb) for op in program.backward if op.verb in REDUCTIONS}
    ops = (op for op in program.last if op.verb in REDUCTIONS and (op.unit, op.verb) not in done)
    return delay_waits(_awaited(ops), overlap.reduces_in_flight or 0)


def late(program: Program, units: frozenset[str]) -> tuple[Op, ...]:
    """A section before the step: one more reduction of ``units``, whose gradients came behind the one in backward; what
    is in a file of them comes first, unit by unit."""
    adds = {op.unit: op for op in program.last if op.verb == "ADD"}
    out: list[Op] = []
    for op in _awaited(op for op in program.last if op.is_sum and op.unit in units):
        if op.unit in adds:
            out.append(adds.pop(op.unit))
        out.append(op)
    return tuple(out)


def _awaited(sums: Iterable[Op]) -> tuple[Op, ...]:
    """Reductions with their end behind each; what goes to a slower tier goes behind them."""
    out: list[Op] = []
    for op in sums:
        if op.verb in REDUCTIONS:
            out += [op, Op("WAIT", op.unit, target="grads")]
            if op.source == "local":  # what was sent need not have been ``grads`` themselves
                out.append(Op("DROP", op.unit))
        elif op.verb == "STORE":  # what it reads may be what was sent
            if out and out[-1] == Op("DROP", op.unit):
                out.pop()
            out += [op, Op("DROP", op.unit)]
    return tuple(out)


def _between(ops: tuple[Op, ...], markers: tuple[str, ...]) -> list[list[Op]]:
    """Groups that end with their marker; the last one has none."""
    groups: list[list[Op]] = [[]]
    for op in ops:
        groups[-1].append(op)
        if op.verb in markers:
            groups.append([])
    return groups
