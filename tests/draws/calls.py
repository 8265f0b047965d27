"""What a draw calls, on plain PyTorch and on an engine.

:class:`Plain` is the definition: one process runs every rank's batches through copies of the model that share its
parameters, and each has buffers of its own, which become rank 0's before what follows a training forward, but for one
in ``no_sync()``. A gradient is the mean over ranks and micro-batches, as DDP's. :class:`Sharded` is one rank. A
call is ``(name of a method, arguments)``; both give what there is to see, and ``Plain`` gives a list with one entry
for each rank.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from tests.draws.model import ONE_GROUP, Boom, Model, make_batch, make_model, make_optimizer
from tests.support.copied import differing
from tests.support.options import grouped

Call = tuple[str, dict[str, Any]]
Skips = Sequence[Sequence[int]]
FIRST = {"patience": 5.0, "timeout": 20.0}


class Void(Exception):
    """A draw that plain PyTorch does not train, or of which the documents say that it is refused."""


class Count:
    """Micro-batches since the last step; the same on both sides."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate, self.micro, self.ready, self.weighed = accumulate, 0, False, False

    def add(self, backwards: int, *, weighed: bool, sync: bool) -> None:
        if self.micro and weighed != self.weighed:
            raise Void("weights in some micro-batches of a step")
        self.micro, self.weighed = self.micro + backwards, weighed
        self.ready = sync and self.micro >= self.accumulate

    def end(self) -> None:
        self.micro, self.ready, self.weighed = 0, False, False

    def between_steps(self) -> None:
        if self.micro:
            raise Void("between the micro-batches of a step")


@contextmanager
def evaluating(model: nn.Module, *, train: bool = False) -> Iterator[None]:
    model.train(train)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def floating(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.is_floating_point()]


def copied(values: Any) -> dict[str, Tensor | None]:
    return {name: None if value is None else value.detach().clone() for name, value in values}


