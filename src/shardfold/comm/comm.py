"""One rank's way to the others: everything that is sent goes through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm._encoded import gather_bundle, gather_encoded, scatter_bundle, scatter_encoded
from shardfold.comm._transport_choice import data_transport
from shardfold.comm.agreement import Agreement, MessageCount
from shardfold.comm.answered import ask_no_more
from shardfold.comm.dtypes import TORCH_DTYPES
from shardfold.comm.hops import gather_between, gather_within, nodes
from shardfold.comm.launcher_notes import meeting
from shardfold.comm.mesh import DataMesh, Given
from shardfold.comm.meter import LAYERS, Meter
from shardfold.comm.peers import Peers
from shardfold.comm.transport import Pending, Transport, drain
from shardfold.plan.cost import Sent, ring_bytes
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import Axes
from shardfold.plan.program import KINDS, Op
from shardfold.tiers.collection import AtCollection
from shardfold.tiers.device import DeviceTier

__all__ = ["Comm", "joined", "program_agreement"]


def joined(
    owner: object,
    sizes: Given | None,
    device: torch.device,
    patience: float,
    timeout: float,
    held: ExitStack,
    rare: str = "",
    meets: bool = False,
    asks: str = "",
) -> tuple[DataMesh, Agreement]:
    """Mesh and agreement of ``owner``, which spans ranks; see ``Engine`` for arguments, ``Mesh`` for ``rare`` and
    ``meets``. ``asks``: what else all ranks have to say alike before they meet.

    They end with ``held``, which is left with an exception if ``owner`` could not be made (see :meth:`DataMesh.close`),
    or when ``owner`` is collected; at exit the mesh ends by itself.
    """
    with meeting():
        mesh = DataMesh(sizes, device, timedelta(seconds=timeout), rare, meets, asks)
    held.push(lambda kind, error, trace: mesh.close(failed=kind is not None))
    agreement = Agreement(mesh, patience, timeout)
    held.callback(agreement.close)
    held.callback(AtCollection(owner, _leave, mesh, agreement).detach)
    return mesh, agreement


def program_agreement(job: Agreement, mesh: DataMesh, patience: float, timeout: float, held: ExitStack) -> Agreement:
    """That of the ranks that run this rank's program, until ``held`` ends; ``job`` itself where all ranks do."""
    if len(mesh.program_ranks) == mesh.world:
        return job
    peers = Peers(mesh, mesh.program_ranks, lambda: mesh.program)
    made = Agreement(mesh, patience, timeout, peers, job)
    held.callback(made.close)
    return made


def _leave(mesh: DataMesh, agreement: Agreement) -> None:
    agreement.close()
    mesh.leave()


