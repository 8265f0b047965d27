"""Random compositions of stages: a model, an order, a layout and a sequence of calls, made of one number.

:func:`check` runs one on each rank beside plain PyTorch, in fp64. What making an engine refuses on all ranks is given
back as a sentence.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ModelError, OrderError
from shardfold.parallel.pipeline.ahead import AHEAD
from shardfold.parallel.pipeline.stage_order import ORDERS
from tests.support.options import grouped

WIDTH, VOCAB, TIME = 4, 6, 3
TOLERANCE = 1e-12
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-4, weight_decay=0.1),
}
LOOPED = ("interleaved", "looped-bfs", "interleaved-zb")
SPLIT = ("zero3", "fsdp2", "hsdp", "hpz", "infinity")


@dataclass(frozen=True)
class Form:
    """Of a model.

    Attributes:
        blocks: how many.
        head: ``called``, ``read`` by the model where it is used, or ``early``, at the begin of its forward.
        tied: the head has the embedding's weight.
        loss: what the loss has besides: ``embedding`` or ``head``, of whose weight it takes a mean square.
        alike: numbers of two blocks that have one inner weight; or none.
        shared: numbers of two blocks that have one inner module; or none.
        buffers: blocks count their calls and keep a mean.
        counts: the model counts in buffers of its own its forwards as they begin, which it computes with, and as they
            end.
        skip: the first block's output goes to the last one, too.
        again: the number of a block that is called twice; -1: none.
        frozen: names' beginnings of parameters that are not trained.
        branches: blocks read another module's weight, or do not, by the rank and the step.
        functional: blocks read the weight of a module of theirs instead of calling it.
    """

    blocks: int
    head: str = "called"
    tied: bool = False
    loss: str = ""
    alike: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    buffers: bool = False
    counts: bool = False
    skip: bool = False
    again: int = -1
    frozen: tuple[str, ...] = ()
    branches: bool = False
    functional: bool = False


@dataclass
class Place:
    """Where code of a model runs, which its branches depend on."""

    rank: int = 0
    step: int = 0


HERE = Place()


@dataclass(frozen=True)
class Composition:
    """What is run: options of the engine by name, and the calls."""

    seed: int
    form: Form
    stages: int
    data: int
    order: str
    layout: str
    accumulate: int
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: tuple[tuple[Any, ...], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.seed}: {self.form} on {self.stages} x {self.data} ranks, {self.order} {self.layout} "
            f"accumulate={self.accumulate} {self.optimizer} {self.options}: {self.calls}"
        )


class Block(nn.Module):
    mean: Tensor
    calls: Tensor

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        if form.branches:
            self.other = nn.Linear(WIDTH, WIDTH)
        if form.buffers:
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        y = torch.tanh(up) @ self.down.weight.T if self.form.functional else self.down(torch.tanh(up))
        if self.form.branches and (HERE.rank + HERE.step) % 3 == 2:  # on no rank in the first step
            y = y + self.other.weight.square().mean()
        if self.form.buffers:
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
                    self.calls.add_(1)
            else:
                y = y - self.mean
        return x + y


class Model(nn.Module):
    count: Tensor
    ends: Tensor

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if form.counts:
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("ends", torch.zeros((), dtype=torch.long))
        blocks: Any = list(self.blocks)
        if form.tied:
            self.head.weight = self.embedding.weight
        if form.alike:
            blocks[form.alike[1]].down.weight = blocks[form.alike[0]].down.weight
        if form.shared:
            blocks[form.shared[1]].up = blocks[form.shared[0]].up

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.form.counts and self.training:
            with torch.no_grad():
                self.count.add_(1)
        early = self.head.weight.T * 1.0 if self.form.head == "early" else None
        x = kept = self.embedding(tokens)
        if self.form.counts:
            x = x * (1 + 0.01 * self.count)
        for number, block in enumerate(self.blocks):
            if number == len(self.blocks) - 1 and self.form.skip:
                x = x + 0.5 * kept
            x = block(x)
            if number == self.form.again:
                x = block(x)
            if number == 0:
                kept = x
        x = self.norm(x)
        if self.form.head == "called":
            x = self.head(x)
        else:
            x = x @ (self.head.weight.T if early is None else early)
        if self.form.counts and self.training:
            with torch.no_grad():
                self.ends.add_(1)
        if targets is None:
            return x
        loss = nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten())
        if self.form.loss:
            loss = loss + getattr(self, self.form.loss).weight.square().mean()
        return loss


def make_model(form: Form) -> Model:
    torch.manual_seed(0)
    model = Model(form).double().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(form.frozen) if form.frozen else True)
    return model


def compute(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a micro-batch."""
    return model(*batch)


# -- compositions