class Plain:
    """All ranks in one process."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.ranks = draw, draw.size
        first = make_model(draw.blocks, draw.head, draw.dtype)
        self.models = [first, *(self._replica(first) for _ in range(self.ranks - 1))]
        self.optimizer = make_optimizer(draw.optimizer, first)
        self.count = Count(draw.accumulate)
        self.total = 0.0  # of weights since the last step
        self.saved: Any = None
        self.delayed = draw.delayed
        self.under_way: list[Tensor] | None = None  # of a delayed update
        self.trained = {
            p for p in first.parameters() if p.requires_grad
        }  # that the engine has units with gradients for
        self.due = False  # whether buffers are to become rank 0's

    @property
    def model(self) -> Model:
        return self.models[0]

    @staticmethod
    def _replica(model: Model) -> Model:
        return copy.deepcopy(model, {id(p): p for p in model.parameters()})

    def run(self, call: Call) -> list[Any]:
        seen = getattr(self, call[0])(**call[1])
        return seen if isinstance(seen, list) else [seen] * self.ranks

    def _follow(self, *, anyway: bool = False) -> None:
        """Buffers of all ranks become rank 0's, if they are due to; what comes to train makes units anew, for which a
        delayed update arrives."""
        train = {p for p in self.model.parameters() if p.requires_grad}
        if not train <= self.trained:
            self.settle()
            self.trained |= train
        for model in self.models[1:] if self.due or anyway else ():
            for mine, theirs in zip(model.modules(), self.model.modules(), strict=True):
                for name, buffer in theirs._buffers.items():
                    mine._buffers[name] = None if buffer is None else buffer.detach().clone()

    def _outputs(
        self, seed: int, skips: Skips = (), ranks: Sequence[int] | None = None, *, sync: bool = True
    ) -> list[Tensor]:
        self._follow()
        self.due = torch.is_grad_enabled() and sync
        chosen = range(self.ranks) if ranks is None else ranks
        return [
            self.models[r](make_batch(seed, r, self.draw.dtype), skips[r % len(skips)] if skips else ()) for r in chosen
        ]

    def _drop(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def _end(self) -> None:
        self._drop()
        self.count.end()
        self.total = 0.0

    # -- training

    def train(
        self, seed: int, how: str = "engine", weights: Sequence[int] = (), forwards: int = 1, between: str = "",
        skips: Skips = (), backwards: int = 1, sync: bool = True,
    ) -> Any:  # fmt: skip
        losses: list[Any] = [0.0] * self.ranks
        for i in range(forwards):
            losses = [
                a + y.square().mean() for a, y in zip(losses, self._outputs(seed + i, skips, sync=sync), strict=True)
            ]
        seen = self.run((between, {"seed": seed + 7} if "evaluate" in between else {})) if between else [None]
        self.count.add(backwards, weighed=bool(weights), sync=sync)
        for _ in range(backwards):
            for rank, loss in enumerate(losses):
                weight = weights[rank % len(weights)] if weights else 1.0
                if not loss.requires_grad:
                    raise Void("nothing is trained")
                (loss * weight / self.ranks / self.count.accumulate).backward(retain_graph=backwards > 1)
                self.total += weight if weights else 0.0
        return [(loss.item(), seen[rank % len(seen)]) for rank, loss in enumerate(losses)]

    def step(self) -> Any:
        if not self.count.micro:
            return None
        if not self.count.ready:
            return False, None
        if self.count.weighed:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.ranks * self.count.accumulate / self.total)
        norm = None
        if self.draw.clip is not None:
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.draw.clip))
        self.settle()
        before = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer.step()
        if self.delayed:
            after = [p.detach().clone() for p in self.model.parameters()]
            self._put(before)
            self.under_way = after
        self._end()
        return True, norm

    def settle(self) -> None:
        """What a delayed update gives arrives."""
        if self.under_way is not None:
            self._put(self.under_way)
            self.under_way = None

    def _put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), values, strict=True):
                if not torch.equal(p, value):
                    p.copy_(value)

    def zero(self) -> Any:
        self._end()

    def optimizer_zero(self) -> Any:
        self._drop()
        self.total = 0.0  # the weights of what is dropped count no more

    def reset(self) -> Any:
        self._end()

    def forward(self, seed: int) -> Any:
        return [y.square().mean().item() for y in self._outputs(seed)]

    def fail(self, where: str, block: int, seed: int, then: str = "") -> Any:
        self._follow()
        self.due = True
        for rank, model in enumerate(self.models):
            try:
                model(make_batch(seed, rank, self.draw.dtype), (), (where, block)).square().mean().backward()
            except Boom:
                continue
            raise Void("nothing fails")
        self._end()

    def fail_step(self, late: bool = False) -> Any:
        if self.delayed:
            raise Void("a step that goes on behind it")
        if self.count.ready:
            self._end()
            if late:
                self._load()

    # -- beside training

    def evaluate(self, seed: int, counts: Sequence[int] = (1,), train: bool = False) -> Any:
        seen: list[Any] = [None] * self.ranks
        for i in range(max(counts)):
            running = [r for r in range(self.ranks) if counts[r % len(counts)] > i]
            for model in self.models:
                model.train(train)
            with torch.no_grad():
                for rank, y in zip(running, self._outputs(seed + i, ranks=running), strict=True):
                    seen[rank] = y.sum().item()
        for model in self.models:
            model.train()
        return seen

    def evaluate_gathered(self, seed: int, counts: Sequence[int] = (1,), train: bool = False) -> Any:
        self.settle()
        self._follow()
        due, seen = self.due, self.evaluate(seed, counts)
        self.due = due
        return seen

    def evaluate_copy(self, seed: int) -> Any:
        self.settle()
        self._follow()
        for model in self.models:
            copy.deepcopy(model)  # which a tensor with a history that is kept aside does not allow
        due, seen = self.due, self.evaluate(seed)
        self.due = due
        return seen

    def rate(self, group: int, factor: float) -> Any:
        groups = self.optimizer.param_groups
        groups[group % len(groups)]["lr"] *= factor

    def freeze(self, block: int, on: bool = True) -> Any:
        self.count.between_steps()
        for p in floating(self.model.blocks[block % len(self.model.blocks)]):
            p.requires_grad_(not on)

    def write(self, index: int, factor: float) -> Any:
        self.settle()
        found = list(self.model.parameters())
        with torch.no_grad():
            p = found[index % len(found)]
            p.mul_(factor if p.is_floating_point() else 1)

    def read(self) -> Any:
        self.settle()
        self._follow()
        return copied(self.model.named_parameters())

    def grads(self) -> Any:
        return copied((name, p.grad) for name, p in self.model.named_parameters()) if self.count.ready else None

    def state(self) -> Any:
        self.settle()
        self._follow()
        return [copied(model.state_dict().items()) for model in self.models]

    def load_state(self, factor: float) -> Any:
        self.count.between_steps()
        self.settle()
        self._follow()
        for model in self.models[::-1]:  # of the parameters, which they share, the first scales
            shared = (
                set() if model is self.model else {name for name, _ in model.named_parameters(remove_duplicate=False)}
            )
            state = {
                k: v * factor if v.is_floating_point() and k not in shared else v.clone()
                for k, v in model.state_dict().items()
            }
            model.load_state_dict(state)

    def save(self, wait: bool = True) -> Any:
        self.count.between_steps()
        self.settle()
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self) -> Any:
        self.count.between_steps()
        self._load()

    def _load(self) -> None:
        if self.saved is None:
            raise Void("nothing was saved")
        self.settle()
        self._follow()
        for model in self.models:
            model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def rebuild(self, layout: str) -> Any:
        """Another engine over the same model, under another layout."""
        self.count.between_steps()
        self.settle()
        self._follow(anyway=True)
        self.due = False
        self.optimizer = make_optimizer(self.draw.optimizer, self.model)
        self.saved = None
        self.delayed = False  # the other engine has no overlap of its own


class Sharded:
    """One rank."""

    def __init__(self, draw: Any, folder: str) -> None:
        self.draw, self.folder = draw, Path(folder)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = make_model(draw.blocks, draw.head, draw.dtype)
        self.count = Count(draw.accumulate)
        self.engine = self._engine(None)
        self.saved: Path | None = None
        self.saving: Any = None

    def _engine(self, layout: str | None) -> sf.Engine:
        draw = self.draw
        known = {"sf": sf, "torch": torch, "folder": str(self.folder)}
        options: dict[str, Any] = {name: eval(text, known) for name, text in draw.options.items()}
        if layout is not None:
            options = {name: value for name, value in options.items() if name in ("units", "mesh")} | {"layout": layout}
        given = draw.given or ":" in draw.optimizer
        optimizer = make_optimizer(draw.optimizer, self.model) if given else ONE_GROUP[draw.optimizer]
        return sf.Engine(
            self.model,
            optimizer=optimizer,
            accumulate=draw.accumulate,
            **grouped(clip_norm=draw.clip, **FIRST, **options),
        )

    def run(self, call: Call) -> Any:
        return getattr(self, call[0])(**call[1])

    def _loss(self, seed: int, skips: Skips = ()) -> Tensor:
        x = make_batch(seed, self.rank, self.draw.dtype)
        return self.engine(x, skips[self.rank % len(skips)] if skips else ()).square().mean()

    def train(
        self, seed: int, how: str = "engine", weights: Sequence[int] = (), forwards: int = 1, between: str = "",
        skips: Skips = (), backwards: int = 1, sync: bool = True,
    ) -> Any:  # fmt: skip
        with nullcontext() if sync else self.engine.no_sync():
            loss: Any = 0.0
            for i in range(forwards):
                loss = loss + self._loss(seed + i, skips)
            seen = self.run((between, {"seed": seed + 7} if "evaluate" in between else {})) if between else None
            self.count.add(backwards, weighed=bool(weights), sync=sync)
            for i in range(backwards):
                keep = i + 1 < backwards
                if weights:
                    self.engine.backward(loss, weight=weights[self.rank % len(weights)], retain_graph=keep)
                elif how == "bare":
                    loss.backward(retain_graph=keep)
                else:
                    self.engine.backward(loss, retain_graph=keep)
        return loss.item(), seen

    def step(self) -> Any:
        if not self.count.micro:
            return None
        report = self.engine.step()
        if report.updated:
            self.count.end()
            assert not (apart := differing(self.engine)), apart
        return report.updated, report.grad_norm

    def zero(self) -> Any:
        self.count.end()
        self.engine.zero_grad()

    def optimizer_zero(self) -> Any:
        assert self.engine.optimizer is not None
        self.engine.optimizer.zero_grad()

    def reset(self) -> Any:
        self.count.end()
        self.engine.reset()

    def forward(self, seed: int) -> Any:
        return self._loss(seed).item()

    def fail(self, where: str, block: int, seed: int, then: str = "") -> Any:
        self.count.end()
        x = make_batch(seed, self.rank, self.draw.dtype)
        with suppress(Boom):
            self.engine.backward(self.engine(x, (), (where, block)).square().mean())
        if then == "reset":
            self.engine.reset()
        elif then == "zero":
            self.engine.zero_grad()

    def fail_step(self, late: bool = False) -> Any:
        if not self.count.ready:
            return
        self.count.end()
        assert self.engine.optimizer is not None

        def fails(*_: Any) -> None:
            raise Boom("in step")

        hooks: Callable[..., Any] = self.engine.optimizer.register_step_pre_hook
        if late:
            hooks = self.engine.optimizer.register_step_post_hook
        handle = hooks(fails)
        with suppress(Boom):
            self.engine.step()
        handle.remove()
        if late:
            self._load()
        else:
            self.engine.reset()

    def evaluate(self, seed: int, counts: Sequence[int] = (1,), train: bool = False) -> Any:
        seen = None
        with evaluating(self.model, train=train):
            for i in range(counts[self.rank % len(counts)]):
                seen = self.engine(make_batch(seed + i, self.rank, self.draw.dtype)).sum().item()
        return seen

    def evaluate_gathered(self, seed: int, counts: Sequence[int] = (1,), train: bool = False) -> Any:
        with self.engine.gathered():
            return self.evaluate(seed, counts)

    def evaluate_copy(self, seed: int) -> Any:
        with self.engine.gathered():
            model = copy.deepcopy(self.model)
        with evaluating(model):
            return model(make_batch(seed, self.rank, self.draw.dtype)).sum().item()

    def rate(self, group: int, factor: float) -> Any:
        assert self.engine.optimizer is not None
        groups = self.engine.optimizer.param_groups
        groups[group % len(groups)]["lr"] *= factor

    def freeze(self, block: int, on: bool = True) -> Any:
        for p in floating(self.model.blocks[block % len(self.model.blocks)]):
            p.requires_grad_(not on)

    def write(self, index: int, factor: float) -> Any:
        names = [name for name, _ in self.model.named_parameters()]
        with self.engine.gathered(names[index % len(names)], write=True) as value, torch.no_grad():
            value.mul_(factor if value.is_floating_point() else 1)

    def read(self) -> Any:
        with self.engine.gathered():
            return copied(self.model.named_parameters())

    def grads(self) -> Any:
        if not self.count.ready:
            return None
        with self.engine.gathered(of="grads") as values:
            return copied((name, values.get(name)) for name, _ in self.model.named_parameters())

    def state(self) -> Any:
        self.engine.mean(0.0)  # behind what ranks do together buffers are rank 0's
        return self.engine.state_dict()

    def load_state(self, factor: float) -> Any:
        state = self.state()
        self.engine.load_state_dict({k: v * factor if v.is_floating_point() else v for k, v in state.items()})

    def save(self, wait: bool = True) -> Any:
        self.saved = self.folder / f"step-{self.engine.steps}"
        self.saving = self.engine.save(self.saved, wait=wait)

    def load(self) -> Any:
        self._load()

    def _load(self) -> None:
        assert self.saved is not None
        if self.saving is not None:
            self.saving.wait()
        self.engine.load(self.saved)

    def rebuild(self, layout: str) -> Any:
        self.engine.release()
        self.engine, self.saved = self._engine(layout), None


def play(draw: Any, refusals: Sequence[str] = ()) -> Any:
    """On each rank: what is seen behind each call; or why the draw was refused, and where."""
    with tempfile.TemporaryDirectory() as own:
        folder: list[Any] = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder)
        try:
            side = Sharded(draw, folder[0])
        except (sf.errors.ConfigError, sf.errors.ModelError, sf.errors.UsageError) as error:
            return f"{type(error).__name__}: {error}"
        seen = []
        for number, call in enumerate(draw.calls):
            try:
                seen.append(side.run(call))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                if any(known in said for known in refusals):
                    return f"in {call[0]}: {said}"
                raise RuntimeError(f"call {number}, {call}: {said}") from error
        side.engine.close()
        if dist.is_initialized():
            dist.barrier()  # the folder is rank 0's
    return seen


def expect(draw: Any) -> list[list[Any]]:
    """What each call has to show on each rank.

    Raises:
        Void: there is nothing to compare with.
    """
    try:
        plain = Plain(draw)
        return [plain.run(call) for call in draw.calls]
    except Void:
        raise
    except Exception as error:
        raise Void(f"plain PyTorch: {type(error).__name__}: {error}") from error


def differs(seen: Any, want: Any, tolerance: float) -> str:
    """How two observations differ; empty if they do not."""
    if isinstance(want, Tensor) and isinstance(seen, Tensor):
        if seen.shape != want.shape:
            return f"shape {tuple(seen.shape)} instead of {tuple(want.shape)}"
        off = (seen.double().cpu() - want.double()).abs()
        return (
            f"off by {off.max():.2e}"
            if off.numel() and not (off <= tolerance * (1 + want.double().abs())).all()
            else ""
        )
    if isinstance(want, dict):
        if seen.keys() != want.keys():
            return f"only one has {sorted(seen.keys() ^ want.keys())}"
        found = {name: differs(seen[name], value, tolerance) for name, value in want.items()}
        return "; ".join(f"{name}: {said}" for name, said in found.items() if said)
    if isinstance(want, tuple):
        return "; ".join(filter(None, map(partial(differs, tolerance=tolerance), seen, want)))
    if isinstance(want, float) and isinstance(seen, float):
        return "" if abs(seen - want) <= tolerance * (1 + abs(want)) else f"{seen!r} instead of {want!r}"
    return "" if seen is want or (type(seen) is type(want) and bool(seen == want)) else f"{seen} instead of {want}"
