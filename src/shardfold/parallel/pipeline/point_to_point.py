"""Activations and their gradients on their way between neighbouring stages.

What one rank sends to a neighbour arrives in the order in which it was sent. Both know that order before the batch
begins, so a receiver takes what comes earlier aside, whatever its own order is, and no message says what it brings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm.comm import Comm
from shardfold.comm.meter import LAYERS
from shardfold.parallel.pipeline.flow import Made
from shardfold.plan.cost import Sent

__all__ = ["Parcel", "PointToPoint"]


class Parcel(NamedTuple):
    """What crosses a border at once.

    Attributes:
        kind: ``"activations"`` or ``"gradients"``.
        border: between the stages ``border`` and ``border + 1``.
        batch: the number of the micro-batch.
    """

    kind: str
    border: int
    batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.batch} between the stages {self.border} and {self.border + 1}"


class PointToPoint:
    """One rank's way to its neighbours along the stages.

    Args:
        comm: of the engine.
        axis: of the stages.
    """

    def __init__(self, comm: Comm, axis: str) -> None:
        self._comm, self._axis = comm, axis
        mesh = comm.mesh
        self._row = next(row for row in mesh.sizes.rows((axis,)) if mesh.rank in row)
        self._here = self._row.index(mesh.rank)
        self._sending: deque[tuple[Any, Tensor, str]] = deque()
        self._coming: dict[int, deque[Parcel]] = {}  # by the place of who sends
        self._forms: dict[Parcel, Sequence[Made]] = {}
        self._arriving: dict[Parcel, list[tuple[Any, Tensor]]] = {}

    def begin(self, coming: dict[int, list[Parcel]], forms: Mapping[Parcel, Sequence[Made]]) -> None:
        """A batch begins: what each place along the stages will send here, in its order, and of which forms."""
        self._coming = {place: deque(parcels) for place, parcels in coming.items()}
        self._forms = dict(forms)
        self._arriving.clear()

    def send(self, tensors: Sequence[Tensor], place: int, parcel: Parcel) -> None:
        """Begins to send to the rank at that place; the tensors stay as they are until :meth:`finish`, or until they
        have arrived."""
        comm, rank = self._comm, self._row[place]
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            with comm.job.uninterrupted():
                comm.job.aside(str(parcel))
                group = comm.mesh.way(comm.mesh.rank, rank)
                work = dist.broadcast(whole, src=comm.mesh.rank, group=group, async_op=True)
            comm.meter.send(Sent(LAYERS, "SEND", (self._axis,)), whole.nbytes)
            self._sending.append((work, whole, f"{parcel}, to rank {rank}"))

    def expects(self, parcel: Parcel) -> bool:
        """Whether it is to come, or has come and was not asked for."""
        return parcel in self._arriving or any(parcel in parcels for parcels in self._coming.values())

    def receive(self, place: int, parcel: Parcel) -> list[Tensor]:
        """What comes from the rank at that place, once it is there."""
        while parcel not in self._arriving:
            self._post(place, self._coming[place].popleft())
        found: list[Tensor] = []
        for work, tensor in self._arriving.pop(parcel):
            self._wait(work, f"{parcel}, from rank {self._row[place]}")
            found.append(tensor)
        return found

    def _post(self, place: int, parcel: Parcel) -> None:
        comm, rank = self._comm, self._row[place]
        arriving = self._arriving.setdefault(parcel, [])
        for made in self._forms[parcel]:
            tensor = torch.empty(made.shape, dtype=made.dtype, device=comm.mesh.device)
            with comm.job.uninterrupted():
                comm.job.aside(str(parcel))
                group = comm.mesh.way(rank, comm.mesh.rank)
                arriving.append((dist.broadcast(tensor, src=rank, group=group, async_op=True), tensor))

    def _wait(self, work: Any, what: str) -> None:
        with self._comm.job.uninterrupted():
            self._comm.job.aside(what)
            self._comm.job.wait(work)

    def finish(self) -> None:
        """Returns when all that was sent has arrived."""
        while self._sending:
            work, _, what = self._sending.popleft()
            self._wait(work, what)

    def forget(self) -> None:
        """Behind an exception: nothing of this batch is waited for any more."""
        self._sending.clear()
        self._arriving.clear()
