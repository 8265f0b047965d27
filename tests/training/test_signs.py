"""Momentum that is averaged by signs: 1-bit Adam equals a plain simulation of its ranks, in the same arithmetic."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, NonFiniteError
from shardfold.optim import OneBitAdam
from shardfold.plan import program
from shardfold.plan.formats import FORMATS
from shardfold.testing import Ranks, run_ranks
from tests.support.options import grouped

WIDTH, STEPS, FREEZE, BLOCK = 16, 9, 4, 32
ADAM = partial(OneBitAdam, lr=0.01, freeze_step=FREEZE, betas=(0.9, 0.99), weight_decay=0.1)


class Model(nn.Module):
    """The first column of the first layer never has a gradient, as its input is always 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def batch(step: int) -> Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    x[:, 0] = 0
    return x


def loss_of(module: Any, x: Tensor) -> Tensor:
    return (module(x) - x.roll(1, 1)).square().mean()


def coded(values: Tensor) -> Tensor:
    """What a block of signs is decoded as; a block is a row here."""
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().sum(1, keepdim=True) / blocks.count_nonzero(1).clamp(min=1).unsqueeze(1)
    return torch.where(blocks >= 0, scale, -scale).view_as(values)


def clipped(grads: list[Tensor], limit: float | None) -> list[Tensor]:
    norm = torch.stack([each.square().sum() for each in grads]).sum().sqrt()
    return [each * min(1.0, limit / (float(norm) + 1e-6)) for each in grads] if limit is not None else grads


def simulated(
    groups: int, steps: int = STEPS, *, error: bool = True, applied: list[Any] | None = None,
    limit: float | None = None,
) -> list[Tensor]:  # fmt: skip
    """All ranks in one process: algorithm 1 of arXiv 2102.02888, the server's parts together. Gradients are clipped to
    the ``limit``, until the variance is frozen their mean, and then those of each group."""
    model = Model()
    params = list(model.parameters())
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    worker = [[torch.zeros_like(p) for p in params] for _ in range(groups)]
    server = [torch.zeros_like(p) for p in params]
    for step in range(steps):
        grads = [list(torch.autograd.grad(loss_of(model, x), params)) for x in batch(step).chunk(groups)]
        means = clipped([torch.stack(each).mean(0) for each in zip(*grads, strict=True)], limit)
        grads = [clipped(each, limit) for each in grads]
        for i, p in enumerate(params):
            if step < FREEZE:
                m[i].lerp_(means[i], 0.1)
                v[i].mul_(0.99).addcmul_(means[i], means[i], value=0.01)
            else:
                alive, sent, root = v[i] != 0, [], (v[i] / (1 - 0.99**FREEZE)).sqrt() + 1e-8
                for rank, each in enumerate(grads):
                    x = torch.where(alive, m[i].lerp(each[i], 0.1) / root + worker[rank][i], 0)
                    sent.append(coded(x))
                    worker[rank][i] = torch.where(alive, x - sent[-1], 0) if error else worker[rank][i]
                y = torch.where(alive, torch.stack(sent).mean(0) + server[i], 0)
                server[i] = torch.where(alive, y - coded(y), 0) if error else server[i]
                m[i] = torch.where(alive, coded(y), 0) * root
                if applied is not None:
                    applied.append((i, m[i].clone(), [each[i] for each in grads]))
            small, smaller = 1 - 0.9 ** (step + 1), 1 - 0.99 ** min(step + 1, FREEZE)
            direction = m[i] / small / ((v[i] / smaller).sqrt() + 1e-8) + 0.1 * p.detach()
            p.data.sub_(0.01 * direction)
    return [p.detach() for p in params]


