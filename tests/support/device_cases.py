"""Trainings on the simulated device, one per combination of what the engine offers, beside the same on the CPU.

    python tests/support/device_cases.py                all cases, in a table: races, waits of the host, seconds
    python tests/support/device_cases.py hsdp muon      those whose name has one of these words
    python tests/support/device_cases.py --core         the few that `make test` runs

Options are combined by pairs: each two values of two options meet in some case, which finds what two options do to each
other at a thousandth of the cost of all combinations.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.checkpoint import save
from shardfold.checkpoint.files import UnwrittenPiece
from shardfold.comm.comm import Comm
from shardfold.comm.transport import Pending, drain
from shardfold.parallel import Attention
from shardfold.plan.program import Op
from shardfold.testing import Ranks, RanksFailed
from shardfold.testing.simulated import simulated
from shardfold.tiers.host import HostTier

F = nn.functional
WIDTH, WORDS, LENGTH, BATCH = 16, 32, 8, 2
STEPS, SETTLED = 5, 2
"""Steps of a training, and how many of them may wait for the device: the first record the order of units."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        layout, precision, activations, accumulate: of the engine; ``sliced`` and ``sliced_on_host``: recomputed, with
            inputs in slices over the axis of tensor.
        optimizer: one of :data:`OPTIMIZERS`.
        clip: by which norm; empty: none.
        moments: the tier that they rest in.
        offload: what else rests in a slower tier: ``master``, with ``grads``, or with ``params`` too; empty: nothing.
        onto: which tier that is.
        model: ``gpt``; ``twice``: its blocks run twice in a pass; ``norms``: with BatchNorm, whose buffers travel;
            ``early``: made under :func:`shardfold.sharded_init`.
        also: what else happens, one of :data:`EVENTS`; ``copies``, ``drops`` and ``sums`` are of the device alone.
        order: of units (see :class:`shardfold.Overlap`); with ``any`` no reduction is under way while others go on, and
            ``beside`` is the recorded one with a thread of updates, ``ahead`` one with updates before their step,
            ``behind`` one with updates behind it.
        debug: freed memory is filled with NaN.
        gather, reduce: the format on the link; empty: as the elements lie.
        axis: ``tensor``, or ``ring`` or ``ulysses`` along an axis of sequence: all ranks are along it.
        ranks: how many, in groups of two where there are four.
    """

    layout: str = "zero3"
    precision: str = "fp32"
    activations: str = "keep"
    optimizer: str = "adamw"
    clip: str = ""
    accumulate: int = 1
    moments: str = "device"
    offload: str = ""
    onto: str = "host"
    model: str = "gpt"
    also: str = ""
    order: str = "recorded"
    debug: str = ""
    gather: str = ""
    reduce: str = ""
    axis: str = ""
    ranks: int = 2

    @property
    def name(self) -> str:
        """What is not as usual."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "layout"}
        usual = Case()
        said = [_said(name, value) for name, value in values.items() if value != getattr(usual, name)]
        return "-".join([self.layout, *said])


def _said(name: str, value: Any) -> str:
    return {"accumulate": f"of{value}", "moments": f"moments_on_{value}", "ranks": f"{value}ranks"}.get(
        name, f"{name}_{value}" if name in ("gather", "reduce", "clip", "order", "offload", "onto") else str(value)
    )


@dataclass(frozen=True)
class Outcome:
    """Of one rank.

    Attributes:
        losses: of every micro-batch.
        races, mixed: what is wrong.
        waits: how often the host waited for the device behind the first steps, by what and where.
        seconds: of the training.
    """

    losses: list[float]
    races: list[str]
    mixed: dict[str, int]
    waits: dict[str, int]
    seconds: float


