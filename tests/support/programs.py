"""Random training programs, on plain PyTorch and on engines.

A program is a list of operations made of one number. :class:`Plain` runs it in one process, on every rank's batches at
once: a loss is the mean over ranks. :class:`Sharded` runs it on each rank under a layout. Both give what they observed
after each operation. What an engine refuses, with one sentence on every rank, is left out on both sides.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import FreedParameterError, UsageError
from tests.support.options import grouped

WIDTH, ROWS, BLOCKS = 4, 3, 3
MODELS = ("one", "two")
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5, weight_decay=0.1)
SPLITS = tuple(name for name, table in sf.PRESETS.items() if table.comes_and_goes)
"""Layouts that split parameters where there is more than one rank."""

Op = tuple[Any, ...]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks and a head; ``path`` says which blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def encode(self, x: Tensor, path: Sequence[int]) -> Tensor:
        for i in path:
            x = self.blocks[i](x)
        return self.norm(x)

    def forward(self, x: Tensor, path: Sequence[int] = tuple(range(BLOCKS))) -> Tensor:
        return self.head(self.encode(x, path)).mean()


def make_model(which: str) -> Model:
    torch.manual_seed(MODELS.index(which))
    return Model().double()


def batch(seed: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)


# -- programs ---------------------------------------------------------------------------------------------------------


def make_program(seed: int, length: int = 22) -> tuple[dict[str, Any], list[Op]]:
    """Options of the engines, and operations: ``(name, model, ...)``. Every loss is of a graph that is still there."""
    draw = random.Random(seed)
    options = {"accumulate": draw.choice([1, 1, 2]), "clip_norm": draw.choice([None, None, 0.3])}
    ops: list[Op] = []
    losses: dict[int, set[str]] = {}  # which models' weights each open loss depends on
    branches = set[int]()
    number = 0
    while len(ops) < length:
        which = draw.choice(["one", "one", "one", "two"])
        name = draw.choice(CHOICES)
        if name in FORWARDS:
            number += 1
            losses[number] = {"one", "two"} if name == "both" else {which}
            branches |= {number} if name == "branch" else set()
            ops.append((name, which, number, draw.randrange(10**6)))
        elif name == "backward":
            if losses:
                chosen = sorted(draw.sample(sorted(losses), min(len(losses), draw.choice([1, 1, 1, 2]))))
                if branches & set(chosen) and len(set().union(*(losses[key] for key in chosen))) > 1:
                    continue  # autograd would reach the two engines in another order on each rank: an OrderError
                keep = draw.random() < 0.2
                ops.append(("backward", which, chosen, keep, draw.choice(["engine", "bare"])))
                for key in chosen if not keep else ():
                    del losses[key]
        else:
            ops.append((name, which, draw.randrange(10**6)))
            if name in CHANGES:
                losses = {key: of for key, of in losses.items() if which not in of}
    return options, ops


FORWARDS = ("forward", "branch", "method", "submodule", "head", "regularizer", "both")
READS = ("look", "halve", "clip", "replace")
"""What reads ``parameter.grad``."""
#: What changes weights in place, or which of them autograd saves: a graph from before is of no use then.
CHANGES = ("step", "load_state", "save_load", "freeze", "unfreeze", "rebuild")
CHOICES = (
    *["forward"] * 5, "branch", "method", "submodule", "head", "regularizer", "both", *["backward"] * 8, *["step"] * 5,
    "evaluate", "engine_zero", "optimizer_zero", "optimizer_zeros", "model_zero", "model_zeros", "part_zero",
    "drop_one", "halve", "clip", "replace", "freeze", "unfreeze", "load_state", "save_load", "rebuild", "no_sync",
    "gathered_train", "look", "read_grads", "overflow",
)  # fmt: skip


def loss_of(
    op: Op, models: dict[str, Model], rank: int, call: Callable[[str, Tensor, Sequence[int]], Tensor]
) -> Tensor:
    """The loss that an operation makes on one rank; ``call`` runs a model's forward."""
    name, which, _, seed = op
    model, x = models[which], batch(seed, rank)
    if name == "forward":
        return call(which, x, range(BLOCKS))
    if name == "branch":  # ranks run different blocks, and none runs all
        return call(which, x, [(seed + rank) % BLOCKS])
    if name == "method":
        return model.encode(x, range(BLOCKS)).square().mean()
    if name == "submodule":
        return model.blocks[seed % BLOCKS](x).square().mean()
    if name == "head":
        return model.head(x).square().mean()
    if name == "regularizer":
        return sum((p.square().sum() for p in model.blocks[seed % BLOCKS].parameters()), x.new_zeros(())) * 0.1
    return call("one", x, range(BLOCKS)) * call("two", x, range(BLOCKS))


