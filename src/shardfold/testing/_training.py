"""`same_training`: a layout trains as plain PyTorch does, step by step, or an assertion says where it departs.

The reference is one process, one thread, `torch.nn` and `torch.optim` and nothing else: each step takes the loss of the
whole global batch. The engine's ranks each take their slices of that same batch: slice ``m * world_size + r`` of dim 0
goes to rank ``r`` as its micro-batch ``m``. With a loss that is a mean over dim 0 the two are the same mathematics, so
what remains is rounding: about 1e-6 relative in fp32.

Adam divides by the size of the gradient, so it trains nearly the same when all gradients are wrong by a factor, and so
does clipping. The default optimizer is SGD with momentum for that reason, and with clipping the norms are compared too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardfold.errors import UsageError
from shardfold.plan.checks import known_arguments
from shardfold.sharding.init import Init
from shardfold.testing.ranks import Ranks

Batch: TypeAlias = "Tensor | tuple[Any, ...] | Mapping[str, Any]"


@dataclass(frozen=True, kw_only=True)
class TrainingMatch:
    """How near two trainings were. Differences are relative to the reference; lists have one entry per step.

    Examples:
        >>> from shardfold.tools.recipes.gpt import GPT, GPTConfig
        >>> build = partial(GPT, GPTConfig(layers=1, d_model=8, heads=2, d_ff=16, context=4, vocab=8))
        >>> tokens = torch.arange(8).view(2, 4)
        >>> match = same_training(build, [(tokens, tokens)], layout="zero3", world_size=2, steps=2)
        >>> match.max_loss_difference < 1e-5
        True
    """

    losses: list[float]
    reference_losses: list[float]
    max_loss_difference: float
    max_parameter_difference: float | None  # None: parameters were not compared
    max_way_difference: float | None = None  # likewise; relative to the way that a parameter went, both as norms
    reports: list[Any] = field(default_factory=list, repr=False)  # rank 0's StepReport at each boundary


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What both trainings share; picklable."""

    build: Callable[[], nn.Module]
    batches: list[
        tuple[Any, ...] | dict[str, Any]
    ]  # global batches, repeated from the start when there are fewer than steps
    optimizer: Callable[..., torch.optim.Optimizer]
    loss: Callable[[Any, Any], Tensor] | None
    clip_norm: float | None
    steps: int
    seed: int
    want_parameters: bool
    parts: tuple[int, int] | None = (
        None  # ranks and micro-batches in which the reference takes a batch; None: as a whole
    )

    def loss_on(self, model: Callable[..., Any], batch: tuple[Any, ...] | dict[str, Any]) -> Tensor:
        """Runs ``model``. With a separate loss the last element of a longer tuple is its target and not the model's."""
        if isinstance(batch, dict):
            output = model(**batch)
        else:
            output = model(*(batch[:-1] if self.loss is not None and len(batch) > 1 else batch))
        return output if self.loss is None else self.loss(output, batch)


@dataclass(frozen=True, kw_only=True)
class _Trained:
    losses: list[float]
    parameters: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)  # of the gradients before clipping, where it clips
    start: dict[str, Tensor] = field(default_factory=dict)  # the parameters before
    reports: list[Any] = field(default_factory=list)


