"""fp16 under a loss scale: the scales and skipped steps of torch.amp.GradScaler, and its training."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, NonFiniteError, UsageError
from shardfold.numerics.scaling import Scaler
from shardfold.testing import Ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.support import models
from tests.support.options import grouped

LAYOUTS = list(sf.PRESETS)
ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
SLOW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
OVERFLOWS = (0, 3, 4, 9, 15)  # of 20 steps
RULE = sf.LossScale(interval=3)


def mesh_for(layout: str) -> dict[str, int] | None:
    return {"inter": 2, "intra": 1} if layout in ("hsdp", "hpz") else None


class Explodes(models.Small):
    """Its loss is inf for batches whose first token is 0 (on whichever rank has that row)."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        return loss * torch.where((tokens[:, 0] == 0).any(), torch.inf, 1.0)


def overflowing(steps: int) -> list[tuple[Tensor, Tensor]]:
    batches = []
    for i, (tokens, targets) in enumerate(models.batches(steps, rows=8)):
        tokens = tokens.clamp(min=1)
        if i in OVERFLOWS:
            tokens[-1, 0] = 0  # a row of the last rank
        batches.append((tokens, targets))
    return batches


def plain_scaled(steps: int, clip: float | None) -> tuple[list[float], list[float], list[float], list[dict[str, Any]]]:
    """Losses, scales after each step, learning rates, and the final optimizer states of PyTorch alone."""
    torch.manual_seed(0)
    model = Explodes()
    optimizer = ADAMW(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=RULE.interval)
    losses, scales, rates = [], [], []
    for tokens, targets in overflowing(steps):
        loss = model(tokens, targets)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:  # the recipe of PyTorch's documentation for schedules
            schedule.step()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, scales, rates, [optimizer.state[p] for p in model.parameters()]


def follows_grad_scaler(layout: str, clip: float | None) -> None:
    steps = 20
    torch.manual_seed(0)
    engine = sf.Engine(
        Explodes(), optimizer=ADAMW, layout=layout, parallel=mesh_for(layout), loss_scale=RULE, clip_norm=clip,
        lr_schedule=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
    )  # fmt: skip
    losses, scales, rates, skipped = [], [], [], []
    for batch in overflowing(steps):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        engine.backward(loss)
        report = engine.step()
        assert report.updated is not report.skipped
        skipped += [len(losses)] * report.skipped
        losses.append(engine.mean(loss.item()))
        scales.append(engine.loss_scale.scale)  # type: ignore[union-attr]
        rates.append(engine.optimizer.param_groups[0]["lr"])
    expected = plain_scaled(steps, clip)
    assert skipped == list(OVERFLOWS)
    assert scales == expected[1]
    assert rates == expected[2]
    finite = [(a, b) for a, b in zip(losses, expected[0], strict=True) if b != float("inf")]
    assert len(finite) == steps - len(OVERFLOWS)
    assert max(abs(a - b) / b for a, b in finite) < 2e-6
    with engine.gathered(of="exp_avg") as moments:
        for moment, state in zip(moments.values(), expected[3], strict=True):
            assert torch.allclose(moment, state["exp_avg"], rtol=1e-3, atol=1e-6)
    counts = {step for s in engine._updater._fused.values() for step in s.steps}  # type: ignore[union-attr]
    assert counts == {steps - len(OVERFLOWS)} == {engine.steps}
    assert engine.stats().skipped == len(OVERFLOWS)
    engine.close()


@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_skipped_steps_and_schedule_are_grad_scalers(ranks: Ranks, layout: str) -> None:
    ranks.run(follows_grad_scaler, layout, 0.5 if layout in ("zero2", "ddp") else None, world_size=2)


class Logits(nn.Module):
    """A byte-level GPT of the training recipe, small."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=2, d_model=32, heads=2, context=16, vocab=64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.gpt(tokens, targets)


def texts(steps: int) -> list[Tensor]:
    """``(8, 17)`` tokens each: counting up from random starts, so that there is something to learn."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randint(64, (8, 1), generator=draw) + torch.arange(17)) % 64 for _ in range(steps)]