# -- plain PyTorch ----------------------------------------------------------------------------------------------------


class Plain:
    """One process that computes what ``ranks`` ranks would; where an operation was refused it does nothing."""

    def __init__(self, options: dict[str, Any], ranks: int) -> None:
        self.options, self.ranks = options, ranks
        self.models = {which: make_model(which) for which in MODELS}
        self.losses: dict[int, list[Tensor]] = {}
        self.state: dict[str, dict[str, Tensor]] = {}
        self.micro, self.boundary, self.reached = dict.fromkeys(MODELS, 0), dict.fromkeys(MODELS, False), set[str]()
        self.optimizers: dict[str, Any] = {}
        for which in MODELS:
            self._watch(which)

    def _watch(self, which: str) -> None:
        self.optimizers[which] = SGD(self.models[which].parameters())
        for p in self.models[which].parameters():
            p.register_post_accumulate_grad_hook(lambda p, which=which: self.reached.add(which))

    def run(self, op: Op) -> Any:
        name, which = op[0], op[1]
        if name in FORWARDS:
            made = [loss_of(op, self.models, r, lambda w, x, path: self.models[w](x, path)) for r in range(self.ranks)]
            self.losses[op[2]] = made
            return [loss.item() for loss in made]
        return getattr(self, name)(which, *op[2:])

    def backward(self, which: str, losses: Sequence[int], keep: bool, how: str, synchronize: bool = True) -> Any:
        self._backward([loss for key in losses if key in self.losses for loss in self.losses[key]], keep)
        self._count(synchronize=synchronize)

    def _backward(self, losses: Sequence[Tensor], keep: bool = False) -> None:
        self.reached.clear()
        loss = sum(losses, torch.zeros((), dtype=torch.float64)) / self.ranks / self.options["accumulate"]
        if loss.requires_grad:
            loss.backward(retain_graph=keep)

    def _count(self, *, synchronize: bool = True) -> None:
        for which in self.reached:
            self.micro[which] += 1
            self.boundary[which] = synchronize and self.micro[which] >= self.options["accumulate"]

    def step(self, which: str, seed: int) -> Any:
        if not self.boundary[which]:
            return False
        model = self.models[which]
        if self.options["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.options["clip_norm"])
        self.optimizers[which].step()
        self._end(which)
        return True

    def _end(self, which: str) -> None:
        self.models[which].zero_grad()
        self.micro[which], self.boundary[which] = 0, False

    def evaluate(self, which: str, seed: int) -> Any:
        with torch.no_grad():
            return [self.models[which](batch(seed, r)).item() for r in range(self.ranks)]

    def engine_zero(self, which: str, seed: int) -> Any:
        self._end(which)

    def optimizer_zero(self, which: str, seed: int) -> Any:
        self.optimizers[which].zero_grad()

    def optimizer_zeros(self, which: str, seed: int) -> Any:
        self.optimizers[which].zero_grad(set_to_none=False)

    def model_zero(self, which: str, seed: int) -> Any:
        self.models[which].zero_grad()

    def model_zeros(self, which: str, seed: int) -> Any:
        self.models[which].zero_grad(set_to_none=False)

    def part_zero(self, which: str, seed: int) -> Any:
        self.models[which].blocks[seed % BLOCKS].zero_grad()

    def drop_one(self, which: str, seed: int) -> Any:
        pick(self.models[which], seed).grad = None

    def halve(self, which: str, seed: int) -> Any:
        halve(self.models[which], seed)

    def clip(self, which: str, seed: int) -> Any:
        clip(self.models[which])

    def replace(self, which: str, seed: int) -> Any:
        replace(self.models[which], seed)

    def freeze(self, which: str, seed: int) -> Any:
        self.models[which].blocks[seed % BLOCKS].requires_grad_(False)

    def unfreeze(self, which: str, seed: int) -> Any:
        self.models[which].requires_grad_(True)

    def load_state(self, which: str, seed: int) -> Any:
        with torch.no_grad():
            for p in self.models[which].parameters():
                p.mul_(0.9)

    def save_load(self, which: str, seed: int) -> Any:
        return None

    def rebuild(self, which: str, seed: int) -> Any:
        state = self.models[which].state_dict()
        self.models[which] = make_model(which)
        self.models[which].load_state_dict(state)
        self._watch(which)
        self._end(which)

    def no_sync(self, which: str, seed: int) -> Any:
        losses = [self.models[which](batch(seed, r)) for r in range(self.ranks)]
        self._backward(losses)
        self._count(synchronize=False)

    def gathered_train(self, which: str, seed: int) -> Any:
        losses = [self.models[which].encode(batch(seed, r), range(BLOCKS)).square().mean() for r in range(self.ranks)]
        self._backward(losses)
        self._count()
        return [loss.item() for loss in losses]

    def look(self, which: str, seed: int) -> Any:
        model = self.models[which]
        return {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}

    def read_grads(self, which: str, seed: int) -> Any:
        return {k: p.grad.clone() for k, p in self.models[which].named_parameters() if p.grad is not None}

    def overflow(self, which: str, seed: int) -> Any:
        """A bad batch: its gradients are NaN, and are dropped."""
        losses = [self.models[which](batch(seed, r)) * float("nan") for r in range(self.ranks)]
        self._backward(losses)
        self._count()
        self.optimizers[which].zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {f"{w}.{k}": v.clone() for w in MODELS for k, v in self.models[w].state_dict().items()}


def pick(model: nn.Module, seed: int) -> nn.Parameter:
    found = list(model.parameters())
    return found[seed % len(found)]


def halve(model: nn.Module, seed: int) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad + 0 is not grad for grad in grads)  # one that cannot be read raises here, before any is changed
    for grad in grads[seed % 3 :: 3]:
        grad.mul_(0.5)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replace(model: nn.Module, seed: int) -> None:
    p = pick(model, seed)
    if p.grad is not None:
        p.grad = p.grad * 0.5 + 0.01