def engine_of(layout: str, ranks: int, error: bool = True, limit: float | None = None) -> sf.Engine:
    return sf.Engine(
        Model(),
        optimizer=ADAM,
        **grouped(
            layout=layout,
            mesh={"inter": 2, "intra": ranks // 2},
            units=["layers.0", "layers.1"],
            outer=sf.Signs(block=BLOCK, error=error),
            clip_norm=limit,
        ),
    )


def train(engine: sf.Engine, steps: range) -> list[Tensor]:
    for step in steps:
        engine.backward(loss_of(engine, batch(step).chunk(engine.data_ranks)[engine.data_rank]))
        engine.step()
    return [*engine.state_dict().values()]


def _run(
    layout: str, ranks: int, error: bool = True, bundle: int = program.BUNDLE, limit: float | None = None
) -> list[Tensor]:
    program.BUNDLE = bundle
    engine = engine_of(layout, ranks, error, limit)
    state = train(engine, range(STEPS))
    engine.close()
    return state


def assert_near(states: list[list[Tensor]], wanted: list[Tensor]) -> None:
    for state in states:
        for value, other, mine in zip(state, states[0], wanted, strict=True):
            assert torch.equal(value, other)  # all ranks are equal to the bit
            torch.testing.assert_close(value, mine, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("layout", "world"), [("ddp", 2), ("zero1", 4), ("zero3", 4)])
def test_1_bit_adam_is_the_simulation_of_its_ranks(ranks: Ranks, layout: str, world: int) -> None:
    """Under ddp, and between groups that split their states, under zero1 with clipping, under zero3 with a bundle for
    each unit; what never had a gradient only decays."""
    limit = 0.02 if layout == "zero1" else None  # a fraction of what norms are
    states = run_ranks(_run, world, layout, world, bundle=1 if layout == "zero3" else program.BUNDLE, limit=limit)
    assert_near(states, simulated(2, limit=limit))
    column = states[0][0][:, 0]
    torch.testing.assert_close(column, Model().layers[0].weight[:, 0].detach() * (1 - 0.001) ** STEPS)


def test_signs_are_one_bit_and_a_scale() -> None:
    """Of each value one bit and of each block 4 bytes; what is decoded is the mean magnitude with the sign."""
    form, values = FORMATS["sign/64"], torch.randn(3, 128)
    payload = torch.empty(3, form.nbytes(128), dtype=torch.uint8)
    assert form.nbytes(128) == 128 // 8 + 2 * 4
    back = torch.empty_like(values)
    form.encode(values, payload)
    form.decode(payload, back)
    scale = values.view(-1, 64).abs().mean(1, keepdim=True)
    assert torch.equal(torch.sign(back), torch.sign(values))
    torch.testing.assert_close(back.view(-1, 64).abs(), scale.expand(-1, 64), rtol=1e-6, atol=0)


def _counted(
    layout: str, ranks: int
) -> tuple[list[list[tuple[str, int, int, float]]], str, dict[str, tuple[float, int]]]:
    engine = engine_of(layout, ranks)
    seen: list[list[tuple[str, int, int, float]]] = []
    for step in range(FREEZE + 2):
        train(engine, range(step, step + 1))
        seen.append(
            [(row.op, row.calls, row.sent, row.program) for row in engine.traffic().rows if "inter" in row.axes]
        )
    memory = {row.state: (row.table + row.padding, row.held) for row in engine.memory().rows}
    text = engine.explain()
    engine.close()
    return seen, text, memory


def test_a_step_by_signs_sends_a_bit_and_scales(ranks: Ranks) -> None:
    """Each way 1 bit for 32 and the scales, where an all-reduce sent 2 x 32; as the program says. With 15 % of steps
    dense that is less by the paper's formula. One collective carries all units."""
    for seen, text, memory in ranks.run(_counted, "ddp", 2, world_size=2):
        numel = 2 * WIDTH * WIDTH
        assert seen[0] == [("ALL_REDUCE", 2, 4 * numel, 4.0 * numel)]
        one_way = numel // 2 // 8 * (32 / 8 + 4) / (32 / 8)  # half of it, a bit each, with its scales
        assert seen[-1] == [("PULL", 1, one_way, one_way), ("PUSH", 1, one_way, one_way)]
        assert memory["worker"] == (4 * numel, 4 * numel) and memory["server"] == (2 * numel, 2 * numel)
        assert [re.search(rf"outer +{verb} +inter +1 calls", text) for verb in ("PUSH", "PULL")].count(None) == 0
        assert "PUSH layers.0..layers.1 [inter] sign/32:error" in text and "signs: of momentum over inter" in text
    dense = 0.15
    assert round(1 / (dense + (1 - dense) / 16), 2) == 4.92  # of 16-bit gradients
    long = FORMATS["sign/1024"].nbytes(2**20) / (4 * 2**20)
    assert 1 / 32 < long < 1.04 / 32


def _telescopes(folder: str, ranks: int, steps: range) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """The sum of the momenta that were applied, and of those without loss, in a run from or to a checkpoint."""
    engine = sf.Engine(
        Model(),
        optimizer=ADAM,
        layout=sf.PRESETS["ddp"].replace(signs=sf.Signs(block=BLOCK)),
        parallel={"inter": ranks, "intra": 1},
        init=sf.Init(units=["layers.0", "layers.1"]),
    )
    if steps.start:
        engine.load(f"{folder}/middle")
    applied, exact = ([torch.zeros(WIDTH, WIDTH) for _ in range(2)] for _ in range(2))
    names = [f"layers.{i}.weight" for i in range(2)]
    for step in steps:
        plain = Model()
        plain.load_state_dict(engine.state_dict())
        grads = torch.autograd.grad(loss_of(plain, batch(step)), list(plain.parameters()))
        with engine.gathered(*names, of="exp_avg") as before:
            for i, name in enumerate(names):
                old = before[name] if before[name] is not None else torch.zeros(WIDTH, WIDTH)
                exact[i] += torch.lerp(old, grads[i], 0.1)
        train(engine, range(step, step + 1))
        with engine.gathered(*names, of="exp_avg") as after:
            for i, name in enumerate(names):
                applied[i] += after[name]
    place = f"{folder}/{'end' if steps.start else 'middle'}"
    engine.save(place, wait=True)
    saved = sf.Checkpoint(place)
    lost = [
        [saved.read(name, state).view(WIDTH, WIDTH) for name in names] for state in ("signs_worker", "signs_server")
    ]
    roots = [(saved.read(name, "exp_avg_sq").view(WIDTH, WIDTH) / (1 - 0.99**FREEZE)).sqrt() + 1e-8 for name in names]
    lost = [[each * root for each, root in zip(side, roots, strict=True)] for side in lost]  # as momentum
    saved.close()
    engine.close()
    return applied, exact, lost


def test_what_is_lost_is_sent_later(ranks: Ranks, tmp_path: Path) -> None:
    """The sum of what was applied differs from the sum of what is true by what is kept, through a save on 4 ranks and
    a load on 2, to 1e-6."""
    folder = str(tmp_path)
    first = ranks.run(_telescopes, folder, 4, range(12), world_size=4)[0]
    second = ranks.run(_telescopes, folder, 2, range(12, 24), world_size=2)[0]
    for i in range(2):
        difference = first[1][i] + second[1][i] - first[0][i] - second[0][i]
        kept = second[2][0][i] + second[2][1][i]
        assert float(kept.abs().max()) > 1e-5
        torch.testing.assert_close(difference, kept, rtol=0, atol=1e-6)


def test_signs_want_an_optimizer_that_freezes() -> None:
    with pytest.raises(ConfigError, match=r"give shardfold.optim.OneBitAdam, OneBitLamb or ZeroOneAdam, not SGD"):
        sf.Engine(
            Model(), optimizer=partial(torch.optim.SGD, lr=0.1), layout=sf.PRESETS["zero3"].replace(signs=sf.Signs())
        )
    with pytest.raises(ConfigError, match="block is 20"):
        sf.Signs(block=20)


def test_variance_stays_from_its_step_on() -> None:
    """Alone, 1-bit Adam is AdamW up to its step, and then has the variance of that step, and its correction."""
    x, y = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([x], lr=0.1, freeze_step=2, weight_decay=0.1)
    plain = torch.optim.AdamW([y], lr=0.1, weight_decay=0.1)
    kept: list[Tensor] = []
    before = x.detach().clone()
    for step in range(4):
        before = x.detach().clone()
        y.data.copy_(before)
        x.grad = torch.full((3,), float(step + 1))
        y.grad = x.grad.clone()
        optimizer.step()
        plain.step()
        kept.append(optimizer.state[x]["exp_avg_sq"].clone())
        if step < 2:
            torch.testing.assert_close(x, y)
    assert not torch.equal(kept[0], kept[1]) and torch.equal(kept[1], kept[3])
    average = optimizer.state[x]["exp_avg"] / (1 - 0.9**4)
    wanted = before * (1 - 0.1 * 0.1) - 0.1 * average / ((kept[1] / (1 - 0.999**2)).sqrt() + 1e-8)
    torch.testing.assert_close(x.detach(), wanted)
    before = wanted
    optimizer.param_groups[0]["bias_correction"] = False
    x.data.copy_(before)
    optimizer.step()
    wanted = before * (1 - 0.1 * 0.1) - 0.1 * optimizer.state[x]["exp_avg"] / (kept[1].sqrt() + 1e-8)
    torch.testing.assert_close(x.detach(), wanted)


def test_without_errors_training_departs() -> None:
    """Signs whose errors are dropped train elsewhere: the errors are what makes the difference."""
    with_errors, without = simulated(2), simulated(2, error=False)
    assert max(float((a - b).abs().max()) for a, b in zip(with_errors, without, strict=True)) > 1e-3


def _strict(bad: int) -> tuple[str, list[Tensor]]:
    """Rank 3, of the second group, has NaN in one step."""
    engine = sf.Engine(
        Model(),
        optimizer=ADAM,
        layout=sf.PRESETS["zero2"].replace(signs=sf.Signs(block=BLOCK)),
        parallel={"inter": 2, "intra": 2},
        init=sf.Init(units=["layers.0", "layers.1"]),
        clip_norm=sf.Clip(norm=1e9, error_if_nonfinite=True),
    )
    said = ""
    for step in range(STEPS):
        loss = loss_of(engine, batch(step).chunk(engine.data_ranks)[engine.data_rank])
        engine.backward(loss * (torch.nan if engine.rank == 3 and step == bad else 1.0))
        try:
            engine.step()
        except NonFiniteError as error:
            said = str(error)
            engine.zero_grad()
    state = [*engine.state_dict().values()]
    engine.close()
    return said, state


@pytest.mark.parametrize("bad", [FREEZE + 1, pytest.param(1, marks=pytest.mark.soak)])
def test_a_norm_that_is_not_finite_in_one_group_is_told_on_all_ranks(ranks: Ranks, bad: int) -> None:
    """Before signs are sent: nothing is updated anywhere, and all go on."""
    found = ranks.run(_strict, bad)
    whose = "2, 3" if bad >= FREEZE else "0, 1, 2, 3"  # gradients are summed over all until signs are sent
    assert found[0][0].startswith(
        f"the norm of the gradients of rank {whose} is nan and Clip(error_if_nonfinite=True): nothing was updated; "
    )
    for said, state in found:
        assert said == found[0][0]
        assert all(
            torch.equal(mine, other) and bool(mine.isfinite().all())
            for mine, other in zip(state, found[0][1], strict=True)
        )


def _without_outer() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardfold").addHandler(handler)
    sf.Engine(Model(), optimizer=ADAM, layout="zero1").close()
    logging.getLogger("shardfold").removeHandler(handler)
    return said


def test_who_sends_no_signs_is_told(ranks: Ranks) -> None:
    """Once, of all ranks: an optimizer of signs without outer= is as any other until its variance stays."""
    (first, second) = ranks.run(_without_outer, world_size=2)
    assert not second and len(first) == 1
    assert first[0].startswith("OneBitAdam without Signs: gradients travel as the layout says")