def amp_losses(dtype: torch.dtype, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Logits()
    optimizer = SLOW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    losses = []
    for tokens in texts(steps):
        with torch.autocast("cpu", dtype):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine_losses(layout: str, precision: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    engine = sf.Engine(Logits(), optimizer=SLOW, layout=layout, parallel=mesh_for(layout), precision=precision)
    losses = []
    for tokens in texts(steps):
        part = tokens.chunk(engine.world_size)[engine.rank]
        loss = engine(part[:, :-1], part[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    engine.close()
    return losses


_amp: dict[torch.dtype, list[float]] = {}
attends = pytest.mark.skipif(not models.attends_in_fp16(), reason="this PyTorch does not attend in fp16 here")


@pytest.mark.sampled(4)
@pytest.mark.product
@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        *(pytest.param("fp16", layout, marks=attends) for layout in LAYOUTS),
        *(("bf16", layout) for layout in LAYOUTS),
        pytest.param("fp16-autocast", "zero3", marks=attends),
        ("bf16-autocast", "ddp"),
    ],
)
def test_100_steps_in_16_bits_follow_plain_amp(ranks: Ranks, layout: str, precision: str) -> None:
    dtype = torch.float16 if "fp16" in precision else torch.bfloat16
    if dtype not in _amp:
        _amp[dtype] = ranks.run(amp_losses, dtype, 100, world_size=1, distributed=False)[0]
    actual = ranks.run(engine_losses, layout, precision, 100, world_size=2)[0]
    assert _amp[dtype][-1] < 0.5 * _amp[dtype][0]
    assert max(abs(a - b) / b for a, b in zip(actual, _amp[dtype], strict=True)) < 2e-3


# -- where the scale is, and where it is not --------------------------------------------------------------------------


class Sums(nn.Module):
    """The gradient of every element is ``slope``; ``wide`` is larger than what is copied together with others."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(3, 5000, dtype=dtype))
        self.small = nn.Parameter(torch.zeros(7, dtype=dtype))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.wide.float() * slope.float()).sum() + (self.small.float() * slope.float()).sum()


NARROW = sf.Precision(compute="fp16", grads="fp16", reduce="fp16")


def gradients_are_true(layout: str, precision: Any, slope: float, loss_scale: float) -> None:
    """1e-9 is zero in fp16 and 5e-8 nearly so; 3000 times 2**4 or 6e4 twice is inf in it."""
    engine = sf.Engine(
        Sums(),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        layout=layout,
        parallel=mesh_for(layout),
        precision=precision,
        loss_scale=loss_scale,
        accumulate=2,
        clip_norm=1e9,
    )
    for factor in (0.5, 1.5):  # different micro-batches: the mean is slope
        engine.backward(engine(torch.tensor(slope * factor, dtype=torch.float64)))
        shown = engine.module.small.grad if layout == "ddp" and factor == 1.5 else None
        if factor == 0.5:
            assert not engine.step().updated
    tolerance = (1e-2 if precision == "bf16-pure" else 2e-3) * slope
    with engine.gathered(of="grads") as grads:
        assert all((grad.double() - slope).abs().max() < tolerance for grad in grads.values())
    if type(shown) is torch.Tensor:  # else it stands for what is kept in a wider dtype
        assert (shown.double() - slope).abs().max() < tolerance
    report = engine.step()
    assert report.updated and report.loss_scale == loss_scale
    assert report.grad_norm == pytest.approx(slope * 15007**0.5, rel=tolerance / slope)
    with engine.gathered(of="master") as master:
        assert all((value.double() + slope).abs().max() < tolerance for value in master.values())
    engine.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("precision", "slope", "loss_scale"),
    [
        ("fp16", 1e-9, 2.0**16),
        ("fp16", 3000.0, 1.0),
        (NARROW, 1e-7, 2.0**16),
        (NARROW, 4e4, 1.0),  # the sum over 2 ranks of 2 micro-batches would be 16e4
        ("fp16-autocast", 1e-9, 2.0**16),
        ("bf16-pure", 1e-9, 3000.0),
    ],
)
@pytest.mark.product
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "hsdp"])
def test_gradients_are_true_wherever_they_are_read(
    ranks: Ranks, layout: str, precision: Any, slope: float, loss_scale: float
) -> None:
    ranks.run(gradients_are_true, layout, precision, slope, loss_scale, world_size=2)


def overflow_of_a_late_gradient() -> None:
    """A second backward brings a unit's gradient after it was reduced: what overflows there is found too."""
    torch.manual_seed(0)
    engine = sf.Engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), optimizer=ADAMW, loss_scale=8.0, layout="zero2")
    before = engine.state_dict()
    x = torch.ones(2, 4)
    output = engine(x)
    engine.backward(output.sum(), retain_graph=True)
    bad = torch.inf if engine.rank == 1 else 1.0
    engine.backward(output.sum() * bad)
    report = engine.step()
    assert report.skipped and not report.updated
    after = engine.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    engine.backward(engine(x).sum())
    assert engine.step().updated
    engine.close()