# -- engines ----------------------------------------------------------------------------------------------------------


class Sharded:
    """One rank's side of a program under a layout."""

    def __init__(self, options: dict[str, Any], layout: str, folder: str) -> None:
        self.options, self.layout, self.folder = options, layout, folder
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.models = {which: make_model(which) for which in MODELS}
        self.engines = {which: self._engine(which) for which in MODELS}
        self.losses: dict[int, Tensor] = {}
        self.saves = 0

    def _engine(self, which: str) -> Any:
        mesh = {"inter": 1, "intra": self.ranks} if self.layout in ("hsdp", "hpz") else None
        return sf.Engine(self.models[which], optimizer=SGD, **grouped(layout=self.layout, mesh=mesh, **self.options))

    def run(self, op: Op) -> Any:
        name, which = op[0], op[1]
        if name in FORWARDS:
            loss = loss_of(op, self.models, self.rank, lambda w, x, path: self.engines[w](x, path))
            self.losses[op[2]] = loss
            return loss.item()
        return getattr(self, name)(which, *op[2:])

    def backward(self, which: str, losses: Sequence[int], keep: bool, how: str) -> Any:
        made = [self.losses[key] for key in losses if key in self.losses]  # others were refused
        loss = sum(made, torch.zeros((), dtype=torch.float64))
        if not loss.requires_grad:
            return
        if how == "engine":
            self.engines[which].backward(loss, retain_graph=keep)
        else:
            loss.backward(retain_graph=keep)

    def step(self, which: str, seed: int) -> Any:
        return self.engines[which].step().updated

    def evaluate(self, which: str, seed: int) -> Any:
        with torch.no_grad():
            return self.engines[which](batch(seed, self.rank)).item()

    def engine_zero(self, which: str, seed: int) -> Any:
        self.engines[which].zero_grad()

    def optimizer_zero(self, which: str, seed: int) -> Any:
        self.engines[which].optimizer.zero_grad()

    def optimizer_zeros(self, which: str, seed: int) -> Any:
        self.engines[which].optimizer.zero_grad(set_to_none=False)

    def model_zero(self, which: str, seed: int) -> Any:
        self.models[which].zero_grad()

    def model_zeros(self, which: str, seed: int) -> Any:
        self.models[which].zero_grad(set_to_none=False)

    def part_zero(self, which: str, seed: int) -> Any:
        self.models[which].blocks[seed % BLOCKS].zero_grad()

    def drop_one(self, which: str, seed: int) -> Any:
        pick(self.models[which], seed).grad = None

    def halve(self, which: str, seed: int) -> Any:
        halve(self.models[which], seed)

    def clip(self, which: str, seed: int) -> Any:
        clip(self.models[which])

    def replace(self, which: str, seed: int) -> Any:
        replace(self.models[which], seed)

    def freeze(self, which: str, seed: int) -> Any:
        self.models[which].blocks[seed % BLOCKS].requires_grad_(False)

    def unfreeze(self, which: str, seed: int) -> Any:
        self.models[which].requires_grad_(True)

    def load_state(self, which: str, seed: int) -> Any:
        engine = self.engines[which]
        engine.load_state_dict({name: value * 0.9 for name, value in engine.state_dict().items()})

    def save_load(self, which: str, seed: int) -> Any:
        self.saves += 1
        path = Path(self.folder) / f"{which}-{self.saves}"
        self.engines[which].save(path, wait=True, latest=False)
        self.engines[which].load(path)

    def rebuild(self, which: str, seed: int) -> Any:
        """Another model and engine with the same weights."""
        state = self.engines[which].state_dict()
        self.engines[which].close()
        self.models[which] = make_model(which)
        self.engines[which] = self._engine(which)
        self.engines[which].load_state_dict(state)

    def no_sync(self, which: str, seed: int) -> Any:
        engine = self.engines[which]
        with engine.no_sync():
            engine.backward(engine(batch(seed, self.rank)))

    def gathered_train(self, which: str, seed: int) -> Any:
        with self.engines[which].gathered():
            loss = self.models[which].encode(batch(seed, self.rank), range(BLOCKS)).square().mean()
            loss.backward()
        return loss.item()

    def look(self, which: str, seed: int) -> Any:
        found = {}
        for name, p in self.models[which].named_parameters():
            found[name] = None if p.grad is None else p.grad + 0
        return found

    def read_grads(self, which: str, seed: int) -> Any:
        with self.engines[which].gathered(of="grads") as grads:
            return {name: grad for name, grad in grads.items() if grad is not None}

    def overflow(self, which: str, seed: int) -> Any:
        engine = self.engines[which]
        loss = engine(batch(seed, self.rank)) * float("nan")
        loss.backward()
        engine.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {f"{w}.{k}": v for w in MODELS for k, v in self.engines[w].state_dict().items()}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


