"""1-bit LAMB, 0/1 Adam and warm-ups that end by themselves: equal to loops over all ranks in one process, in fp64.

What is sent is fp32 in both; weights, moments and scales are fp64.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, UsageError
from shardfold.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from shardfold.testing import Ranks
from tests.support.options import grouped

WIDTH, STEPS, BLOCK = 16, 14, 32
UNITS = ["first", "second", "side"]
LAMB = partial(
    OneBitLamb, lr=0.02, freeze_step=5, betas=(0.9, 0.95), weight_decay=0.05, trust_range=(0.2, 5.0), coeff_beta=0.5,
    factor_range=(0.6, 1.4), factor_threshold=0.1,
)  # fmt: skip
ZERO_ONE = partial(
    ZeroOneAdam, lr=0.02, freeze_step=5, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, variance_scaler=2,
    local_scaler=3, local_clipper=3,
)  # fmt: skip
STABLE = partial(OneBitAdam, lr=0.01, freeze_step="stable", betas=(0.9, 0.75), eps=1e-6, stable=0.82)


class Model(nn.Module):
    """The first column of the first layer never has a gradient; the layer at the side is used in every third step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.side = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in UNITS)
        self.double()

    def forward(self, x: Tensor, aside: bool) -> Tensor:
        y = self.first(x).tanh()
        return self.second(y + self.side(y) if aside else y)


def batch(step: int) -> Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x[:, 0] = 0
    return x


def loss_of(module: Any, x: Tensor, step: int) -> Tensor:
    return (module(x, step % 3 != 1) - x.roll(1, 1)).square().mean()


def coded(values: Tensor) -> Tensor:
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().sum(1, keepdim=True) / blocks.count_nonzero(1).clamp(min=1).unsqueeze(1)
    return torch.where(blocks >= 0, scale, -scale).view_as(values)


class Loop:
    """So many groups of one process, each with weights and momentum of its own; ``v`` all have together."""

    def __init__(self, groups: int) -> None:
        self.models = [Model() for _ in range(groups)]
        self.params = [list(each.parameters()) for each in self.models]
        self.m = [[torch.zeros_like(p) for p in params] for params in self.params]
        self.v = [torch.zeros_like(p) for p in self.params[0]]
        self.worker = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for params in self.params]
        self.server = [torch.zeros_like(p, dtype=torch.float32) for p in self.params[0]]

    def grads(self, step: int) -> list[list[Any]]:
        halves = batch(step).chunk(len(self.models))
        return [
            list(torch.autograd.grad(loss_of(model, x, step), list(model.parameters()), allow_unused=True))
            for model, x in zip(self.models, halves, strict=True)
        ]

    def resize(self, groups: int) -> None:
        """A run goes on from a checkpoint, where all are alike: what signs have lost is the mean on each."""
        for each in (self.models, self.params, self.m):
            del each[groups:]
        mean = [sum(errors) / len(errors) for errors in zip(*self.worker, strict=True)]
        self.worker = [[each.clone() for each in mean] for _ in range(groups)]

    def averaged(self, i: int, values: list[Tensor], root: Tensor) -> Tensor:
        """By signs of what is over the root, of the ``i``-th parameter."""
        alive, sent = self.v[i] != 0, []
        for rank, value in enumerate(values):
            x = torch.where(alive, (value / root).float() + self.worker[rank][i], 0)
            sent.append(coded(x))
            self.worker[rank][i] = torch.where(alive, x - sent[-1], 0)
        y = torch.where(alive, sum(sent) / len(sent) + self.server[i], 0)
        self.server[i] = torch.where(alive, y - coded(y), 0)
        return torch.where(alive, coded(y), 0).double() * root


