"""Where inf and NaN came from: which module, parameter, rank, step and micro-batch were first.

:func:`check` reads every state once and asks all ranks; it costs nothing while it is not called. What it finds in
gradients has been summed over ranks by then, so it tells the parameter but not who spoiled it. An
:class:`ActivationWatch` can: it sums what every module returns, and what comes back for it, and looks at the sums only
when a report is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardfold.errors import UsageError
from shardfold.plan.checks import known_arguments
from shardfold.plan.report import KINDS, Finding
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.pickling import copy_without_hooks, forget_hooks
from shardfold.sharding.replicas import differing
from shardfold.sharding.segment import Segment
from shardfold.sharding.unit import Unit
from shardfold.torch_internals import in_backward, untraced

__all__ = ["ActivationWatch", "NumericsReport", "UnitNumbers", "check", "examine", "replicas"]


class UnitNumbers(NamedTuple):
    """One state of one unit over all ranks: its smallest and largest finite element, NaN where none is finite, and the
    norm of these.

    Examples:
        >>> numbers = sf.numerics.check(engine).units[0]
        >>> numbers.minimum <= numbers.maximum
        True
    """

    unit: str
    state: str
    minimum: float
    maximum: float
    norm: float
    num_nonfinite: int


class NumericsReport(NamedTuple):
    """What :func:`check` found: ``findings`` with the likely cause first, and numbers of every unit.

    Examples:
        >>> report = sf.numerics.check(engine)
        >>> len(report.findings)
        0
    """

    findings: tuple[Finding, ...]
    units: tuple[UnitNumbers, ...]

    @property
    def finite(self) -> bool:
        return not self.findings

    @property
    def first(self) -> str:
        """Half a sentence on what was found."""
        if not self.findings:
            return "everything is finite"
        others = len(self.findings) - 1
        more = f", and in {others} more place{'s' if others > 1 else ''}" if others else ""
        return f"inf or NaN first in {self.findings[0]}{more}"

    def table(self) -> str:
        """The numbers of every unit."""
        lines = [f"{'unit':<24}{'state':<14}{'min':>12}{'max':>12}{'norm':>12}{'inf/NaN':>9}"]
        for row in self.units:
            lines.append(
                f"{row.unit:<24}{row.state:<14}{row.minimum:>12.4g}{row.maximum:>12.4g}{row.norm:>12.4g}"
                f"{row.num_nonfinite:>9}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.first}.\n{self.table()}"


class Notes(Protocol):
    """What is known of the losses of a step, and who watches the modules.

    Attributes:
        watch: the one there is.
    """

    watch: ActivationWatch | None

    def bad_losses(self) -> list[int]:
        """The micro-batches whose loss on this rank is inf or NaN."""
        ...

    def good_losses(self) -> list[int]:
        """Those whose loss is finite."""
        ...

    def hear(self, watch: ActivationWatch | None) -> None:
        """It watches the modules from now on; None: nobody does."""
        ...

    def count(self) -> int:
        """An examination begins, the same on all ranks: its number."""
        ...

    def close(self) -> None:
        """Ends a watch that nobody asked for."""
        ...


class SupportsCheck(Protocol):
    """An engine."""

    @property
    def sharded(self) -> ShardedModel: ...
    @property
    def alarm(self) -> Notes: ...


@known_arguments
class ActivationWatch:
    """Sums the outputs of every module, and their gradients, in each training forward of an engine.

    Nothing is read on the host, and nothing sent, until a report is made; the sums of one step are kept. Modules that
    the model gets later are not watched, and copies of the model are not either.

    Examples:
        >>> watch = sf.numerics.ActivationWatch(engine)
        >>> engine.backward(engine(x).square().mean())
        >>> engine.step().updated
        True
        >>> watch.close()
    """

    def __init__(self, engine: SupportsCheck) -> None:
        self._begin(engine.sharded, engine.alarm)

    @classmethod
    def over(cls, model: ShardedModel, notes: Notes) -> ActivationWatch:
        """The same, for who has no engine."""
        watch = cls.__new__(cls)
        watch._begin(model, notes)
        return watch

    def _begin(self, model: ShardedModel, notes: Notes) -> None:
        notes.close()  # its own, in whose place this one is
        if notes.watch is not None:
            raise UsageError("this engine has an ActivationWatch already: close() that one first.")
        self._run, self._notes = model.run, notes
        self._attempt = -1
        self._sums: list[tuple[str, str, int, Tensor]] = []  # kind, path, micro-batch, sum
        self._last: Callable[[], Tensor | None] = lambda: None  # what was summed last in forward
        self._handles: list[tuple[nn.Module, RemovableHandle]] = []
        for path, module in model.module.named_modules():
            handle = module.register_forward_hook(untraced(self._hook(path or "the model")))
            copy_without_hooks(module, [handle.id])
            self._handles.append((module, handle))
        notes.hear(self)

    def close(self) -> None:
        """Takes the hooks off."""
        for module, handle in self._handles:
            handle.remove()
            forget_hooks(module, [handle.id])
        self._handles.clear()
        self._sums.clear()
        if self._notes.watch is self:
            self._notes.hear(None)

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or in_backward():
                return
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    if self._last() is tensor:  # what its last module returned
                        continue
                    self._last = ref(tensor)
                    micro = self._run.micro_batch
                    self._add("output", path, micro, tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(partial(self._add, "gradient of the output", path, micro))

        return hook

    def _add(self, kind: str, path: str, micro: int, tensor: Tensor) -> None:
        if self._attempt != self._run.attempt:
            self._attempt = self._run.attempt
            self._sums.clear()
        self._sums.append((kind, path, micro, tensor.detach().sum(dtype=torch.float32)))

    def found(self) -> Iterator[tuple[str, str, int]]:
        """Kind, path and micro-batch of what is not finite in this step, in the order in which it was computed."""
        now = self._run.attempt
        return (item[:3] for item in self._sums if self._attempt == now and not bool(torch.isfinite(item[3])))


@known_arguments
def check(engine: SupportsCheck) -> NumericsReport:
    """Reads parameters, gradients (once all are summed, before ``step()``), the optimizer's states and buffers, and the
    sums of a :class:`ActivationWatch`, on every rank. Every rank calls it, between passes.

    Examples:
        >>> report = sf.numerics.check(engine)
        >>> report.findings
        ()
    """
    model = engine.sharded
    model.gate.meet("sf.numerics.check()")
    with model.gate.gradients_hidden():
        return examine(model, engine.alarm)


@known_arguments
def replicas(engine: SupportsCheck) -> list[str]:
    """The names of parameters that should be equal on the ranks along an axis of tensor, and are not; the same on every
    rank, empty where all is well. Every rank calls it, between passes.

    Examples:
        >>> sf.numerics.replicas(engine)  # names of parameters that differ between ranks and should not
        []
    """
    engine.sharded.gate.meet("sf.numerics.replicas()")
    return differing(engine.sharded)


def examine(model: ShardedModel, notes: Notes, *, only_gradients: bool = False) -> NumericsReport:
    """As :func:`check`, where all ranks are known to be at the same place already.

    ``only_gradients`` leaves out the other states, and all numbers.
    """
    step = model.run.steps + 1
    found: list[tuple[str, str, int | None, int | None]] = []
    numbers: dict[str, list[float]] = {}
    for unit in model.units:
        for segment in unit.segments:
            copies = _copies(model, segment)
            for state, flat, factor in _states(model, unit, segment, only_gradients):
                found += _look(segment, state, flat)
                if not only_gradients:
                    row = numbers.setdefault(json.dumps([unit.name, state, copies]), [inf, -inf, 0.0, 0.0])
                    _count(row, segment, flat, factor)
    for name, buffer in model.module.named_buffers() if not only_gradients else ():
        if buffer.is_floating_point() and (bad := _nonfinite(buffer)):
            found.append(("buffer", name, None, bad))
    found += [("loss", "", micro, None) for micro in notes.bad_losses()]
    if notes.watch is not None:
        harmless = notes.good_losses()  # whose inf came to nothing: a mask's
        found += [
            (kind, path, micro, None)
            for kind, path, micro in notes.watch.found()
            if kind != "output" or micro not in harmless
        ]
    group = model.comm.group
    said = group.exchange(f"check/{notes.count()}", json.dumps([found, numbers]))
    defined = {name: place for place, (name, _) in enumerate(model.module.named_parameters(remove_duplicate=False))}
    findings: list[tuple[tuple[int, int, int], Finding]] = []
    rows: dict[str, list[float]] = {}
    for other, text in zip(group.peers.ranks, said, strict=True):
        theirs, counted = json.loads(text)
        for place, (kind, name, micro, count) in enumerate(theirs):
            if kind == "gradient":  # backward comes from the end of a model
                place = -defined.get(name, 0)
            key = (KINDS.index(kind), micro or 0, place)
            findings.append((key, Finding(kind, name, other, step, micro, count)))
        for key, row in counted.items():
            mine = rows.setdefault(key, [inf, -inf, 0.0, 0.0])
            rows[key] = [min(mine[0], row[0]), max(mine[1], row[1]), mine[2] + row[2], mine[3] + row[3]]
    once: dict[tuple[str, str], list[float]] = {}  # each element of a unit's state
    for key, (low, high, squares, bad) in rows.items():
        name, state, copies = json.loads(key)
        row = once.get((name, state), [inf, -inf, 0.0, 0])
        once[name, state] = [min(row[0], low), max(row[1], high), row[2] + squares / copies, row[3] + bad // copies]
    units = [
        UnitNumbers(*key, *((low, high) if low <= high else (nan, nan)), squares**0.5, int(bad))
        for key, (low, high, squares, bad) in once.items()
    ]
    return NumericsReport(tuple(f for _, f in sorted(findings, key=lambda item: (item[0], item[1].rank))), tuple(units))


def _copies(model: ShardedModel, segment: Segment) -> int:
    """On how many ranks each element of a segment's master is."""
    mesh = model.comm.mesh
    return mesh.world // mesh.parts(mesh.sizes.normed(segment.table.master.over, segment.spec.distinct))