def test_an_overflow_on_one_rank_in_a_second_backward_skips_on_all(ranks: Ranks) -> None:
    ranks.run(overflow_of_a_late_gradient, world_size=2)


def test_a_plain_backward_under_a_scale_is_refused_and_autograd_grad_is_not() -> None:
    engine = sf.Engine(nn.Linear(4, 1), optimizer=SLOW, precision="fp16", loss_scale=sf.LossScale(initial=1024.0))
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(UsageError, match=r"loss\.backward\(\) under a loss scale .* call engine\.backward\(loss\)"):
        engine(x).sum().backward()
    (grad,) = torch.autograd.grad(engine(x).sum(), x)  # of an input: no scale is needed or applied
    assert torch.equal(grad[0], engine.state_dict()["weight"][0].half().float())
    engine.backward(engine(x).sum())
    assert engine.step().updated
    engine.close()


def test_without_a_scale_nothing_is_refused_and_reports_say_1() -> None:
    engine = sf.Engine(nn.Linear(4, 1), optimizer=SLOW, precision="bf16")
    assert engine.loss_scale is None
    engine(torch.ones(2, 4)).sum().backward()
    assert engine.step().loss_scale == 1.0
    engine.close()


# -- the scale alone ------------------------------------------------------------------------------------------------


def grad_scaler(**options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **options)
    scaler.scale(torch.ones(()))  # makes its tensors
    return scaler


def turn(scaler: torch.amp.GradScaler, overflowed: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), torch.inf if overflowed else 0.0)
    scaler.step(torch.optim.SGD([parameter], lr=0.1))
    scaler.update()


def test_scales_equal_grad_scalers_on_a_random_schedule_and_states_are_exchanged() -> None:
    ours, theirs = Scaler(sf.LossScale(interval=4, floor=2.0**-60)), grad_scaler(growth_interval=4)
    draw = torch.Generator().manual_seed(0)
    for step in range(300):
        overflowed = bool(torch.rand((), generator=draw) < 0.2)
        ours.update(overflowed)
        turn(theirs, overflowed)
        assert ours.scale == theirs.get_scale()
        if step % 50 == 37:  # each goes on from the other's state
            state = theirs.state_dict()
            theirs = grad_scaler()
            theirs.load_state_dict(ours.state_dict())
            ours = Scaler(sf.LossScale(floor=2.0**-60))
            ours.load_state_dict(state)


def test_hysteresis_and_floor_are_deepspeeds() -> None:
    scaler = Scaler(sf.LossScale(initial=8.0, hysteresis=2, interval=2, floor=1.0, patience=2))
    scales = []
    for overflowed in (True, True, True, False, False, True, True, True, True, True, True):
        scaler.update(overflowed)
        scales.append(scaler.scale)
    # The first overflow since the scale last grew is forgiven, each later one lowers it.
    assert scales == [8, 4, 2, 2, 4, 4, 2, 1, 1, 1, 1]
    assert scaler.exhausted and scaler.skipped == 9


def test_the_largest_scale_is_finite() -> None:
    scaler = Scaler(sf.LossScale(initial=2.0**126, interval=1))
    for _ in range(4):
        scaler.update(False)
    assert scaler.scale == 2.0**127