def one_bit_lamb(groups: int, later: int = 0) -> list[Tensor]:
    """``later``: so many go on from a checkpoint behind step 10."""
    loop = Loop(groups)
    fresh, coeff, last = [v.clone() for v in loop.v], [0.0] * 3, [1.0] * 3
    uses, grown = [0] * 3, [0] * 3
    for step in range(STEPS):
        if step == 10 and later:
            groups = later
            loop.resize(groups)
        grads = loop.grads(step)
        for i in (i for i in range(3) if grads[0][i] is not None):
            x, m, v = loop.params[0][i].detach(), loop.m[0][i], loop.v[i]
            uses[i], grown[i] = uses[i] + 1, grown[i] + (step < 5)
            one, two, three = 1 - 0.9 ** uses[i], 1 - 0.95 ** max(grown[i], 1), 1 - 0.95 ** uses[i]
            if step < 5:
                g = sum(each[i] for each in grads) / groups
                m.lerp_(g, 0.1)
                v.mul_(0.95).addcmul_(g, g, value=0.05)
                fresh[i] = v.clone()
                u = m / one / ((v / two).sqrt() + 1e-8) + 0.05 * x
                scale = min(max(float(x.norm() / u.norm()), 0.2), 5.0)
                coeff[i] = 0.5 * coeff[i] + 0.5 * scale if coeff[i] else scale
            else:
                new = loop.averaged(i, [m.lerp(each[i], 0.1) for each in grads], (v / two).sqrt() + 1e-8)
                g = (new - 0.9 * m) / (1 - 0.9)
                fresh[i] = fresh[i] * 0.95 + 0.05 * g * g
                m.copy_(new)
                plain = m / one / ((v / two).sqrt() + 1e-8)
                u = plain + 0.05 * x
                factor = float((((v / two).sqrt() + 1e-8) / ((fresh[i] / three).sqrt() + 1e-8))[v != 0].max())
                share = min(1.0, float(plain.norm() / u.norm()))
                factor = min(max(factor * share + 1 - share, 0.6), 1.4)
                last[i] = min(max(factor, last[i] * 0.9), last[i] * 1.1)
                scale = coeff[i] * last[i]
            for params in loop.params:
                params[i].data.sub_(0.02 * scale * u)
    return [p.detach() for p in loop.params[0]]


#: How ranks meet in each step: the variance changes in 1, 2, 3 and 5; meetings are 1, 2 and then 3 steps apart.
MEETINGS = ["dense", "dense", "dense", "signs", "dense", "signs", "signs", "signs",
            "signs", "local", "signs", "local", "local", "signs"]  # fmt: skip


def zero_one_adam(groups: int, steps: int = STEPS, later: int = 0, saves: bool = False) -> list[list[Tensor]]:
    """``saves``: behind step 10, for which ranks meet; ``later``: so many go on from there."""
    loop = Loop(groups)
    u = [[torch.zeros_like(p) for p in loop.v] for _ in loop.models]
    anchor, rates = [p.detach().clone() for p in loop.params[0]], [0.0] * 3
    uses, grown = [0] * 3, [0] * 3

    def root_of(i: int) -> Tensor:
        return (1 - 0.9 ** uses[i]) * ((loop.v[i] / (1 - 0.95 ** max(grown[i], 1))).sqrt() + 1e-6)

    def meet(i: int) -> None:
        small = 1 - 0.9 ** uses[i]
        mean = loop.averaged(i, [each[i] for each in u], root_of(i) / small)
        anchor[i] = anchor[i] * (1 - rates[i] * 0.1) - mean / root_of(i)
        for rank, params in enumerate(loop.params):
            params[i].data.copy_(anchor[i])
            loop.m[rank][i] = mean / rates[i]
            u[rank][i].zero_()
        rates[i] = 0.0

    for step, meets in zip(range(steps), MEETINGS, strict=False):
        if step == 10 and (saves or later):
            for i in (i for i in range(3) if rates[i]):
                meet(i)
            if later:
                groups = later
                loop.resize(groups)
                del u[groups:]
        grads = loop.grads(step)
        for i in range(3):
            used, g = grads[0][i] is not None, None
            uses[i] += used
            if meets == "dense" and used:
                g = sum(each[i] for each in grads) / groups
                loop.v[i].mul_(0.95).addcmul_(g, g, value=0.05)
                grown[i] += 1
            root = root_of(i)
            for rank, each in enumerate(grads if used else ()):
                own = each[i] if meets != "dense" else g
                loop.m[rank][i] = torch.where(loop.v[i] != 0, loop.m[rank][i].lerp(own, 0.1), 0)
                x = loop.params[rank][i].data
                if meets != "dense":
                    u[rank][i] += 0.02 * loop.m[rank][i]
                if meets != "signs":
                    x.sub_(0.02 * (loop.m[rank][i] / root + 0.1 * x))
            rates[i] += 0.02 * (used and meets != "dense")
            if meets == "dense":
                anchor[i] = loop.params[0][i].detach().clone()
            if meets == "signs" and rates[i]:
                meet(i)
    return [[p.detach() for p in params] for params in loop.params]


def engine_of(optimizer: Any, layout: str, groups: int, intra: int) -> sf.Engine:
    mesh = {"inter": groups, "intra": intra}
    return sf.Engine(
        Model(), optimizer=optimizer, **grouped(layout=layout, mesh=mesh, units=UNITS, outer=sf.Signs(block=BLOCK)),
    )  # fmt: skip


