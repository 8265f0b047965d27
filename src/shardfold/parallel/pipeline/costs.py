"""What the pieces of a model cost: time and memory, measured one piece at a time.

A run in which pieces compute shapes only finds what each is called with (see ``trace``). Then each piece runs by
itself, forward and backward, on values that are drawn for the purpose, and is given back: one piece is in memory at a
time beside the model, which may be on the meta device. Pieces that are alike are measured once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.errors import ConfigError, ModelError
from shardfold.parallel.pipeline.flow import Skeleton
from shardfold.parallel.pipeline.micro_batches import default_compute
from shardfold.parallel.pipeline.pieces import PipelinePiece, find_pieces
from shardfold.plan.checks import is_integer, known_arguments
from shardfold.torch_internals import tree_flatten, tree_unflatten

__all__ = ["PieceCost", "PieceCosts", "measure_pieces"]


@dataclass(frozen=True, kw_only=True)
class PieceCost:
    """Of one piece, for one micro-batch.

    Attributes:
        path: in the model.
        forward: seconds.
        backward: seconds.
        saved: bytes that are kept for backward.
        held: bytes of its parameters.
    """

    path: str
    forward: float
    backward: float
    saved: int
    held: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class PieceCosts:
    """Of all pieces of a model, in its order; ``Parallel(stages=...)`` takes it, and cuts such that the slowest stage
    is as fast as it can be."""

    pieces: tuple[PieceCost, ...]

    def of(self, pieces: Sequence[PipelinePiece]) -> list[float]:
        """Seconds of each.

        Raises:
            ConfigError: these are not the pieces that were measured.
        """
        mine, theirs = [piece.path for piece in self.pieces], [piece.path for piece in pieces]
        if mine != theirs:
            other = next((path for path in theirs if path not in mine), None) or next(
                (path for path in mine if path not in theirs), theirs[0]
            )
            raise ConfigError(
                f"Parallel(stages=...) has the costs of another model: the piece {other!r} is in one of the two only: "
                "measure this model."
            )
        return [piece.seconds for piece in self.pieces]

    def __str__(self) -> str:
        whole = sum(piece.seconds for piece in self.pieces) or 1.0
        lines = [f"{'piece':<32}{'forward':>12}{'backward':>12}{'share':>8}{'kept':>14}{'parameters':>14}"]
        for piece in self.pieces:
            lines.append(
                f"{piece.path:<32}{1000 * piece.forward:>9.2f} ms{1000 * piece.backward:>9.2f} ms"
                f"{piece.seconds / whole:>8.1%}{piece.saved:>14,}{piece.held:>14,}"
            )
        return "\n".join(lines)


@known_arguments
def measure_pieces(
    model: nn.Module,
    batch: Any,
    compute: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    device: str | torch.device = "cpu",
    repeats: int = 5,
) -> PieceCosts:
    """Measures what the pieces of a model cost; it stays as it is.

    Args:
        model: whole, or on the meta device.
        batch: one micro-batch, as ``train_batch`` takes a list of.
        compute: gives the loss of a model and a micro-batch; None: the model's own.
        device: on which pieces are run.
        repeats: of which the least is taken, behind one that is not counted.

    Raises:
        ConfigError: ``repeats`` is no number of times.
        ModelError: the model cannot be cut into pieces.

    Examples:
        >>> layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> costs = sf.measure_pieces(layers, x, lambda model, batch: model(batch).square().mean(), repeats=1)
        >>> len(costs.pieces)
        2
    """
    if not is_integer(repeats, 1):
        raise ConfigError(f"measure_pieces(repeats={repeats!r}): it is an integer, 1 or more.")
    where, pieces = torch.device(device), find_pieces(model)
    calls: list[tuple[int, Any, Any]] = []
    tail = _Tail(compute or default_compute, batch, where)

    def heard(number: int, args: Any, kwargs: Any) -> None:
        calls.append((number, args, kwargs))
        tail.begin()

    skeleton = Skeleton(model, pieces, where, heard)
    with torch.enable_grad():
        *_, trace = (skeleton.run(tail, training=model.training) for _ in range(1 + repeats))
    forward, backward, saved = ([0.0] * len(pieces) for _ in range(3))
    known: dict[Any, tuple[float, float]] = {}
    for (number, args, kwargs), call in zip(calls[-len(trace.calls) :], trace.calls, strict=True):
        piece = pieces[number]
        key = _kind(piece.module, args, kwargs)
        if key not in known:
            known[key] = _measure(piece, args, kwargs, where, repeats)
        forward[number] += known[key][0]
        backward[number] += known[key][1]
        saved[number] += call.saved
    forward[-1] += min(tail.forward[1:])  # what comes behind the last piece, as the loss, is of the last stage
    backward[-1] += min(tail.backward[1:])
    return PieceCosts(
        tuple(
            PieceCost(
                path=piece.path,
                forward=forward[i],
                backward=backward[i],
                saved=int(saved[i]),
                held=sum(p.nbytes for p in piece.module.parameters()),
            )
            for i, piece in enumerate(pieces)
        )
    )


class _Tail:
    """Computes a loss, and measures what of it comes behind the last piece."""

    def __init__(self, run: Callable[[nn.Module, Any], Any], batch: Any, device: torch.device) -> None:
        self._run, self._batch, self._device = run, batch, device
        self._begun = 0.0
        self.forward: list[float] = []
        self.backward: list[float] = []

    def begin(self) -> None:
        self._begun = _now(self._device)

    def __call__(self, model: nn.Module) -> Any:
        loss = self._run(model, self._batch)
        end = _now(self._device)
        self.forward.append(end - self._begun)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.sum().backward()
        self.backward.append(_now(self._device) - end)
        return loss


def _kind(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What two calls that take as long have in common."""
    given = [
        (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x)
        for x in tree_flatten((args, kwargs))[0]
    ]
    own = [(tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()]
    return type(module), repr(module), tuple(own), tuple(given)


def _measure(piece: PipelinePiece, args: Any, kwargs: Any, device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    module = copy.deepcopy(piece.module)
    if any(p.is_meta for p in module.parameters()):
        module.to_empty(device=device)
        with torch.no_grad():
            for p in module.parameters():
                p.normal_(std=0.02) if p.is_floating_point() else p.zero_()
    module.to(device)
    given, spec = tree_flatten((args, kwargs))
    values = [_drawn(x, device) if isinstance(x, Tensor) else x for x in given]
    trained = [p for p in module.parameters() if p.requires_grad]
    onward: list[float] = []
    back: list[float] = []
    try:
        for _ in range(repeats + 1):
            leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in values]
            wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad] + trained
            args, kwargs = tree_unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], spec)
            begun = _now(device)
            out = module(*args, **kwargs)
            middle = _now(device)
            made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor) and x.requires_grad]
            if made and wanted:
                torch.autograd.grad(made, wanted, [torch.ones_like(x) for x in made], allow_unused=True)
            onward.append(middle - begun)
            back.append(_now(device) - middle)
    except Exception as error:
        raise ModelError(
            f"the piece {piece.path!r} cannot be measured by itself ({type(error).__name__}: {error}): name the pieces "
            "at which stages begin, or leave Parallel(stages=...) out."
        ) from error
    return min(onward[1:]), min(back[1:])  # others take of the time, never from it


def _drawn(x: Tensor, device: torch.device) -> Tensor:
    """Values for an input of which the shape is known."""
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=x.dtype, device=device).requires_grad_(x.requires_grad)
    return (
        torch.ones(x.shape, dtype=x.dtype, device=device)
        if x.dtype == torch.bool
        else torch.zeros(x.shape, dtype=x.dtype, device=device)
    )


def _now(device: torch.device) -> float:
    """Seconds of this thread where it does all the work, which other processes do not lengthen."""
    accelerator.synchronize(device)
    return thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter()
