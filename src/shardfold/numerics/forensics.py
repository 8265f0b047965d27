"""Where inf and NaN came from: which module, parameter, rank, step and micro-batch were first.

:func:`check` reads every state once and asks all ranks; it costs nothing while it is not called. What it finds in
gradients has been summed over ranks by then, so it tells the parameter but not who spoiled it. A :class:`Watch` can: it
sums what every module returns, and what comes back for it, and looks at the sums only when a report is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardfold.errors import UsageError

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["Finding", "NumericsReport", "UnitNumbers", "Watch", "check", "examine"]

KINDS = ("parameter", "buffer", "output", "loss", "gradient of the output", "gradient", "state")
"""What can be found, causes before what they spoil."""


class Finding(NamedTuple):
    """Something that is inf or NaN.

    Attributes:
        kind: one of :data:`KINDS`.
        name: of the module (outputs), parameter, buffer, or optimizer state (``exp_avg of head.weight``).
        rank: that has it; of a gradient the rank whose shard it is in, which need not be the one it came from.
        step: the update that was to be, counted from 1.
        micro_batch: counted from 0 within the step, where it is known.
        num_elements: how many of it, where they were counted.
    """

    kind: str
    name: str
    rank: int
    step: int
    micro_batch: int | None = None
    num_elements: int | None = None

    def __str__(self) -> str:
        what = f"the {self.kind} of {self.name}" if self.kind in KINDS[2:5:2] else f"{self.kind} {self.name}".strip()
        batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        count = "" if self.num_elements is None else f" ({self.num_elements} elements)"
        return f"{what} on rank {self.rank}, step {self.step}{batch}{count}"


class UnitNumbers(NamedTuple):
    """One state of one unit over all ranks: its smallest and largest finite element and the norm of these."""

    unit: str
    state: str
    minimum: float
    maximum: float
    norm: float
    num_nonfinite: int


class NumericsReport(NamedTuple):
    """What :func:`check` found: ``findings`` with the likely cause first, and numbers of every unit."""

    findings: tuple[Finding, ...]
    units: tuple[UnitNumbers, ...]

    @property
    def finite(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        first = f"inf or NaN first in {self.findings[0]}" if self.findings else "everything is finite"
        more = f", and in {len(self.findings) - 1} more places" if len(self.findings) > 1 else ""
        lines = [first + more + ".", f"{'unit':<24}{'state':<14}{'min':>12}{'max':>12}{'norm':>12}{'inf/NaN':>9}"]
        for row in self.units:
            lines.append(f"{row.unit:<24}{row.state:<14}{row.minimum:>12.4g}{row.maximum:>12.4g}{row.norm:>12.4g}"
                         f"{row.num_nonfinite:>9}")  # fmt: skip
        return "\n".join(lines)


class Watch:
    """Sums the outputs of every module, and their gradients, in each training forward of an engine.

    Nothing is read on the host, and nothing sent, until a report is made; the sums of one step are kept.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.watch is not None:
            raise UsageError("this engine has a Watch: close() it before another is made.")
        self._engine = engine
        self._step = -1
        self._sums: list[tuple[str, str, int, Tensor]] = []  # kind, path, micro-batch, sum
        self._handles: list[RemovableHandle] = []
        for path, module in engine.module.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(path or "the model")))
        engine.watch = self

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sums.clear()
        self._engine.watch = None

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:  # pyright: ignore
                return
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    micro = self._engine.micro_batch
                    self._add("output", path, micro, tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(partial(self._add, "gradient of the output", path, micro))

        return hook

    def _add(self, kind: str, path: str, micro: int, tensor: Tensor) -> None:
        if self._step != (now := self._attempt()):
            self._step = now
            self.forget()
        self._sums.append((kind, path, micro, tensor.detach().sum(dtype=torch.float32)))

    def _attempt(self) -> int:
        """Which step is under way, skipped ones counted."""
        scaler = self._engine.loss_scale
        return self._engine.steps + (scaler.skipped if scaler is not None else 0)

    def forget(self) -> None:
        """The micro-batches since the last step are no more."""
        self._sums.clear()

    def found(self) -> Iterator[tuple[str, str, int]]:
        """Kind, path and micro-batch of what is not finite in this step, in the order in which it was computed."""
        if self._step != self._attempt():
            self.forget()
        return ((kind, path, micro) for kind, path, micro, total in self._sums if not bool(torch.isfinite(total)))


def check(engine: Engine) -> NumericsReport:
    """Reads parameters, gradients (once all are summed, before ``step()``), the optimizer's states and buffers, and the
    sums of a :class:`Watch`, on every rank. Every rank calls it, between passes."""
    engine._meet("sf.numerics.check()")
    return examine(engine)


def examine(engine: Engine) -> NumericsReport:
    """As :func:`check`, where all ranks are known to be at the same place already."""
    step = engine.steps + 1
    found: list[tuple[str, str, int | None, int | None]] = []
    numbers: dict[str, list[float]] = {}
    for unit in engine.units:
        for segment in unit.segments:
            for state, flat, factor in _states(engine, unit, segment):
                found += _look(segment, state, flat)
                _count(numbers.setdefault(json.dumps([unit.name, state]), [inf, -inf, 0.0, 0.0]), flat, factor)
    for name, buffer in engine.module.named_buffers():
        if buffer.is_floating_point() and (bad := _nonfinite(buffer)):
            found.append(("buffer", name, None, bad))
    found += [
        ("loss", "", i, None)
        for i, loss in enumerate(engine.losses if engine.micro_batch else ())
        if not bool(torch.isfinite(loss).all())
    ]
    if engine.watch is not None:
        found += [(kind, path, micro, None) for kind, path, micro in engine.watch.found()]
    said = engine.agreement.exchange(f"check/{engine.agreement.sequence}", json.dumps([found, numbers]))
    findings: list[tuple[tuple[int, int, int], Finding]] = []
    rows: dict[str, list[float]] = {}
    for other, text in enumerate(said):
        theirs, counted = json.loads(text)
        for place, (kind, name, micro, count) in enumerate(theirs):
            key = (KINDS.index(kind), micro or 0, place)
            findings.append((key, Finding(kind, name, other, step, micro, count)))
        for key, row in counted.items():
            mine = rows.setdefault(key, [inf, -inf, 0.0, 0.0])
            rows[key] = [min(mine[0], row[0]), max(mine[1], row[1]), mine[2] + row[2], mine[3] + row[3]]
    names: dict[str, list[str]] = {key: json.loads(key) for key in rows}
    copies = engine.world_size / engine.mesh.parts(engine.layout.master.over)
    units = [
        UnitNumbers(names[key][0], names[key][1], low, high, (squares / copies) ** 0.5, int(bad / copies))
        for key, (low, high, squares, bad) in rows.items()
    ]
    return NumericsReport(tuple(f for _, f in sorted(findings, key=lambda item: (item[0], item[1].rank))), tuple(units))


def _states(engine: Engine, unit: Any, segment: Any) -> Iterator[tuple[str, Tensor, float]]:
    """Name, this rank's shard of the master range, and what its numbers are to be multiplied by."""
    if segment.master is None:
        return
    yield "parameter", segment.master.detach(), 1.0
    if engine.gradients_ready:
        if unit.resting is not None and not unit.reduced:
            unit.resting.complete()
        yield "gradient", segment.master_grads, segment.unscale
    update = engine._update
    for name, dtype in (update.state_dtypes() if update is not None else {}).items():
        yield name, update.state_shard(segment, name, dtype), 1.0  # pyright: ignore[reportOptionalMemberAccess]


def _look(segment: Any, state: str, flat: Tensor) -> Iterator[tuple[str, str, int | None, int | None]]:
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


def _count(row: list[float], flat: Tensor, factor: float) -> None:
    finite = flat[torch.isfinite(flat)].double() * factor
    if finite.numel():
        row[0], row[1] = min(row[0], float(finite.min())), max(row[1], float(finite.max()))
        row[2] += float(finite.square().sum())
    row[3] += flat.numel() - finite.numel()