def train(engine: sf.Engine, steps: range) -> list[Tensor]:
    for step in steps:
        engine.backward(loss_of(engine, batch(step).chunk(engine.data_ranks)[engine.data_rank], step))
        engine.step()
    return [*engine.state_dict().values()]


def _run(optimizer: Any, layout: str, groups: int, intra: int, steps: int = STEPS) -> tuple[list[Tensor], list[str]]:
    engine = engine_of(optimizer, layout, groups, intra)
    ops: list[str] = []
    for step in range(steps):
        train(engine, range(step, step + 1))
        rows = [row for row in engine.traffic().rows if "inter" in row.axes and row.sent]
        assert all(row.sent == row.program for row in rows)
        ops.append({"ALL_REDUCE": "dense", "PULL": "signs"}[rows[0].op] if rows else "local")
    state = [*engine.state_dict().values()]
    memory = {row.state: (row.table + row.padding, row.held) for row in engine.memory().rows}
    assert memory["moments"][0] == memory["moments"][1]
    engine.close()
    return state, ops


def assert_near(values: list[Tensor], wanted: list[Tensor], rtol: float = 1e-10, atol: float = 1e-12) -> None:
    for value, mine in zip(values, wanted, strict=True):
        torch.testing.assert_close(value, mine, rtol=rtol, atol=atol)


SHAPES = [("ddp", 2, 1), ("zero1", 2, 2), ("ddp", 4, 1), ("zero3", 2, 2)]