# -- the model --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Of a transformer; ``norms``: with a BatchNorm between its matrices."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        self.attend = Attention(heads=2)
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # What adds one vector to all that a BatchNorm reads has gradients of rounding and nothing else, which Adam
        # scales up, and which show in evaluation.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=not norms), nn.Linear(WIDTH, WIDTH, bias=not norms)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.batch = nn.BatchNorm1d(WIDTH) if norms else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        if self.batch is not None:
            x = self.batch(x.flatten(0, 1)).view(b, t, d)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Transformer(nn.Module):
    """A few layers. ``twice``: two that run twice; ``left_out``: that one is left out now; ``raises``: where."""

    def __init__(self, kind: str = "gpt") -> None:
        super().__init__()
        self.twice, self.left_out, self.raises = kind == "twice", -1, ""
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(kind == "norms") for _ in range(2 if self.twice else 3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for number, layer in [*enumerate(self.layers)] * (2 if self.twice else 1):
            if number == 1 and self.raises == "forward":
                raise Raised
            if number != self.left_out:
                x = layer(x)
            if number == 1 and self.raises == "backward":
                x.register_hook(_raise)
        return self.head(self.norm(x))


# -- what is combined -------------------------------------------------------------------------------------------------

_torch, _ours = torch.optim, sf.optim
OPTIMIZERS: Mapping[str, Any] = {
    "adamw": partial(_torch.AdamW, lr=1e-2),
    "sgd": partial(_torch.SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(_torch.Adagrad, lr=1e-2),
    "rmsprop": partial(_torch.RMSprop, lr=1e-3),
    "lion": partial(_ours.Lion, lr=1e-3),
    "lamb": partial(_ours.LAMB, lr=1e-2),
    "adafactor": partial(_ours.Adafactor, lr=1e-2),
    "muon": lambda params: _ours.Muon(  # by shape: the engine gives no names
        [
            {"params": [p for p in params if p.dim() == 2], "lr": 1e-2},
            {"params": [p for p in params if p.dim() != 2], "adamw": True, "lr": 1e-2},
        ]
    ),
    "adamw8bit": partial(_ours.AdamW8bit, lr=1e-2, min_8bit_size=0),
}

EVENTS = ("", "saves", "loads", "averages", "evaluates", "gathers", "leaves_out", "raises", "own_stream")


class Raised(Exception):
    """Of a model's backward, on all ranks."""


def _event(
    case: Case, step: int, engine: sf.Engine, folder: Path, ids: torch.Tensor, model: Transformer
) -> torch.Tensor | None:
    """What happens behind a step; a number that may not depend on the device, if there is one."""
    if case.also == "saves" and step == 1:
        engine.save(folder / "saved")
    elif case.also == "loads" and step == 1:
        engine.save(folder / "saved", wait=True)
        engine.load(folder / "saved")
    elif case.also == "evaluates":
        engine.module.eval()
        with torch.no_grad():
            out = engine(ids).float().logsumexp(-1).mean()
        engine.module.train()
        return out
    elif case.also == "gathers":
        with engine.gathered("head.bias", write=True) as bias, torch.no_grad():
            bias.mul_(1.01)
        with engine.gathered(of="master") as values:
            assert all(value is None or value.device == engine.device for value in values.values())
        with engine.gathered(write=True), torch.no_grad():
            model.norm.weight.mul_(1.01)
    elif case.also == "raises" and step == 1:
        for model.raises in ("forward", "backward"):
            with suppress(Raised):
                engine.backward(engine(ids).float().square().mean())
            model.raises = ""
            engine.reset()
    elif case.also == "leaves_out":  # another layer on each rank, in the next step
        model.left_out = (step + dist.get_rank()) % 4 - 1
    elif case.also == "copies":
        return _copies(engine.device)
    elif case.also == "drops":
        return _drops(engine.device)
    elif case.also == "sums":
        return _sums(engine.sharded.comm)
    return None


def _computed(device: torch.device) -> torch.Tensor:
    """Ones, once a device that lags is done with it."""
    values = torch.zeros(4096, device=device)
    for _ in range(64):
        values = values + 1 / 64
    return values


def _copies(device: torch.device) -> torch.Tensor:
    """What a save reads at once of values that were queued just now."""
    values = _computed(device)
    piece: Any = SimpleNamespace(dtype="F32", nbytes=values.nbytes)
    [part], _ = save._copied([UnwrittenPiece(piece, values)], [])
    assert isinstance(part.values, torch.Tensor)
    return part.values.double().mean()


def _drops(device: torch.device) -> torch.Tensor:
    """What is in memory in which values were to come back that nobody asks for."""
    region = HostTier(device).allocate((4096,), torch.float32)
    region.store(_computed(device))
    into = torch.empty(4096, device=device)
    region.fetch(into)
    region.drop()
    del into
    return torch.full((4096,), 2.0, device=device).mean()


def _sums(comm: Comm) -> torch.Tensor:
    """What is in memory of which some is taken, beside the computation, as soon as a sum needs none any more."""
    out = torch.zeros(4096 // comm.mesh.data_ranks, device=comm.memory.device)
    for form in ("fp32", "bf16"):
        pending: list[Pending] = []
        op = Op("REDUCE_SCATTER", "sums", comm.mesh.data, form)
        comm.collective(op, _computed(comm.memory.device), pending=pending, out=out, add=True)
        drain(pending, comm.agreement.wait)
        with comm.memory.side():
            comm.memory.empty(4096, torch.float32).zero_()
    return out.mean()


def _raise(grad: torch.Tensor) -> None:
    raise Raised


def train(
    case: Case, device: str, folder: str, *, mode: str = "check", seed: int = 0, lag: int = 64, steps: int = STEPS
) -> Outcome:
    """Trains on this rank; ``folder``: of all ranks."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    begun = time.perf_counter()
    with ExitStack() as held:
        sim = held.enter_context(simulated(mode, seed + rank, lag)) if device == "sim" else None
        if sim is not None and case.also == "own_stream":
            held.enter_context(torch.sim.Stream())  # type: ignore[attr-defined]
        with sf.sharded_init(device=device) if case.model == "early" else nullcontext():
            model = Transformer(case.model)
        engine = _engine(case, model, device)
        average = sf.Average(engine, 0.9) if case.also == "averages" else None
        draw = torch.Generator().manual_seed(100 + engine.data_rank)
        # On the device before the first step: a copy from pageable memory stops the host, and hides races.
        shape = (steps * case.accumulate, BATCH, LENGTH + 1)
        batches = list(torch.randint(0, WORDS, shape, generator=draw).to(device))
        losses: list[torch.Tensor] = []
        early: Counter[tuple[str, str]] = Counter()
        try:
            for step in range(steps):
                if sim is not None and step == SETTLED:
                    early = Counter(sim.host_syncs)
                for ids in batches[step * case.accumulate : (step + 1) * case.accumulate]:
                    losses.append(_micro_batch(engine, ids))
                more = _event(case, step, engine, Path(folder), batches[0], model)
                losses += [] if more is None else [more]
            late = {} if sim is None else sim.host_syncs - early
            if average is not None:
                with average.applied(), torch.no_grad():
                    losses.append(engine(batches[0]).float().logsumexp(-1).mean())
            values = [float(loss) for loss in losses]
        finally:
            engine.close()
        if sim is None:
            return Outcome(values, [], {}, {}, time.perf_counter() - begun)
        found = sim.take()
        mixed = {f"{what} at {where}": n for (what, where), n in found.mixed.items()}
        waits = {f"{what} at {where}": n for (what, where), n in late.items()}
        return Outcome(values, [str(race) for race in found.races], mixed, waits, time.perf_counter() - begun)


TENSOR = {"emb": "vocabulary", "*.up": "column", "*.down": "row", "head": "gathered"}


def _engine(case: Case, model: nn.Module, device: str) -> sf.Engine:
    layout = sf.PRESETS[case.layout]
    if case.moments != "device":
        layout = layout.edit("moments", tier=case.moments)
    if case.offload:
        states = ("moments", "master", "grads", "params")
        layout = layout.edit(*states[: states.index(case.offload) + 1], tier=case.onto)
    if case.gather:
        layout = layout.replace(gather=case.gather)
    if case.reduce:
        layout = layout.replace(reduce=case.reduce)
    mode = case.activations
    activations: Any = sf.Activations(mode=mode, smallest=0) if mode in ("host", "disk") else mode
    if mode.startswith("sliced"):
        rest = "host" if mode == "sliced_on_host" else "device"
        activations = sf.Activations(mode="recompute", over="tensor", inputs=rest, smallest=0)
    mesh = {"intra": 2, "inter": case.ranks // 2} if case.ranks > 2 else None
    if case.axis:
        mesh = {"tensor" if case.axis == "tensor" else "sequence": case.ranks}
    return sf.Engine(
        model,
        optimizer=OPTIMIZERS[case.optimizer],
        layout=layout,
        precision=case.precision,
        activations=activations,
        accumulate=case.accumulate,
        clip_norm=sf.Clip(norm=0.5, p=float(case.clip)) if case.clip else None,
        parallel=sf.Parallel(
            mesh=mesh,
            tensor=TENSOR if case.axis == "tensor" else None,
            attention=case.axis if case.axis in ("ring", "ulysses") else None,
        ),
        init=sf.Init(units=[Layer]),
        overlap={
            "recorded": sf.Overlap(),
            "any": sf.Overlap(order="any", reduces_in_flight=0),
            "beside": sf.Overlap(update_thread=True),
            "ahead": sf.Overlap(speculate="1GiB"),
            "behind": sf.Overlap(delayed_update=True),
        }[case.order],
        runtime=sf.Runtime(device=device, debug=bool(case.debug)),
    )


def _micro_batch(engine: sf.Engine, ids: torch.Tensor) -> torch.Tensor:
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    if engine.sequence is not None:
        batch = sf.sequence_shard(batch)
    loss = F.cross_entropy(engine(batch["tokens"]).float().flatten(0, 1), batch["targets"].flatten())
    engine.backward(loss)
    engine.step()
    return loss.detach()


# -- which cases ------------------------------------------------------------------------------------------------------

OPTIONS: Mapping[str, Sequence[Any]] = {
    "layout": ("zero3", "ddp", "zero1", "zero2", "fsdp2", "hsdp", "hpz"),
    "precision": ("fp32", "bf16", "fp16", "bf16-pure"),
    "activations": ("keep", "recompute", "host", "disk", "select"),
    "optimizer": tuple(OPTIMIZERS),
    "clip": ("", "2", "inf"),
    "accumulate": (1, 2),
    "moments": ("device", "host", "disk"),
    "offload": ("", "master", "grads", "params"),
    "onto": ("host", "disk"),
    "model": ("gpt", "twice", "norms", "early"),
    "also": EVENTS,
    "order": ("recorded", "any", "beside", "ahead", "behind"),
    "debug": ("", "debug"),
    "ranks": (2, 4),
}


def is_allowed(case: Mapping[str, Any]) -> bool:
    """Whether the engine takes these options together; of a part of a case, whether some whole one has it."""
    if case.get("moments", "device") != "device" and case.get("optimizer", "adamw") not in ("adamw", "sgd"):
        return False  # their state cannot rest elsewhere
    away, moments = case.get("offload", "master"), case.get("moments", "device")
    if case.get("onto") == "disk" and (
        not away or moments != "device" or case.get("optimizer", "adamw") not in ("adamw", "sgd")
    ):
        return False  # from files comes what a fused update reads, unit by unit
    if case.get("offload"):
        if case.get("moments", "device") != "device" or case.get("optimizer", "adamw") not in (
            "adamw",
            "sgd",
            "adagrad",
        ):
            return False  # moments rest with master; what asks other ranks for its state keeps that on the device
        if case["offload"] == "params" and case.get("layout", "zero3") not in ("zero3", "hsdp", "hpz"):
            return False  # they rest as master does
    if case.get("layout", "hpz") not in ("hsdp", "hpz", "zero3") and case.get("ranks", 2) == 4:
        return False  # what four ranks add is a second group: the others are not worth the seconds
    if case.get("order") == "behind" and (case.get("layout") == "fsdp2" or case.get("offload", "grads") == "params"):
        return False  # they need params apart from master
    if case.get("order") in ("ahead", "behind") and (
        case.get("offload", "grads") not in ("grads", "params")
        or case.get("optimizer", "adamw") not in ("adamw", "sgd")
        or case.get("moments", "device") != "device"
        or case.get("onto", "host") != "host"
    ):
        return False  # they need gradients and states in host memory, and the fused update
    if case.get("layout") in ("hsdp", "hpz") and case.get("ranks", 4) == 2:
        return False  # one group would be another layout
    if case.get("optimizer") == "adagrad" and case.get("model", "gpt") == "early":
        return False  # it asks for whole values where it is made
    # The CPU's BatchNorm does not take 16-bit weights beside fp32 statistics.
    return not (case.get("model") == "norms" and case.get("precision", "fp32") != "fp32")


def by_pairs(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Combinations in which each two allowed values of two options meet; the same ones each time."""
    missing = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(options.items(), 2)
        for x, y in itertools.product(xs, ys)
        if allowed({a: x, b: y})
    }
    found: list[dict[str, Any]] = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        case = {a: x, b: y}
        for name in (name for name in options if name not in case):
            fits = [value for value in options[name] if allowed({**case, name: value})]
            assert fits, case
            case[name] = max(fits, key=partial(_gain, missing, case, name))
        before = len(missing)
        pairs = itertools.combinations([(name, case[name]) for name in options], 2)
        missing -= set(pairs)
        assert len(missing) < before
        found.append(case)
    return found


def _gain(missing: set[Any], case: Mapping[str, Any], name: str, value: Any) -> int:
    here, order = (name, value), list(OPTIONS)
    return sum(
        ((other, here) if order.index(other[0]) < order.index(name) else (here, other)) in missing
        for other in case.items()
    )


def matrix() -> dict[str, Case]:
    """All cases by name."""
    cases = [Case(**values) for values in by_pairs(OPTIONS, is_allowed)]
    return {case.name: case for case in [*CORE, *cases]}


def named(name: str) -> Case:
    """The case of that name, one of :data:`CORE` or :data:`SINGLE`."""
    return next(case for case in [*CORE, *SINGLE] if case.name == name)


CORE = (
    Case(),
    Case("ddp", "bf16", clip="2", accumulate=2),
    Case("zero1", optimizer="muon", also="averages"),
    Case("zero2", accumulate=2, order="any", optimizer="adamw8bit", model="norms"),
    Case("fsdp2", "bf16", activations="recompute", also="saves"),
    Case(activations="host", moments="host"),
    Case(activations="disk", moments="disk", precision="fp16"),
    Case(model="twice", debug="debug", also="leaves_out"),
    Case("hpz", ranks=4, also="evaluates"),
    Case("hsdp", ranks=4, accumulate=2, clip="inf"),
    Case(gather="bf16", reduce="bf16", also="gathers"),
    Case("zero2", reduce="bf16", also="raises"),
    Case("zero2", "bf16", offload="grads", accumulate=2, clip="2"),
    Case(offload="params", also="saves"),
    Case(offload="params", precision="bf16", ranks=1),
    Case("fsdp2", optimizer="adagrad", offload="master"),
    Case("zero3", "bf16", offload="params", onto="disk", accumulate=2, clip="2"),
    Case("zero2", "bf16", offload="grads", accumulate=2, clip="2", order="ahead"),
    Case("zero2", "bf16", offload="grads", clip="2", order="behind"),
    Case("zero3", "bf16", axis="tensor", clip="2", activations="sliced_on_host"),
    Case("zero3", axis="ring", activations="recompute"),
)
"""A mechanism in each: what `make test` runs."""

SINGLE = (
    Case("zero2", "bf16", offload="grads", ranks=1), Case(ranks=1, activations="host", moments="disk", clip="2"),
    Case("zero1"), Case("zero2"), Case("fsdp2"), Case("hpz", ranks=4), Case("zero1", optimizer="muon"),
    Case(model="twice", debug="debug"), Case(accumulate=2, order="any"), Case(clip="2"),
    Case("zero2", model="norms", also="evaluates"), Case(activations="disk", moments="disk"), Case(also="loads"),
    Case(also="gathers"), Case(model="early"), Case(gather="bf16", reduce="bf16"),
    Case(also="leaves_out", order="any"), Case("zero2", also="own_stream", order="beside"),
    Case("zero2", order="any"), Case(also="raises"), Case("zero2", also="raises"),
    Case(offload="params"), Case("zero2", offload="grads"), Case("zero2", offload="grads", accumulate=2),
    Case("zero1", offload="master"), Case(offload="params", debug="debug"),
    Case(offload="params", onto="disk"), Case("zero2", offload="grads", onto="disk", accumulate=2),
    Case("fsdp2", "bf16", offload="grads", onto="disk", also="loads"),
    Case(offload="params", onto="disk", debug="debug"),
    Case(model="twice", also="leaves_out", order="any"), Case(also="copies"), Case(also="drops"),
    Case(also="sums"), Case(offload="params", ranks=1),
    Case("ddp", axis="tensor"), Case("zero3", axis="tensor", activations="sliced"),
    Case("ddp", axis="ring"), Case("ddp", axis="ulysses"),
)  # fmt: skip
"""Of one mechanism each, for what is taken out of the sources."""


# -- what is right ----------------------------------------------------------------------------------------------------

TOLERANCES = {"fp32": 1e-6, "bf16": 2.0**-6, "fp16": 2.0**-9, "bf16-pure": 2.0**-5}
LAG = 3000  # operations that the device stays behind: a few steps


def tolerance(case: Case) -> float:
    """Relative, of a loss: sums in another order, in the precision that they are made in. What rounds such sums to 16
    or 8 bits now and then falls to the other side; so does, by twice the learning rate, an element whose gradient is
    next to zero, where an optimizer divides by its size and sums are long (BatchNorm's, those of four ranks). Muon's
    iteration enlarges what its 16 bits made of a sum: in fp32 its losses differ by 1e-7."""
    if case.gather or case.reduce or case.optimizer == "muon":
        return max(TOLERANCES[case.precision], 2.0**-12)
    rounds = case.optimizer == "adamw8bit" or case.model == "norms" or case.ranks > 2
    return max(TOLERANCES[case.precision], 3e-5 if rounds else 0.0)


KNOWN = (
    (lambda case: case.precision == "fp16", "numerics/alarm.py", "under a loss scale the host asks once per step"),
    (
        lambda case: "disk" in (case.activations, case.moments, case.onto),
        "tiers/disk.py",
        "the thread that writes the file waits",
    ),
    (lambda case: bool(case.offload), "tiers/host.py", "the host updates what has arrived"),
    (lambda case: bool(case.offload), "engine/_norms.py", "the norm of gradients on the host is summed on the device"),
    (lambda case: bool(case.offload), "sharding/", "what is read or written beside steps is on the host"),
    (
        lambda case: bool(case.offload),
        "optim/class_optimizer.py",
        "an optimizer's own step on the host is copied at once",
    ),
    (
        lambda case: case.also == "leaves_out" and case.layout == "ddp",
        "sharding/shown.py",
        "whether other ranks have a gradient where this one has none decides what .grad shows",
    ),
    (lambda case: case.also == "copies", "checkpoint/save.py", "what a save copies is there before it is hashed"),
    (
        lambda case: case.axis in ("ring", "ulysses"),
        "parallel/",
        "the host counts the labels of a batch that is on the device, and compares it between ranks",
    ),
    (lambda case: bool(case.debug), "sharding/segment.py", "debug compares what is freed with what rests"),
    (lambda case: bool(case.debug), "sharding/buffers.py", "debug compares the values of buffers each time"),
)
"""Of which cases, where, and why the host may wait behind the first steps."""


def known(case: Case, wait: str) -> str:
    """Why the host may wait there; empty: it may not."""
    return next((why for has, where, why in KNOWN if has(case) and where in wait), "")


def differences(case: Case, found: Sequence[Outcome], expected: Sequence[Outcome]) -> list[str]:
    """What is not as it should be, a line each."""
    said: list[str] = []
    for rank, (here, there) in enumerate(zip(found, expected, strict=True)):
        if not _near(case, here, there):
            said.append(f"rank {rank}: losses {here.losses}, on the CPU {there.losses}")
        said += [f"rank {rank}: {race}" for race in here.races]
        said += [f"rank {rank}: mixed: {what}" for what in here.mixed]
        said += [
            f"rank {rank}: the host waits {n} times: {what}" for what, n in here.waits.items() if not known(case, what)
        ]
    return said


def _near(case: Case, here: Outcome, there: Outcome) -> bool:
    near = partial(math.isclose, rel_tol=tolerance(case))
    return len(here.losses) == len(there.losses) and all(map(near, here.losses, there.losses))


def on_the_device(case: Case, sim_ranks: Ranks, **how: Any) -> list[Outcome]:
    """By rank; ``how``: of :func:`train`."""
    with tempfile.TemporaryDirectory() as folder:
        return sim_ranks.run(train, case, "sim", folder, world_size=case.ranks, **how)


def on_the_cpu(case: Case, ranks: Ranks) -> list[Outcome]:
    """By rank."""
    with tempfile.TemporaryDirectory() as folder:
        return ranks.run(train, case, "cpu", folder, world_size=case.ranks)


def both(case: Case, kept: Path) -> dict[str, str]:
    """What the checker finds, and whether losses are others in another order; empty: nothing.

    Args:
        case: to train.
        kept: the CPU's losses, from before something was taken out of the package; written if they are not there.
    """
    said = {"check": "", "lazy": ""}
    with Ranks(4, device="sim") as sim_ranks, Ranks(4) as ranks:
        if not kept.exists():
            kept.write_text(json.dumps([outcome.losses for outcome in on_the_cpu(case, ranks)]))
        expected = [Outcome(losses, [], {}, {}, 0.0) for losses in json.loads(kept.read_text())]
        try:
            found = on_the_device(case, sim_ranks)
            races = sum(len(outcome.races) for outcome in found)
            wrong = differences(case, found, expected)
            said["check"] = f"{races} races" if races else wrong[0] if wrong else ""
        except RanksFailed as error:
            said["check"] = f"raises {error.failures[0].summary}"[:200]
        try:
            said["lazy"] = lazy(case, expected, sim_ranks)
        except RanksFailed as error:
            said["lazy"] = f"raises {error.failures[0].summary}"[:200]
    return said


def lazy(case: Case, expected: Sequence[Outcome], sim_ranks: Ranks, seeds: Iterable[int] = (0, 100)) -> str:
    """Whether losses are others where the device stays behind and takes its streams in a random order."""
    for seed in seeds:
        found = on_the_device(case, sim_ranks, mode="lazy", lag=LAG, seed=seed)
        if any(loss != loss for outcome in found for loss in outcome.losses):
            return "NaN"
        if not all(map(partial(_near, case), found, expected)):
            return "other losses"
    return ""


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--both"]:
        print(json.dumps(both(named(arguments[1]), Path(arguments[2]))))
        return 0
    words = [word for word in arguments if not word.startswith("--")]
    cases = {case.name: case for case in CORE} if "--core" in arguments else matrix()
    wrong = 0
    print("| case | races | waits of the host | seconds, on the CPU |\n|---|---|---|---|")
    with Ranks(4, device="sim") as sim_ranks, Ranks(4) as ranks:
        for name, case in cases.items():
            if words and not any(word in name for word in words):
                continue
            try:
                found, expected = on_the_device(case, sim_ranks), on_the_cpu(case, ranks)
            except Exception as error:
                wrong += 1
                print(f"| {name} | {str(error).strip().splitlines()[-1][:300]} | | |", flush=True)
                continue
            said = differences(case, found, expected)
            wrong += bool(said)
            races = sum(len(outcome.races) for outcome in found)
            why = sorted({known(case, what) or what for outcome in found for what in outcome.waits})
            waits = "; ".join(why) or "0"
            seconds = f"{max(o.seconds for o in found):.1f}, {max(o.seconds for o in expected):.1f}"
            print(
                "\n".join([f"| {name} | {races} | {waits} | {seconds} |", *(line[:330] for line in said[:6])]),
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