@dataclass(eq=False)
class Comm:
    """Made once for whatever spans ranks: an engine, or parameters that are split before there is one.

    Attributes:
        mesh: who the other ranks are, and the process groups of each axis.
        agreement: what comes next, and waiting that ends, among the ranks that run one program.
        transport: carries tensors.
        meter: counts their bytes.
        memory: of the device that the tensors are on.
    """

    mesh: DataMesh
    agreement: Agreement
    transport: Transport
    meter: Meter
    memory: DeviceTier

    @classmethod
    def of(cls, mesh: DataMesh, agreement: Agreement, memory: DeviceTier) -> Comm:
        """With the transport that the backend and the device of ``mesh`` have; every rank calls it."""
        waits = agreement if agreement.peers.size > 1 else agreement.job
        talking = {id(each.group): each for each in (agreement.job.peers, agreement.peers) if each.size > 1}
        transport = data_transport(
            memory.device,
            mesh.groups(),
            [(peers.group, peers.ranks) for peers in talking.values()],
            mesh.rank,
            on_streams=mesh.on_streams,
            empty=memory.empty,
            recycle=memory.recycle,
            exchange=agreement.job.exchange,
            waiter=waits.wait,
        )
        for peers in talking.values():
            peers.carry(transport.words(peers.group))
        return cls(mesh, agreement, transport, Meter(mesh), memory)

    @property
    def job(self) -> Agreement:
        """The same among all ranks."""
        return self.agreement.job

    def sever(self) -> None:
        """On any thread: what is under way comes to nothing, so whoever waits in it raises, here and on other ranks.
        What others may read of this rank's memory stays as it is."""
        ask_no_more()
        self.transport.sever()
        self.mesh.break_off()

    @property
    def waited(self) -> float:
        """Seconds that this rank's host has waited for others so far."""
        return self.agreement.waited + (self.job.waited if self.job is not self.agreement else 0.0)

    @property
    def messages(self) -> MessageCount:
        """Between hosts so far."""
        mine, job = self.agreement.messages, self.job
        return mine if job is self.agreement else mine.plus(job.messages)

    def collective(
        self,
        op: Op,
        flat: Tensor,
        *,
        pending: list[Pending],
        out: Tensor | None = None,
        add: bool = False,
        resident: Tensor | None = None,
        state: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> None:
        """Hands one flat to the transport, in the format that ``op`` says, and counts what this rank sends; ``pending``
        gets what is to be waited for. ``out``, ``add`` and ``resident``: see the transport; ``state``: what the format
        keeps; ``codes``: this rank's part of a gather, where that is encoded already."""
        agreement = self._among(op.axes)
        with agreement.uninterrupted():
            agreement.issue(op)
            self._send(op, flat, pending, out, add, resident, state, codes)
            self.meter.count(op, flat.numel())

    def _send(
        self,
        op: Op,
        flat: Tensor,
        pending: list[Pending],
        out: Tensor | None,
        add: bool,
        resident: Tensor | None,
        state: Tensor | None,
        codes: Tensor | None,
    ) -> None:
        group = self.mesh.group(op.axes)
        if op.kind != "ALL_GATHER" or op.verb in KINDS:
            self.memory.after_compute()  # which writes the gradients; what gathers read was written before the pass
        with self.memory.side():
            if TORCH_DTYPES.get(op.format) is not flat.dtype or op.target == "node":
                pending += self._encoded(op, flat, group, out, add=add, state=state, codes=codes)
            elif op.kind == "ALL_GATHER":
                pending.append(self.transport.all_gather(flat, group, resident=resident))
            elif op.kind == "LOG":
                assert out is not None
                pending.append(self._passed_on(flat, out, op.axes))
            elif op.kind == "REDUCE_SCATTER":
                assert out is not None
                pending.append(self.transport.reduce_scatter(flat, out, group, add=add))
            else:
                pending.append(self.transport.all_reduce(flat, group))

    def _encoded(
        self,
        op: Op,
        flat: Tensor,
        group: Any,
        out: Tensor | None,
        *,
        add: bool,
        state: Tensor | None,
        codes: Tensor | None,
    ) -> tuple[Pending, Pending]:
        """As :meth:`collective`, of a flat that does not travel as it lies."""
        form = FORMATS[op.format]
        if op.kind == "ALL_GATHER":
            return gather_encoded(self.transport, self.memory, form, flat, group, codes)
        assert op.kind == "REDUCE_SCATTER" and out is not None  # tables of which others would be are not bound
        parts = nodes(self.mesh)[0] if op.target == "node" else 1
        return scatter_encoded(self.transport, self.memory, form, flat, out, group, add=add, state=state, parts=parts)

    def _passed_on(self, sent: Tensor, received: Tensor, axes: Axes, *, back: bool = False) -> Pending:
        """What each rank along the axes sends to the next one, and the last to the first; ``back``: to the one
        before."""
        here, ranks = self.mesh.coords[axes[0]], self.mesh.parts(axes)
        to, by, far = [0] * ranks, [0] * ranks, -1 if back else 1
        to[(here + far) % ranks], by[(here - far) % ranks] = sent.numel(), received.numel()
        return self.transport.exchange(sent, to, received, by, self.mesh.group(axes))

    def pass_on(self, several: Sequence[tuple[Tensor, Tensor]], axes: Axes, what: str, *, back: bool = False) -> None:
        """Each rank along the axes gets, in the second tensor of each pair, what the first is on the one before it, or
        ``back`` on the next one; all at once, asked for, and of no step."""
        agreement, pending = self._among(axes), list[Pending]()
        with agreement.uninterrupted():
            self.memory.after_compute()
            for sent, received in several:
                agreement.issue(what)
                pending.append(self._passed_on(sent, received, axes, back=back))
                self.meter.ask("LOG", axes, sent.nbytes)
            drain(pending, agreement.wait)

    def bundle(
        self,
        op: Op,
        flats: Sequence[Tensor],
        *,
        pending: list[Pending],
        outs: Sequence[Tensor] = (),
        states: Sequence[Tensor | None] = (),
    ) -> None:
        """As :meth:`collective`, of several flats that one collective carries, encoded."""
        agreement, form = self._among(op.axes), FORMATS[op.format]
        with agreement.uninterrupted():
            agreement.issue(op)
            group = self.mesh.group(op.axes)
            self.memory.after_compute()  # which writes what is sent
            with self.memory.side():
                if op.kind == "ALL_GATHER":
                    pending += gather_bundle(self.transport, self.memory, form, flats, group)
                else:
                    pending += scatter_bundle(self.transport, self.memory, form, flats, outs, group, states=states)
            self.meter.count(op, sum(flat.numel() for flat in flats))

    def relay(
        self, op: Op, flat: Tensor, payload: Tensor | None, *, pending: list[Pending], codes: Tensor | None = None
    ) -> Tensor:
        """As :meth:`collective`, one of the two hops of a gather: the first gives the payload, which the second takes
        when it is there."""
        with self.agreement.uninterrupted(), self.memory.side():
            self.agreement.issue(op)
            form, length = FORMATS[op.format], flat.numel()
            if payload is None:
                payload, first = gather_between(self.transport, self.memory, self.mesh, form, flat, codes)
                pending.append(first)
                length //= nodes(self.mesh)[1]
            else:
                pending += gather_within(self.transport, self.memory, self.mesh, form, flat, payload)
            self.meter.count(op, length)
        return payload

    def control(self, values: list[float], op: Any, *, program: bool = False, group: bool = False) -> list[float]:
        """A few numbers reduced over all ranks, those that run this ``program``, or that take each step together (a
        ``group``), on the host."""
        agreement = self.agreement if program else self.group if group else self.job
        if agreement.peers.size == 1:
            return values
        made = torch.tensor(values, dtype=torch.float64)
        return self._reduced(agreement, made, op, "a control message").tolist()

    def any_rank(self, flags: list[bool], what: str) -> list[bool]:
        """Which of the ``flags`` any rank that runs this program set; ``what`` it is about, for messages."""
        return self._any(self.agreement, flags, what)

    def anyone(self, flags: list[bool], what: str) -> list[bool]:
        """The same of all ranks that take each step together."""
        return self._any(self.group, flags, what)

    def _any(self, agreement: Agreement, flags: list[bool], what: str) -> list[bool]:
        if agreement.peers.size == 1:
            return flags
        said = self._reduced(agreement, torch.tensor(flags, dtype=torch.uint8), dist.ReduceOp.MAX, what)
        return [bool(bit) for bit in said.tolist()]

    def _reduced(self, agreement: Agreement, tensor: Tensor, op: Any, what: str) -> Tensor:
        with agreement.uninterrupted():
            agreement.begin_message()
            agreement.issue(what)
            agreement.count()
            agreement.wait(agreement.peers.reduce(tensor, op), control=True)
        self.meter.control(tensor.nbytes)
        return tensor

    def number(self, value: Tensor, over: Axes, op: Any, what: str) -> None:
        """Reduces a 0-d tensor over axes, in place, where the tensors are: first over those of data, then along each
        other one."""
        data = tuple(axis for axis in over if axis in self.mesh.data)
        for axes in filter(None, (data, *((axis,) for axis in over if axis not in data))):
            agreement = self._among(axes)
            with agreement.uninterrupted():
                agreement.issue(what)
                agreement.wait(dist.all_reduce(value, op, group=self.mesh.group(axes), async_op=True))
            self.meter.control(value.nbytes)

    def _among(self, axes: Axes) -> Agreement:
        """That of ranks along the axes."""
        sizes = self.mesh.sizes
        return self.job if set(axes) & {*sizes.stages, *sizes.rare} else self.agreement

    @property
    def group(self) -> Agreement:
        """That of the ranks that take each step together: all, but those of other groups along a rare axis."""
        return self.agreement if self.mesh.sizes.rare else self.job

    def broadcast(
        self, values: Tensor, what: str, source: int = 0, *, over: Axes | None = None, detail: str = ""
    ) -> None:
        """Gives the ranks along the axes ``over`` the values of the ``source``-th of them, in place; nothing on one
        rank. None: the axes on which ranks read other things."""
        over = self.mesh.data if over is None else over
        if self.mesh.parts(over) > 1:
            agreement = self._among(over)
            with agreement.uninterrupted():
                agreement.issue(what, detail)
                group = self.mesh.group(over)
                agreement.wait(dist.broadcast(values, group_src=source, group=group, async_op=True))

    def sum_among(self, values: Tensor, places: Sequence[int], what: str) -> None:
        """Sums over the ranks at these places along the stages, in place."""
        with self.job.uninterrupted():
            self.job.aside(what)
            group = self.mesh.among(places)
            self.job.wait(dist.all_reduce(values, group=group, async_op=True))
        self.meter.send(
            Sent(LAYERS, "SHARE", self.mesh.sizes.stages), int(ring_bytes("ALL_REDUCE", values.nbytes, len(places)))
        )

    def broadcast_among(self, values: Tensor, places: Sequence[int], what: str) -> None:
        """Gives the ranks at these places along the stages the values of the first."""
        with self.job.uninterrupted():
            self.job.aside(what)
            group = self.mesh.among(places)
            first = sorted(places).index(places[0])
            self.job.wait(dist.broadcast(values, group_src=first, group=group, async_op=True))

    def close(self) -> None:
        """Nothing is sent any more; mesh and agreement end as :func:`joined` says."""
        self.agreement.close()  # first, so that whoever finds the transport closed knows why
        self.transport.close()
        self.memory.close()