# -- both -------------------------------------------------------------------------------------------------------------


def run_sharded(options: dict[str, Any], ops: Sequence[Op], layout: str) -> list[tuple[str, Any]]:
    """Each operation's outcome on this rank: ``("ok", what was seen)`` or ``("refused", sentence)``; then weights."""
    with tempfile.TemporaryDirectory() as own:
        folder: list[Any] = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder)
        side, said = Sharded(options, layout, folder[0]), []
        for op in ops:
            try:
                said.append(("ok", side.run(op)))
            except (UsageError, FreedParameterError) as error:
                said.append(("refused", str(error)))
        said.append(("ok", side.weights()))
        side.close()
        if dist.is_initialized():
            dist.barrier()
    return said


ENDS = "do the same on every rank"
"""Behind this sentence gradients are of no use, as it says itself: the program ends."""


def check(programs: Sequence[tuple[int, dict[str, Any], list[Op]]], layout: str) -> list[str]:
    """On every rank: what is wrong with these programs under that layout, each with its number; at best nothing."""
    found = []
    for seed, options, ops in programs:
        try:
            said = run_sharded(options, ops, layout)
        except Exception as error:
            raise RuntimeError(f"program {seed} under {layout}, options {options}, {ops}") from error
        every: list[Any] = [None] * (dist.get_world_size() if dist.is_initialized() else 1)
        kinds = [(kind, seen if kind == "refused" else "") for kind, seen in said]
        if dist.is_initialized():
            dist.all_gather_object(every, kinds)
        else:
            every = [kinds]
        wrong = compare(options, ops, said, every, layout)
        if wrong is not None:
            found.append(f"program {seed}, {layout}, {len(every)} ranks: {wrong}\n  {options}\n  {ops}")
    return found