@known_arguments
def same_training(
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    *,
    layout: Any,
    world_size: int,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Any = "fp32",
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    steps: int = 30,
    parallel: Any = None,
    init: Init | None = None,
    tol: float = 1e-6,
    parameter_tol: float | None = None,
    way_tol: float | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    reference: str = "whole",
    ranks: Ranks | None = None,
    seed: int = 0,
    timeout: float = 120.0,
    **engine_options: Any,
) -> TrainingMatch:
    """Train ``build()`` for ``steps`` in plain PyTorch and under ``layout``, and assert that the two agree.

    ``build``: picklable, gives the module; its forward on ``*batch`` returns the loss, or, with ``loss``, on
    ``*batch[:-1]`` an output from which ``loss(output, batch)`` makes the loss. The loss is a mean over dim 0.
    ``batches``: global batches, repeated as needed; one that is a mapping goes to forward whole, as keyword arguments.
    Dim 0 of each tensor divides by ``world_size * accumulate``, other values go to every rank as they are.
    ``optimizer`` takes the parameters (default: SGD with momentum). The reference stays in fp32 whatever ``precision``
    is: give a ``tol`` that fits. ``tol`` bounds the relative difference of each step's loss; ``parameter_tol``, if
    given, that of each final parameter, relative to its largest element; ``way_tol`` the norm of that difference,
    relative to the norm of what training has changed in the parameter: 1 for one that was never updated. With
    ``reference="parts"`` the plain training takes the loss of each slice by itself and adds the gradients up, as the
    ranks do: for optimizers that turn rounding into steps of full size (a sign, a division by the root of a second
    moment near its eps). ``ranks`` is a pool to run in; ``seed`` is of both trainings; further options go to the
    engine.

    Raises `AssertionError` where the trainings differ, `RanksFailed` if one of them fails, and `UsageError` for
    batches that cannot be cut evenly and an unknown ``reference``.

    Examples:
        >>> from shardfold.tools.recipes.gpt import GPT, GPTConfig
        >>> build = partial(GPT, GPTConfig(layers=1, d_model=8, heads=2, d_ff=16, context=4, vocab=8))
        >>> tokens = torch.arange(8).view(2, 4)
        >>> match = same_training(build, [(tokens, tokens)], layout="zero3", world_size=2, steps=2)
        >>> match.max_loss_difference < 1e-5
        True
    """
    if reference not in ("whole", "parts"):
        raise UsageError(f"same_training(reference={reference!r}): it is 'whole' or 'parts'.")
    job = _Job(
        build=build,
        batches=[_as_arguments(batch) for batch in batches],
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.01),
        loss=loss,
        clip_norm=clip_norm,
        steps=steps,
        seed=seed,
        want_parameters=parameter_tol is not None or way_tol is not None,
        parts=(world_size, accumulate) if reference == "parts" else None,
    )
    _check_batches(job.batches, world_size * accumulate)
    options = dict(layout=layout, precision=precision, accumulate=accumulate, clip_norm=clip_norm, parallel=parallel)
    options = {**options, "init": replace(init or Init(), seed=seed), **engine_options}
    if ranks is None:
        with Ranks(world_size) as pool:
            plain, sharded = _train_both(pool, job, options, world_size, timeout)
    else:
        plain, sharded = _train_both(ranks, job, options, world_size, timeout)
    title = f"{_name(layout)} on {world_size} ranks, accumulate={accumulate}, precision={_name(precision)}"
    return _compare(title, plain, sharded, tol, parameter_tol, way_tol)


def _train_both(
    ranks: Ranks, job: _Job, options: dict[str, Any], world_size: int, timeout: float
) -> tuple[_Trained, _Trained]:
    # The reference runs in a worker as well: one thread, and nobody else's random state.
    plain = ranks.run(_train_plain, job, world_size=1, timeout=timeout, distributed=False)[0]
    sharded = ranks.run(_train_sharded, job, options, world_size=world_size, timeout=timeout)
    return plain, sharded[0]


def _train_plain(job: _Job) -> _Trained:
    torch.manual_seed(job.seed)
    model = job.build()
    start = {name: value.detach().clone() for name, value in model.state_dict().items() if job.want_parameters}
    optimizer = job.optimizer(model.parameters())
    losses: list[float] = []
    norms: list[float] = []
    for step in range(job.steps):
        batch = job.batches[step % len(job.batches)]
        loss = _backward(job, model, batch)
        if job.clip_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    parameters = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return _Trained(losses=losses, parameters=parameters if job.want_parameters else {}, norms=norms, start=start)