def _states(
    model: ShardedModel, unit: Unit, segment: Segment, only_gradients: bool = False
) -> Iterator[tuple[str, Tensor, float]]:
    """Name, this rank's shard of the master range, and what its numbers are to be multiplied by."""
    if not segment.spec.trainable:
        return
    master, grads = segment.shard("master"), segment.shard("grads")
    assert master is not None and grads is not None
    if not only_gradients:
        yield "parameter", master.read().detach(), 1.0
    if model.run.gradients_ready:
        unit.gradients.complete()
        yield "gradient", segment.master_grads if grads.memory is not None else grads.read(), segment.unscale
    update = model.updater
    if update is not None and not only_gradients:
        for name, dtype in update.state_dtypes().items():
            yield name, update.state_shard(segment, name, dtype), 1.0


def _look(segment: Segment, state: str, flat: Tensor) -> Iterator[tuple[str, str, int | None, int | None]]:
    if bool(torch.isfinite(flat.sum(dtype=torch.float32))):
        return
    for slot, spec in enumerate(segment.spec.slots):
        if bad := _nonfinite(flat[segment.own_piece(slot)[0]]):
            if state in KINDS:
                yield state, spec.name, None, bad
            else:
                yield "state", f"{state} of {spec.name}", None, bad


def _nonfinite(tensor: Tensor) -> int:
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def _count(row: list[float], segment: Segment, flat: Tensor, factor: float) -> None:
    """Takes what lies in a rank's shard into its unit's row; padding is no element."""
    for slot in range(len(segment.spec.slots)):
        piece = flat[segment.own_piece(slot)[0]]
        finite = piece[torch.isfinite(piece)].double() * factor
        if finite.numel():
            row[0], row[1] = min(row[0], float(finite.min())), max(row[1], float(finite.max()))
            row[2] += float(finite.square().sum())
        row[3] += piece.numel() - finite.numel()