@pytest.mark.parametrize(
    ("layout", "groups", "intra"),
    [SHAPES[0], SHAPES[1], *(pytest.param(*shape, marks=pytest.mark.soak) for shape in SHAPES[2:])],
)
def test_1_bit_lamb_is_the_loop(ranks: Ranks, layout: str, groups: int, intra: int) -> None:
    """Norms and greatest ratios are those of whole parameters wherever these lie, and what is unused stays."""
    wanted = one_bit_lamb(groups)
    for state, ops in ranks.run(_run, LAMB, layout, groups, intra, world_size=groups * intra):
        assert ops == ["dense"] * 5 + ["signs"] * (STEPS - 5)
        assert_near(state, wanted)
    column = wanted[0][:, 0]
    assert bool((column / Model().first.weight[:, 0].detach() < 1).all())  # it has no gradient, and decays


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "groups", "intra"),
    [SHAPES[1], SHAPES[2], *(pytest.param(*shape, marks=pytest.mark.soak) for shape in (SHAPES[0], SHAPES[3]))],
)
def test_0_1_adam_is_the_loop(ranks: Ranks, layout: str, groups: int, intra: int) -> None:
    """Ranks meet when it is due and go their own ways between, also with a parameter that is unused when they meet."""
    for steps in (STEPS, STEPS - 1) if layout == "zero1" else (STEPS,):
        found = ranks.run(_run, ZERO_ONE, layout, groups, intra, steps, world_size=groups * intra)
        for rank, (state, ops) in enumerate(found):
            assert ops == MEETINGS[:steps]
            assert_near(state, zero_one_adam(groups, steps)[rank // intra])


def stable_step(steps: int) -> int | None:
    """When one process with all data finds the variance stable: sums 4 steps apart are within 0.82 of each other."""
    model, v, size = Model(), [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in UNITS], 0.0
    params, m = list(model.parameters()), [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in UNITS]
    uses = [0] * 3
    for step in range(steps):
        grads = torch.autograd.grad(loss_of(model, batch(step), step), params, allow_unused=True)
        for i, grad in enumerate(grads):
            if grad is not None:
                m[i].lerp_(grad, 0.1)
                v[i].mul_(0.75).addcmul_(grad, grad, value=0.25)
                uses[i] += 1
                root = (v[i] / (1 - 0.75 ** uses[i])).sqrt() + 1e-6
                params[i].data.sub_(0.01 * m[i] / (1 - 0.9 ** uses[i]) / root)
        if (step + 1) % 4 == 0:
            now = float(sum(each.sum() for each in v))
            if size and min(now, size) >= 0.82 * max(now, size):
                return step + 1
            size = now
    return None


def _stable(folder: str, ranks: int, resume: bool) -> list[str]:
    engine = engine_of(STABLE, "zero1", ranks // 2, 2)
    if resume:
        engine.load(f"{folder}/middle")
    ops: list[str] = []
    for step in range(6 if resume else 0, 24):
        train(engine, range(step, step + 1))
        if step == 5 and not resume:
            engine.save(f"{folder}/middle", wait=True)
        ops.append("signs" if any(row.op == "PUSH" and row.sent for row in engine.traffic().rows) else "dense")
    engine.close()
    return ops


def test_a_warm_up_ends_when_the_variance_is_stable(ranks: Ranks, tmp_path: Path) -> None:
    """In the same step as in one process with all data, also of a run that goes on from a checkpoint."""
    step = stable_step(24)
    assert step is not None and 8 < step < 20  # not where sums are compared for the first time
    for ops in ranks.run(_stable, str(tmp_path), 4, False):
        assert ops == ["dense"] * step + ["signs"] * (24 - step)
    for ops in ranks.run(_stable, str(tmp_path), 4, True):
        assert ops == ["dense"] * (step - 6) + ["signs"] * (24 - step)


def _saved(folder: str, optimizer: Any, groups: int, resume: bool) -> list[Tensor]:
    """From step 10, or to the end with a checkpoint of step 10."""
    engine = engine_of(optimizer, "ddp", groups, 1)
    if resume:
        engine.load(f"{folder}/middle")
    else:
        train(engine, range(10))
        engine.save(f"{folder}/middle", wait=True)
    state = train(engine, range(10, STEPS))
    engine.close()
    return state


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["lamb", pytest.param("zero-one", marks=pytest.mark.soak)])
def test_a_run_goes_on_from_a_checkpoint(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """On as many ranks and on fewer: each has the mean of what all had lost. For a save ranks that are apart meet."""
    folder, optimizer = str(tmp_path), LAMB if kind == "lamb" else ZERO_ONE

    def wanted(later: int) -> list[Tensor]:
        return one_bit_lamb(4, later) if kind == "lamb" else zero_one_adam(4, later=later, saves=True)[0]

    for state in ranks.run(_saved, folder, optimizer, 4, False):
        assert_near(state, wanted(0))
    for groups in (4, 2):
        for state in ranks.run(_saved, folder, optimizer, groups, True, world_size=groups):
            assert_near(state, wanted(groups), rtol=1e-4, atol=1e-7)  # the mean is of fp32, summed in some order


def _apart() -> list[Any]:
    """What is refused and what meets, where ranks are apart (behind step 12)."""
    engine = engine_of(ZERO_ONE, "zero2", 2, 1)
    own = train(engine, range(12))
    said: list[Any] = [own[0]]
    try:
        with engine.gathered("first.weight", write=True):
            pass
    except UsageError as error:
        said.append(str(error))
    engine.outer_step()
    said += [engine.state_dict()["first.weight"], engine.state_dict()["side.weight"]]
    engine.outer_step()
    said.append(engine.state_dict()["first.weight"])
    said.append(loss_of(engine, batch(0), 0).item())
    engine.close()
    return said


def test_ranks_that_are_apart_meet_when_asked_to(ranks: Ranks) -> None:
    first, second = ranks.run(_apart, world_size=2)
    assert not torch.equal(first[0], second[0])
    assert "call engine.outer_step() before" in first[1]
    for mine, other in zip(first[2:5], second[2:5], strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(first[2], first[4]) and first[5] == second[5]  # and forward has them


def test_bad_arguments_say_what_they_are() -> None:
    p = [nn.Parameter(torch.zeros(2))]
    words: Any = "stable"
    refused: list[tuple[Any, str]] = [
        (partial(OneBitAdam, freeze_step="soon"), "a number of steps, 1 or more, or 'stable'"),
        (partial(OneBitAdam, stable=1.5), "a ratio above 0 and below 1"),
        (partial(OneBitLamb, trust_range=(2, 1)), "the least and the largest"),
        (partial(OneBitLamb, coeff_beta=1.0), "coeff_beta=1.0"),
        (partial(ZeroOneAdam, local_clipper=0), "a number of steps, 1 or more"),
        (partial(ZeroOneAdam, freeze_step=words), "a number of steps, 1 or more"),
    ]
    for make, text in refused:
        with pytest.raises(ConfigError, match=text):
            make(p)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_alone_what_has_no_variance_stays(kind: Any) -> None:
    """Without an engine too: an element whose gradient was 0 until the variance was frozen is no longer moved."""
    x = nn.Parameter(torch.ones(3))
    optimizer = kind([x], lr=0.1, freeze_step=3)
    for step in range(6):
        x.grad = torch.tensor([0.0 if step < 3 else 1.0, 1.0, -1.0])
        optimizer.step()
    stays, falls, rises = x.detach().tolist()
    assert stays == 1.0 and falls < 1.0 < rises