def compare(
    options: dict[str, Any], ops: Sequence[Op], said: list[tuple[str, Any]], every: list[Any], layout: str
) -> str | None:
    """The first difference between what this rank saw and plain PyTorch, or None."""
    ranks = len(every)
    rank = dist.get_rank() if dist.is_initialized() else 0
    plain = Plain(options, ranks)
    for i, op in enumerate(ops):
        kind, seen = next((side[i] for side in every if side[i][0] == "refused"), said[i])
        if len({side[i][0] for side in every}) > 1 and op[0] not in READS:  # a rank may have nothing to read
            return f"{i}: {op} was refused on some ranks only: {[side[i] for side in every]}"
        if kind == "refused":
            if not may_refuse(op, plain, layout, ops[:i], seen):
                return f"{i}: {op} was refused: {seen}"
            if ENDS in seen:
                return None
            continue
        expected = plain.run(op)
        if isinstance(expected, list):
            expected = expected[rank]
        if (wrong := differs(seen, expected, partial_ok=op[0] == "look")) is not None:
            return f"{i}: {op}: {wrong}"
    wrong = differs(said[-1][1], plain.weights(), partial_ok=False)
    return f"weights at the end: {wrong}" if wrong is not None else None


def may_refuse(op: Op, plain: Plain, layout: str, before: Sequence[Op], sentence: str) -> bool:
    """Whether the documents say that an engine refuses an operation there."""
    name, which, table = op[0], op[1], sf.PRESETS[layout]
    several = plain.ranks > 1
    uneven = several and any(b[0] == "branch" for b in before) and ENDS in sentence
    if name == "step":
        return (plain.micro[which] == 0 and "no backward since" in sentence) or uneven
    if name in ("method", "submodule", "head", "regularizer"):
        return layout in SPLITS and (several or table.params.tier is not sf.Tier.DEVICE)
    if name in READS:
        split = several and (layout != "ddp" or not plain.boundary[which])
        return split or (table.buffered and table.grads.tier is not sf.Tier.DEVICE)
    if name == "read_grads":
        return not plain.boundary[which] or uneven
    if name == "save_load":
        return plain.micro[which] > 0
    return False


def differs(seen: Any, expected: Any, *, partial_ok: bool) -> str | None:
    """How two observations differ, by more than rounding in fp64 amounts to in so few operations."""
    if isinstance(expected, dict):
        for name in expected.keys() | seen.keys():
            a, b = seen.get(name), expected.get(name)
            if a is None and (partial_ok or b is None):
                continue
            if a is None or b is None:
                return f"{name}: {a} instead of {b}"
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-11, equal_nan=True):
                return f"{name}: {a.flatten()[:4].tolist()} instead of {b.flatten()[:4].tolist()}"
        return None
    if isinstance(expected, float):
        return None if abs(seen - expected) <= 1e-10 * (1 + abs(expected)) else f"{seen} instead of {expected}"
    return None if seen == expected else f"{seen} instead of {expected}"


def without(ops: Sequence[Op], index: int) -> list[Op]:
    """The program without one operation, and without what needs it."""
    kept, made = [], set[int]()
    for i, op in enumerate(ops):
        if i == index:
            continue
        if op[0] in FORWARDS:
            made.add(op[2])
        if op[0] == "backward":
            chosen = [key for key in op[2] if key in made]
            if not chosen:
                continue
            op = (*op[:2], chosen, *op[3:])
        kept.append(op)
    return kept