def _backward(job: _Job, model: nn.Module, batch: tuple[Any, ...] | dict[str, Any]) -> float:
    """Leaves the gradients of a global batch in the plain model; its loss."""
    if job.parts is None:
        loss = job.loss_on(model, batch)
        loss.backward()
        return loss.item()
    world, accumulate = job.parts
    sums: dict[nn.Parameter, Tensor] = {}
    losses: list[float] = []
    for micro in range(accumulate):
        for rank in range(world):
            loss = job.loss_on(model, _slice(batch, micro * world + rank, world * accumulate))
            loss.backward()
            losses.append(loss.item())
            for p in model.parameters():
                if p.grad is not None:  # scaled as they arrive, as the engine does
                    grad = p.grad * (1.0 / (world * accumulate))
                    sums[p] = sums[p].add_(grad) if p in sums else grad
                    p.grad = None
    for p, grad in sums.items():
        p.grad = grad
    return sum(losses) / len(losses)


def _train_sharded(job: _Job, options: dict[str, Any]) -> _Trained:
    import torch.distributed as dist

    import shardfold

    rank = dist.get_rank()
    torch.manual_seed(job.seed)
    engine = shardfold.Engine(job.build(), optimizer=job.optimizer, **options)
    losses: list[float] = []
    reports: list[Any] = []
    try:
        for step in range(job.steps):
            batch = job.batches[step % len(job.batches)]
            micro_losses, updated = [], []
            for part in _parts(batch, rank, dist.get_world_size(), options["accumulate"]):
                loss = job.loss_on(engine, part)
                engine.backward(loss)
                reports.append(engine.step())
                micro_losses.append(loss.item())
                updated.append(reports[-1].updated)
            if updated != [False] * (len(updated) - 1) + [True]:
                raise AssertionError(f"step {step + 1}: engine.step() reported updated={updated} by micro-batch")
            losses.append(engine.mean(sum(micro_losses) / len(micro_losses)))
        parameters = engine.state_dict() if job.want_parameters else {}
    finally:
        engine.close()
    boundaries = [report for report in reports if report.updated]
    norms = [float(report.grad_norm) for report in boundaries] if job.clip_norm is not None else []
    if rank != 0:  # every rank has the same: one copy is enough to send back
        return _Trained(losses=losses, parameters={})
    return _Trained(losses=losses, parameters=parameters, norms=norms, reports=boundaries)


def _as_arguments(batch: Batch) -> tuple[Any, ...] | dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    return batch if isinstance(batch, tuple) else (batch,)


def _parts(
    batch: tuple[Any, ...] | dict[str, Any], rank: int, world_size: int, accumulate: int
) -> list[tuple[Any, ...] | dict[str, Any]]:
    """The micro-batches of one rank."""
    return [_slice(batch, micro * world_size + rank, world_size * accumulate) for micro in range(accumulate)]


def _slice(batch: tuple[Any, ...] | dict[str, Any], index: int, count: int) -> tuple[Any, ...] | dict[str, Any]:
    """Slice ``index`` of ``count`` equal ones of dim 0 of each tensor."""
    if isinstance(batch, dict):
        return dict(zip(batch, _slice(tuple(batch.values()), index, count), strict=True))
    return tuple(value.chunk(count)[index] if isinstance(value, Tensor) else value for value in batch)


def _check_batches(batches: Sequence[tuple[Any, ...] | dict[str, Any]], count: int) -> None:
    if not batches:
        raise UsageError("same_training needs at least one batch.")
    for number, batch in enumerate(batches):
        for value in batch.values() if isinstance(batch, dict) else batch:
            if isinstance(value, Tensor) and (value.dim() == 0 or value.shape[0] % count):
                raise UsageError(
                    f"batch {number} has a tensor of shape {tuple(value.shape)}: "
                    f"its dim 0 cannot be cut into world_size * accumulate = {count} equal slices."
                )