@pytest.mark.parametrize(
    "options", [{"growth": 0.5}, {"backoff": 2.0}, {"initial": -1.0}, {"patience": 0}, {"floor": 0}, {"delay": -1}]
)
def test_rules_that_contradict_themselves_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)) + " is "):
        sf.LossScale(**options)


def test_states_of_something_else_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lacks 'scale': load what engine\.loss_scale\.state_dict\(\)"):
        Scaler(sf.LossScale()).load_state_dict({"step": 3})


def skipped_steps_move_nothing(layout: str) -> None:
    """One of two micro-batches on one rank overflows."""
    torch.manual_seed(0)
    engine = sf.Engine(
        models.Small(), optimizer=ADAMW, layout=layout, parallel=mesh_for(layout), accumulate=2, loss_scale=1024.0,
        lr_schedule=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
    )  # fmt: skip
    average = sf.Average(engine, decay=0.5)
    batch = [t.chunk(engine.world_size)[engine.rank] for t in models.batches(1, rows=8)[0]]

    def step(bad: int | None) -> sf.StepReport:
        for micro in (0, 1):
            engine.backward(engine(*batch) * (torch.inf if (engine.rank, micro) == (1, bad) else 1.0))
            report = engine.step()
        return report

    def everything() -> dict[str, Any]:
        states = {"average": average.state_dict(), "schedule": engine.lr_schedule.state_dict()}  # type: ignore[union-attr]
        for of in ("master", "exp_avg", "exp_avg_sq"):
            with engine.gathered(of=of) as values:
                states[of] = {name: value.clone() for name, value in values.items()}
        states["counts"] = [list(s.steps) for s in engine._updater._fused.values()]  # type: ignore[union-attr]
        return {**states, "steps": engine.steps, "params": engine.state_dict()}

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    assert step(None).updated
    before = everything()
    for bad in (0, 1):
        assert step(bad).skipped
        assert same(everything(), before)
    assert step(None).updated and not same(everything(), before)
    engine.close()


@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_step_leaves_every_state_as_it_was(ranks: Ranks, layout: str) -> None:
    ranks.run(skipped_steps_move_nothing, layout, world_size=2)


@pytest.mark.parametrize("precision", ["fp32", NARROW], ids=["fp32", "fp16 on the wire"])
def test_a_scale_that_is_loaded_holds_from_the_next_step_on(precision: Any) -> None:
    """Also when it comes between two micro-batches: those of one step have one scale."""
    engine = sf.Engine(
        Sums(),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        precision=precision,
        accumulate=2,
        loss_scale=sf.LossScale(initial=8.0),
    )
    slope = torch.tensor(3.0)
    for scale, loaded in ((8.0, 32.0), (32.0, 2.0), (2.0, 2.0)):
        engine.backward(engine(slope))
        engine.loss_scale.load_state_dict({**engine.loss_scale.state_dict(), "scale": loaded})  # type: ignore[union-attr]
        engine.step()
        engine.backward(engine(slope))
        with engine.gathered("small", of="grads") as grad:
            assert torch.equal(grad.float(), torch.full((7,), 3.0))
        assert engine.step().loss_scale == scale
    assert torch.equal(engine.state_dict()["small"], torch.full((7,), -9.0))
    engine.close()


# -- learning rates that are too high -------------------------------------------------------------------------------


class Warmed(NamedTuple):
    losses: list[float]
    scales: list[float]
    error: str


def warmed_up(low: float, peak: float, precision: Any = "fp16", steps: int = 60, **options: Any) -> Warmed:
    """The learning rate goes from ``low`` to ``peak`` in 20 updates."""
    torch.manual_seed(0)
    schedule = partial(sf.optim.WarmupLR, warmup_min_lr=low, warmup_max_lr=peak, warmup_num_steps=20)
    engine = sf.Engine(Logits(), optimizer=SLOW, precision=precision, lr_schedule=schedule, **grouped(**options))
    losses, scales, error = [], [], ""
    for tokens in texts(steps):
        part = tokens.chunk(engine.world_size)[engine.rank]
        loss = engine(part[:, :-1], part[:, 1:])
        losses.append(engine.mean(loss.item()))
        engine.backward(loss)
        try:
            engine.step()
        except NonFiniteError as raised:
            error = str(raised)
            break
        scales.append(engine.loss_scale.scale if engine.loss_scale is not None else 1.0)
    engine.close()
    return Warmed(losses, scales, error)