def compose(seed: int, ranks: int) -> Composition:
    """The composition of that number for so many ranks."""
    draw = random.Random(seed)
    data = draw.choice([n for n in (1, 2) if ranks // n > 1])
    stages = ranks // data
    order = draw.choice([name for name in ORDERS if name not in AHEAD])
    if order in LOOPED:
        order += f":{draw.choice((2, 2, 3))}"
    parts = stages * int(order.partition(":")[2] or 2)
    blocks = max(2, parts - 2 + draw.randrange(3))
    pair = tuple(sorted(draw.sample(range(blocks), 2)))
    tied = draw.random() < 0.4
    form = Form(
        blocks=blocks,
        head=draw.choice(("called", "read", "read", "early")),
        tied=tied,
        loss=draw.choice(("", "head", "embedding" if tied else "head")),
        alike=pair if draw.random() < 0.25 else (),
        shared=pair if draw.random() < 0.15 else (),
        buffers=draw.random() < 0.4,
        counts=draw.random() < 0.2,
        skip=draw.random() < 0.4,
        again=draw.randrange(blocks) if draw.random() < 0.2 else -1,
        frozen=draw.choice(((), (), (), ("embedding",), ("blocks.0",), ("head", "blocks.1.up.bias"), ("blocks",))),
        branches=draw.random() < 0.2,
        functional=draw.random() < 0.3,
    )
    layout = draw.choice([*sf.PRESETS, *SPLIT])
    options: dict[str, Any] = {"debug": draw.random() < 0.3}
    if draw.random() < 0.4:
        options["clip_norm"] = 0.3
    if draw.random() < 0.3:
        options["activations"] = draw.choice(("recompute", "select"))
    if draw.random() < 0.4:
        options["overlap"] = draw.choice((
            sf.Overlap(prefetch=0), sf.Overlap(prefetch=2), sf.Overlap(reduce_once=True), sf.Overlap(order="any"),
            sf.Overlap(order="any", prefetch=2),
        ))  # fmt: skip
    if draw.random() < 0.3:
        options["units"] = draw.choice(([nn.Linear, nn.Embedding], [Block], []))
    return Composition(
        seed, form, stages, data, order, layout, draw.choice((stages, stages, 2 * stages, 3, 1)),
        draw.choice(tuple(OPTIMIZERS)), options, tuple(_calls(draw)),
    )  # fmt: skip


def _calls(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    names = ("train",) * 6 + ("eval", "call", "gathered", "state", "save_load", "reset", "load_state", "write", "mode")
    yield ("train", 0)
    for number in range(1, draw.randrange(5, 9)):
        yield (draw.choice(names), number)
    yield ("train", 100)
    yield ("state", 0)


# -- plain PyTorch, and an engine


class Plain:
    """All ranks' batches in one process; buffers are those of the first rank of data."""

    def __init__(self, work: Composition) -> None:
        self.work, self.model = work, make_model(work.form)
        self.optimizer = OPTIMIZERS[work.optimizer](p for p in self.model.parameters() if p.requires_grad)

    def forward_backward(self, number: int) -> list[float]:
        work, losses = self.work, list[float]()
        count = work.data * work.accumulate
        start = {name: b.clone() for name, b in self.model.named_buffers()}
        for rank in reversed(range(work.data)):
            with torch.no_grad():
                for name, b in self.model.named_buffers():
                    b.copy_(start[name])
            total, HERE.rank, HERE.step = 0.0, rank, number
            for part in chunks(batch(work, number, rank), work.accumulate):
                loss = compute(self.model, part)
                (loss / count).backward()
                total += loss.item()
            losses.insert(0, total / work.accumulate)
        return losses

    def step(self) -> None:
        if "clip_norm" in self.work.options:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.work.options["clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch(work: Composition, number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    rows = 2 * work.accumulate
    return tuple(torch.randint(VOCAB, (2, rows, TIME), generator=generator))  # pyright: ignore[reportReturnType]


def chunks(given: tuple[Tensor, Tensor], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(*(t.chunk(count) for t in given), strict=True)


def make_engine(work: Composition, **changes: Any) -> sf.Engine:
    options: dict[str, Any] = {
        "layout": work.layout, "pipeline": work.order, "accumulate": work.accumulate,
        "mesh": {"pipeline": work.stages, "intra": work.data}, **work.options, **changes,
    }  # fmt: skip
    return sf.Engine(make_model(work.form), optimizer=OPTIMIZERS[work.optimizer], **grouped(**options))


def close(found: Any, wanted: Any, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


def same_state(engine: sf.Engine, plain: Plain, what: str) -> None:
    state, wanted = engine.state_dict(), plain.model.state_dict()
    assert state.keys() == wanted.keys(), what
    buffers = {name for name, _ in plain.model.named_buffers()} if engine.data_rank else set()
    for key, value in state.items():  # buffers are the first rank's, from the next forward on the others', too
        if key not in buffers:
            close(value, wanted[key], f"{what}: {key}")


def run(work: Composition, path: str) -> None:
    """On each rank."""
    plain, engine = Plain(work), make_engine(work)
    try:
        same_state(engine, plain, "at first")
        for call, number in work.calls:
            what = f"{call} {number}"
            engine = CALLS[call](work, engine, plain, number, what, path)
        same_state(engine, plain, "at last")
    finally:
        engine.close()


def _train(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    mine = batch(work, number, engine.data_rank)
    wanted = plain.forward_backward(number)[engine.data_rank]
    HERE.rank = engine.data_rank
    loss = engine.train_batch(mine, compute)
    close(loss.item(), wanted, f"{what}: loss")
    engine.step()
    plain.step()
    same_state(engine, plain, what)
    return engine


def _mean(plain: Plain, work: Composition, number: int, rank: int) -> float:
    with torch.no_grad():
        found = [compute(plain.model, part).item() for part in chunks(batch(work, number, rank), work.accumulate)]
    return sum(found) / len(found)


def _eval(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    engine.module.eval()
    plain.model.eval()
    loss = engine.eval_batch(batch(work, number, engine.data_rank), compute)
    close(loss.item(), _mean(plain, work, number, engine.data_rank), what)
    engine.module.train()
    plain.model.train()
    return engine


def _call(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    engine.module.eval()
    plain.model.eval()
    tokens = batch(work, number, engine.data_rank)[0]
    with torch.no_grad():
        close(engine(tokens), plain.model(tokens), what)
    engine.module.train()
    plain.model.train()
    return engine


def _gathered(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    with engine.gathered() as found:
        for key, value in found.items():
            close(value.detach().clone(), plain.model.state_dict()[key], f"{what}: {key}")
        if work.data == 1 or not work.form.buffers:
            _eval(work, engine, plain, number, what, path)
    return engine


def _write(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    with engine.gathered(write=True) as found, torch.no_grad():
        for value in {id(value): value for value in found.values()}.values():  # tied ones have several names
            value.mul_(0.9)
    with torch.no_grad():
        for parameter in plain.model.parameters():
            parameter.mul_(0.9)
    return engine


def _state(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    same_state(engine, plain, what)
    return engine


def _save_load(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    """Goes on in another engine, or in this one behind a step that is lost."""
    where = str(Path(path) / f"run-{number}")
    engine.save(where, wait=True, latest=False)
    if number % 2:
        engine.close()
        others = {0: {}, 1: {"layout": "zero3"}, 2: {"layout": "ddp"}}[number % 3]
        engine = make_engine(work, **others)
    else:
        engine.train_batch(batch(work, number + 50, engine.data_rank), compute)
        engine.step()
    engine.load(where)
    same_state(engine, plain, what)
    return engine


def _load_state(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    state = {key: 0.8 * v if v.is_floating_point() else v for key, v in plain.model.state_dict().items()}
    plain.model.load_state_dict(state)
    engine.load_state_dict({key: value.clone() for key, value in state.items()})
    same_state(engine, plain, what)
    return engine


def _reset(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    """Gradients of a batch are lost; what its forwards wrote stays."""
    plain.forward_backward(number)
    HERE.rank = engine.data_rank
    engine.train_batch(batch(work, number, engine.data_rank), compute)
    if number % 2:
        engine.reset()
    else:
        engine.zero_grad()
    plain.optimizer.zero_grad()
    same_state(engine, plain, what)
    return engine


def _mode(work: Composition, engine: Any, plain: Plain, number: int, what: str, path: str) -> Any:
    """Evaluation of a model that stays in the mode of training: buffers are written there, too, so without."""
    if work.form.buffers or work.form.counts:
        return engine
    loss = engine.eval_batch(batch(work, number, engine.data_rank), compute)
    close(loss.item(), _mean(plain, work, number, engine.data_rank), what)
    return engine


CALLS: dict[str, Any] = {
    "train": _train, "eval": _eval, "call": _call, "gathered": _gathered, "state": _state, "save_load": _save_load,
    "reset": _reset, "load_state": _load_state, "write": _write, "mode": _mode,
}  # fmt: skip


def check(seeds: list[int], ranks: int) -> list[str]:
    """On each rank: for each composition what was refused when its engine was made; empty: it is plain PyTorch's."""
    found: list[str] = []
    for seed in seeds:
        work = compose(seed, ranks)
        with tempfile.TemporaryDirectory() as mine:
            paths = [mine]
            dist.broadcast_object_list(paths)
            try:
                try:
                    make_engine(work).close()
                except (ConfigError, ModelError, OrderError) as error:
                    found.append(f"{type(error).__name__}: {error}")
                    continue
                try:
                    run(work, paths[0])
                except Exception as error:
                    raise AssertionError(f"composition {work}") from error
                found.append("")
            finally:
                dist.barrier()
    return found