def _compare(
    title: str,
    plain: _Trained,
    sharded: _Trained,
    tol: float,
    parameter_tol: float | None,
    way_tol: float | None = None,
) -> TrainingMatch:
    loss_difference = _compare_series(title, "losses", sharded.losses, plain.losses, tol)
    # A norm sums over all gradients of one step, where a loss averages: it is allowed ten times as much.
    _compare_series(title, "gradient norms", sharded.norms, plain.norms, 10 * tol)
    wanted = parameter_tol is not None or way_tol is not None
    worst = _compare_parameters(title, plain, sharded, _given(parameter_tol)) if wanted else None
    way = _compare_ways(title, plain, sharded, _given(way_tol)) if wanted and plain.start else None
    return TrainingMatch(
        losses=sharded.losses,
        reference_losses=plain.losses,
        max_loss_difference=loss_difference,
        max_parameter_difference=worst,
        max_way_difference=way,
        reports=sharded.reports,
    )


def _compare_series(title: str, what: str, actual: list[float], expected: list[float], tol: float) -> float:
    """The largest relative difference of two series with one number per step."""
    differences = [_relative(a, b) for a, b in zip(actual, expected, strict=True)]
    for step, difference in enumerate(differences):
        if not difference <= tol:
            table = "\n".join(
                f"  step {n + 1}: {actual[n]:.9g} against {expected[n]:.9g} (relative {differences[n]:.2g})"
                for n in range(max(0, step - 2), min(len(differences), step + 3))
            )
            raise AssertionError(
                f"{title} departs from plain PyTorch at step {step + 1} of {len(differences)}: the {what} differ by "
                f"{difference:.3g} relative, allowed is {tol:g}\n{table}"
            )
    return max(differences, default=0.0)


def _compare_parameters(title: str, plain: _Trained, sharded: _Trained, tol: float) -> float:
    missing, extra = (
        plain.parameters.keys() - sharded.parameters.keys(),
        sharded.parameters.keys() - plain.parameters.keys(),
    )
    if missing or extra:
        raise AssertionError(f"{title}: state_dict lacks {sorted(missing)} and has {sorted(extra)} too many")
    differences: dict[str, float] = {}
    for name, expected in plain.parameters.items():
        actual = sharded.parameters[name]
        if actual.shape != expected.shape:
            raise AssertionError(f"{title}: {name} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
        apart = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
        size = expected.double().abs().max().item() if expected.numel() else 0.0
        differences[name] = apart / size if size else apart
    said = "final parameters differ from plain PyTorch by more than {:g} of their largest element"
    return _worst(title, differences, tol, said)


def _worst(title: str, differences: dict[str, float], tol: float, said: str) -> float:
    """The greatest of the differences.

    Raises:
        AssertionError: some are above ``tol``, which is ``said`` of them.
    """
    wrong = {name: value for name, value in differences.items() if not value <= tol}
    if wrong:
        worst = sorted(wrong, key=lambda name: -wrong[name])[:5]
        lines = "\n".join(f"  {name}: {wrong[name]:.3g}" for name in worst)
        what = said.format(tol)
        raise AssertionError(f"{title}: {len(wrong)} of {len(differences)} {what}, the worst:\n{lines}")
    return max(differences.values(), default=0.0)


def _given(tol: float | None) -> float:
    return math.inf if tol is None else tol


def _compare_ways(title: str, plain: _Trained, sharded: _Trained, tol: float) -> float:
    """Differences relative to what training has changed: a parameter that did not move has to stay as it is."""
    differences: dict[str, float] = {}
    for name, expected in plain.parameters.items():
        apart = (sharded.parameters[name].double() - expected.double()).norm().item()
        way = (expected.double() - plain.start[name].double()).norm().item()
        differences[name] = apart / way if way else (math.inf if apart else 0.0)
    said = "parameters have gone another way than in plain PyTorch, by more than {:g} of its length"
    return _worst(title, differences, tol, said)


def _relative(actual: float, expected: float) -> float:
    """|actual - expected| / |expected|; infinite if either is not finite, so that NaN never passes for equal."""
    if not (math.isfinite(actual) and math.isfinite(expected)):
        return math.inf
    return abs(actual - expected) / max(abs(expected), 1e-30)


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else repr(value)