@pytest.mark.soak
@attends
def test_a_warm_up_from_a_rate_that_is_too_high_recovers_by_a_lower_scale(ranks: Ranks) -> None:
    calm = ranks.run(warmed_up, 3e-3, 3e-3, steps=20, world_size=2)[0]
    assert set(calm.scales) == {2.0**16}  # so it is the rate that makes gradients overflow
    run = ranks.run(warmed_up, 0.1, 3e-3, world_size=2)[0]
    falls = [i for i, (a, b) in enumerate(zip([2.0**16, *run.scales], run.scales, strict=False)) if b < a]
    assert falls and falls[-1] < 20 and run.scales[-1] > 1 and not run.error
    assert run.losses[-1] < 0.5 * run.losses[falls[-1]]


@pytest.mark.soak
@attends
def test_at_the_floor_the_advice_of_the_error_works(ranks: Ranks) -> None:
    """Weights that have grown until forward overflows: a tenth of the rate. Every rank says the same."""
    runs = ranks.run(warmed_up, 0.0, 1.0, world_size=2)
    assert runs[0].scales[-1] == 1 and runs[0].error == runs[1].error
    said = re.search(r"\(it was (.*)\): inf or NaN first in .*with a (tenth) of the learning rate", runs[0].error)
    assert said is not None and said[1].endswith(", 4, 2, 1 (10 times)")
    advised = ranks.run(warmed_up, 0.0, 1.0 / 10, world_size=2)[0]
    assert not advised.error and advised.losses[-1] < 0.1 * advised.losses[0]


class Steep(Logits):
    """Its loss is finite, but the gradient of what is fp16 is not."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.gpt(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) * 2.0**24


@pytest.mark.soak
@attends
def test_at_the_floor_with_a_finite_loss_the_advice_is_another_and_works() -> None:
    def train(precision: Any, rule: sf.LossScale | None, steps: int = 25) -> tuple[list[float], str]:
        torch.manual_seed(0)
        engine = sf.Engine(Steep(), optimizer=partial(torch.optim.Adam, lr=3e-3), precision=precision, loss_scale=rule)
        losses = []
        for tokens in texts(steps):
            losses.append((loss := engine(tokens[:, :-1], tokens[:, 1:])).item())
            engine.backward(loss)
            try:
                engine.step()
            except NonFiniteError as error:
                return losses, str(error)
        engine.close()
        return losses, ""

    _, error = train("fp16", sf.LossScale(initial=1.0, patience=2))
    assert "first in the gradient of the output of gpt.head on rank 0, step 1, micro-batch 0" in error
    said = re.search(r"loss_scale=(LossScale\(.*?\)), or use precision='(\w+)'", error)
    assert said is not None and said[1] == "LossScale(floor=2.0**-14)"
    for precision, rule in (("fp16", sf.LossScale(initial=1.0, floor=2.0**-14)), (said[2], None)):
        losses, error = train(precision, rule)
        assert not error and losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("rule", [4.0, sf.LossScale(initial=4.0, patience=10)], ids=["static", "dynamic"])
def test_at_the_floor_the_tenth_skipped_step_stops(rule: Any) -> None:
    engine = sf.Engine(nn.Linear(4, 1), optimizer=SLOW, loss_scale=rule)
    x = torch.full((2, 4), torch.inf)
    before = engine.state_dict()["weight"]
    steps = 9 if isinstance(rule, float) else 11  # two of them on the way from 4 to 1
    for _ in range(steps):
        engine.backward(engine(x).sum())
        assert engine.step().skipped
    engine.backward(engine(x).sum())
    with pytest.raises(NonFiniteError, match=r"10 times in a row although the loss scale is at its floor"):
        engine.step()
    assert torch.equal(engine.state_dict()["weight"], before)
    engine.close()
