"""One total order of operations on every rank, and what happens when a rank would leave it.

A :class:`Track` is one section of a program, ready to run: each operation is a bound call, each marker a place that
an event moves to. Moving forward runs what lies between, so a rank that skips a unit still takes part in its
collectives. A rank that is asked to move *back* knows that it deviates: it publishes what it is about to do under its
sequence number in the store and waits. If all ranks publish the same, they go on together; else every rank raises the
same sentence. Ranks that are waiting for a collective look for that sentence every second, so nothing hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from time import monotonic
from typing import Any

from shardfold.errors import CollectiveError, ConfigError, OrderError
from shardfold.mesh import DataMesh
from shardfold.program import MARKERS, Op

__all__ = ["Agreement", "Recorder", "Track", "merge_orders"]

SLICE = timedelta(seconds=1)

Call = Callable[[], None]


class Track:
    """A section of a program with a position: everything before ``position`` has been done in this pass."""

    def __init__(self, name: str, ops: Sequence[Op], bind: Callable[[Op], Call | None]) -> None:
        self.name = name
        self.ops = tuple(ops)
        self.calls = [bind(op) for op in ops]
        self.position = 0
        self._markers: dict[tuple[str, str], list[int]] = {}
        for i, op in enumerate(self.ops):
            if op.verb in MARKERS:
                self._markers.setdefault((op.verb, op.unit), []).append(i)

    def restart(self) -> None:
        self.position = 0

    def reach(self, verb: str, unit: str = "") -> bool:
        """Runs everything up to the next such marker; False if there is none ahead."""
        for i in self._markers.get((verb, unit), ()):
            if i >= self.position:
                self._run(i + 1)
                return True
        return False

    def at(self, verb: str, unit: str) -> bool:
        """Whether that marker is the last thing reached."""
        return self.position > 0 and self.ops[self.position - 1][:2] == (verb, unit)

    def follow(self, verbs: tuple[str, ...] | None = None) -> None:
        """Runs on to the next marker, or, if ``verbs`` are given, only while the next operation is one of them."""
        stop = self.position
        while stop < len(self.ops) and (
            self.ops[stop].verb not in MARKERS if verbs is None else self.ops[stop].verb in verbs
        ):
            stop += 1
        self._run(stop)

    def finish(self) -> None:
        """Runs everything that is left."""
        self._run(len(self.ops))

    def _run(self, stop: int) -> None:
        while self.position < stop:
            call = self.calls[self.position]
            self.position += 1
            if call is not None:
                call()


class Agreement:
    """How ranks agree through the store, and how they tell each other that they can not go on.

    Args:
        mesh: the ranks and their store.
        patience: seconds until a disagreement is an error.
        limit: seconds until a collective that nobody gave up is an error.
    """

    def __init__(self, mesh: DataMesh, patience: float, limit: float) -> None:
        self._mesh = mesh
        self._patience = patience
        self._limit = limit
        self.sequence = 0  # collectives issued by this engine so far
        self.doing = "nothing"  # the last of them, for messages
        self._published: str | None = None  # this rank's last deviation

    def issue(self, what: str) -> None:
        self.sequence += 1
        self.doing = what

    def deviate(self, what: str) -> None:
        """Returns when every rank asks for ``what`` out of order at this sequence number.

        Raises:
            OrderError: on every rank, when they do not.
        """
        store, world, rank = self._mesh.store, self._mesh.world, self._mesh.rank
        if store is None:
            return
        keys = [f"deviation/{self.sequence}/{r}" for r in range(world)]
        store.set(keys[rank], what)
        store.set(f"deviating/{rank}", f"{self.sequence} {what}")
        # On Gloo the ranks that went on block in a collective and find this out by themselves (see wait), however slow
        # another rank is; on NCCL the host does not block, so time has to tell.
        deadline = monotonic() + (self._patience if self._mesh.backend == "nccl" else self._limit)
        while not store.check(keys):
            self.check()
            if monotonic() > deadline:
                absent = [str(r) for r, key in enumerate(keys) if not store.check([key])]
                self.abort(_contradiction(rank, what, self.sequence, ", ".join(absent)))
            self._wait(store, keys)
        said = [store.get(key).decode() for key in keys]
        if len(set(said)) > 1:
            listed = "; ".join(f"rank {r}: {s}" for r, s in enumerate(said))
            self.abort(f"after operation {self.sequence} the ranks ask for different things ({listed}).")
        store.set(f"deviating/{rank}", "")
        if self._published is not None:  # every rank has read the one before
            store.delete_key(self._published)
        self._published = keys[rank]

    def abort(self, message: str) -> None:
        """Raises ``message`` here and, at their next wait, on all other ranks."""
        if self._mesh.store is not None and not self._mesh.store.check(["abort"]):
            self._mesh.store.set("abort", message)
        self.check()
        raise OrderError(message)

    def check(self) -> None:
        """Raises what another rank gave up with, if one did."""
        store = self._mesh.store
        if store is not None and store.check(["abort"]):
            raise OrderError(store.get("abort").decode())

    def wait(self, work: Any) -> None:
        """Waits for a collective; on NCCL that orders streams only.

        Raises:
            OrderError: another rank gave up.
            CollectiveError: it failed, or took longer than the limit.
        """
        if self._mesh.backend == "nccl":
            work.wait()
            return
        deadline = monotonic() + self._limit
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                late = "timed out" in str(error).lower()
                self.check()
                if late:
                    self._look_for_contradiction()
                if not late or monotonic() > deadline:
                    how = (
                        f"did not finish within {self._limit:.0f} s"
                        if late
                        else f"failed ({str(error).splitlines()[0]})"
                    )
                    raise CollectiveError(
                        f"rank {self._mesh.rank}: operation {self.sequence}, {self.doing}, {how}; "
                        "another rank has probably died or left the training loop: look at its output."
                    ) from error

    def _look_for_contradiction(self) -> None:
        """A rank that waits to deviate at an earlier operation than the one this rank waits for never joins it."""
        store = self._mesh.store
        for rank in range(self._mesh.world):
            key = f"deviating/{rank}"
            if store is None or rank == self._mesh.rank or not store.check([key]):
                continue
            sequence, _, what = store.get(key).decode().partition(" ")
            if what and int(sequence) < self.sequence:
                self.abort(_contradiction(rank, what, int(sequence), str(self._mesh.rank)))

    def same(self, what: str, text: str) -> None:
        """Every rank must say the same; texts are compared by their hash.

        Raises:
            ConfigError: on every rank, naming the ranks that differ from rank 0.
        """
        said = self.exchange(f"same/{what}", sha256(text.encode()).hexdigest())
        other = [str(rank) for rank, value in enumerate(said) if value != said[0]]
        if other:
            raise ConfigError(
                f"{what} of rank {', '.join(other)} differ from rank 0's: build the same model with the same arguments "
                "on every rank."
            )

    def exchange(self, key: str, value: str) -> list[str]:
        """What every rank says under ``key``, by rank."""
        store, world = self._mesh.store, self._mesh.world
        if store is None:
            return [value]
        keys = [f"{key}/{r}" for r in range(world)]
        store.set(keys[self._mesh.rank], value)
        deadline = monotonic() + self._limit
        while not store.check(keys):
            self.check()
            if monotonic() > deadline:
                raise CollectiveError(f"rank {self._mesh.rank}: not every rank came to {key!r} in {self._limit:.0f} s.")
            self._wait(store, keys)
        return [store.get(k).decode() for k in keys]

    @staticmethod
    def _wait(store: Any, keys: list[str]) -> None:
        try:
            store.wait(keys, SLICE)
        except (RuntimeError, ValueError):  # the slice is over: DistStoreError is a RuntimeError
            return


class Recorder:
    """The orders in which units ran during the first step, and the one order that all ranks make of them."""

    def __init__(self) -> None:
        self._passes: list[list[str]] | None = []  # None once adopted
        self._seen: list[str] = []  # of the pass under way

    @property
    def recording(self) -> bool:
        return self._passes is not None

    def ran_forward(self, unit: str) -> None:
        if self._passes is not None and unit not in self._seen:
            self._seen.append(unit)

    def ran_backward(self, unit: str) -> None:
        """For units that no forward tells of; backward runs them the other way round."""
        if self._passes is not None:
            self._seen.insert(0, unit)

    def end_pass(self) -> None:
        if self._passes is not None and self._seen and self._seen not in self._passes:
            self._passes.append(self._seen)
        self._seen = []

    def adopt(self, agreement: Agreement, known: list[str]) -> list[str]:
        """After the first step: the order that was seen, merged over all ranks. Later: ``known``."""
        if self._passes is None:
            return known
        self.end_pass()
        mine, self._passes = merge_orders(self._passes, []), None
        said = agreement.exchange("order", "\n".join(mine))
        return merge_orders([text.split("\n") if text else [] for text in said], known)


def _contradiction(rank: int, what: str, sequence: int, others: str) -> str:
    return (
        f"rank {rank} asked for {what} again after operation {sequence} while rank {others} went on in the recorded "
        "order: every rank must run the model's parts in one order; a rank may leave parts out, but not run them in "
        "another order than the others."
    )


def merge_orders(orders: Sequence[Sequence[str]], known: Sequence[str]) -> list[str]:
    """One order of all ``known`` units that agrees with the ranks' recorded orders where they agree.

    The first rank's order is taken; what it did not use is put behind its predecessor in the order of the next rank
    that did, and what nobody used keeps its place relative to its predecessor in ``known``.
    """
    merged: list[str] = []
    for order in [*orders, known]:
        for i, name in enumerate(order):
            if name not in merged:
                before = order[i - 1] if i else None
                merged.insert(merged.index(before) + 1 if before in merged else 0, name)
    return merged
