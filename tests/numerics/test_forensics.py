"""What is inf or NaN is found where it began, on every rank alike."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from math import inf

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import NonFiniteError
from shardfold.testing import Ranks
from tests.support import models

LAYOUTS = list(sf.PRESETS)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLANTED, RANK, MICRO = 37, 1, 1


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) / (x[..., :1] != 7.0)  # 1/0 for one sample's number


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * 0.1


class Net(nn.Module):
    """Block 3 passes the first number of a sample to its MLP as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.blocks[3].norm = nn.Identity()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, planted: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 3:
                x = torch.cat([torch.where(planted, 7.0, x[:, :1].clamp(max=6.0)), x[:, 1:]], 1)
            x = block(x)
        return self.head(x).square().mean()


def planted_inf(layout: str) -> None:
    mesh = {"inter": 2, "intra": 1} if layout in ("hsdp", "hpz") else None
    torch.manual_seed(0)
    engine = sf.Engine(
        Net(), optimizer=SGD, layout=layout, parallel=mesh, accumulate=2,
        clip_norm=sf.Clip(norm=1.0, error_if_nonfinite=True),
    )  # fmt: skip
    watch = sf.numerics.ActivationWatch(engine)
    draw = torch.Generator().manual_seed(engine.rank)
    for step in range(1, PLANTED + 1):
        for micro in (0, 1):
            planted = torch.zeros(4, 1, dtype=torch.bool)
            planted[2] = step == PLANTED and micro == MICRO and engine.rank == RANK
            engine.backward(engine(torch.randn(4, 8, generator=draw), planted))
            if step == PLANTED and micro == 1:
                break
            assert engine.step().updated is (micro == 1)
    report = sf.numerics.check(engine)
    first = report.findings[0]
    assert first == ("output", "blocks.3.mlp", RANK, PLANTED, MICRO, None)
    assert str(report).startswith(
        "inf or NaN first in the output of blocks.3.mlp on rank 1, step 37, micro-batch 1, and in "
    )
    loss = next(finding for finding in report.findings if finding.kind == "loss")
    assert (loss.rank, loss.micro_batch) == (RANK, MICRO)
    assert any(finding.kind == "gradient" for finding in report.findings)
    assert not any(finding.kind in ("parameter", "buffer", "state") for finding in report.findings)
    with pytest.raises(
        NonFiniteError, match=r"nothing was updated.*\n.*blocks\.3\.mlp on rank 1, step 37, micro-batch 1"
    ):
        engine.step()
    engine.zero_grad()
    assert sf.numerics.check(engine).finite and engine.steps == PLANTED - 1
    watch.close()
    engine.close()


@pytest.mark.soak
@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_inf_of_one_sample_is_traced_to_module_rank_step_and_micro_batch(ranks: Ranks, layout: str) -> None:
    ranks.run(planted_inf, layout, world_size=2)


def bad_values(layout: str) -> None:
    torch.manual_seed(0)
    model = models.Small()
    model.register_buffer("statistics", torch.ones(4))
    engine = sf.Engine(model, optimizer=torch.optim.AdamW, layout=layout)
    engine.backward(engine(*models.batches(1, rows=4)[0]))
    engine.step()
    report = sf.numerics.check(engine)
    assert report.finite and str(report).startswith("everything is finite.")
    with engine.gathered() as parameters:
        for row in report.units:
            if row.state == "parameter":
                names = {name for u in engine.units if u.name == row.unit for name, _ in u.parameters()}
                flat = torch.cat([parameters[name].detach().flatten().double() for name in sorted(names)])
                assert row.norm == pytest.approx(flat.norm().item(), rel=1e-6)
                assert (row.minimum, row.maximum) == (flat.min(), flat.max())
    with engine.gathered("blocks.1.up.bias", write=True) as bias, torch.no_grad():
        bias[5] = inf
    with engine.gathered("head.bias", of="exp_avg", write=True) as moment:
        moment[:2] = torch.nan
    model.statistics[1] = -inf
    found = [(f.kind, f.name, f.num_elements) for f in sf.numerics.check(engine).findings]
    assert set(found) == {
        ("parameter", "blocks.1.up.bias", 1), ("buffer", "statistics", 1), ("state", "exp_avg of head.bias", 2)
    }  # fmt: skip
    engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_parameters_states_and_buffers_are_named_and_numbers_are_the_whole_models(ranks: Ranks, layout: str) -> None:
    ranks.run(bad_values, layout, world_size=2)


def overflows_in_a_module(layout: str) -> None:
    """Nobody opened a ActivationWatch: the engine did once the scale was at its floor."""
    mesh = {"inter": 2, "intra": 1} if layout in ("hsdp", "hpz") else None
    torch.manual_seed(0)
    rule = sf.LossScale(initial=4.0, patience=2)
    engine = sf.Engine(Net(), optimizer=SGD, layout=layout, parallel=mesh, accumulate=2, loss_scale=rule)
    draw = torch.Generator().manual_seed(engine.rank)

    def step(*, planted: bool) -> sf.StepReport:
        for micro in (0, 1):
            where = torch.zeros(4, 1, dtype=torch.bool)
            where[2] = planted and (engine.rank, micro) == (RANK, MICRO)
            engine.backward(engine(torch.randn(4, 8, generator=draw), where))
            report = engine.step()
        return report

    assert step(planted=False).findings == ()
    for _ in range(3):  # 4, 2, 1
        report = step(planted=True)
        assert report.skipped and report.findings[0] == ("loss", "", RANK, 2, MICRO, None)
    assert engine.alarm.watch is not None
    with pytest.raises(NonFiniteError) as error:
        step(planted=True)
    sentence, head = str(error.value).splitlines()[:2]
    assert sentence.startswith(
        "step 2: gradients were inf or NaN 2 times in a row although the loss scale is at its floor of 1 "
        "(it was 4 (2 times), 2, 1 (2 times)): inf or NaN first in the output of blocks.3.mlp on rank 1, step 2, "
        "micro-batch 1, and in "
    )
    assert head.split() == ["unit", "state", "min", "max", "norm", "inf/NaN"]
    assert step(planted=False).updated and engine.alarm.watch is None
    engine.close()


@pytest.mark.soak
@pytest.mark.product
@pytest.mark.parametrize("layout", ["zero3", "hpz"])
def test_at_the_floor_of_the_scale_one_sentence_names_the_module(ranks: Ranks, layout: str) -> None:
    ranks.run(overflows_in_a_module, layout, world_size=2)


def test_a_loss_that_is_not_finite_is_logged_once_and_found_in_every_step(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    engine = sf.Engine(Net(), optimizer=SGD)
    x, nothing = torch.randn(4, 8), torch.zeros(4, 1, dtype=torch.bool)
    found = []
    for factor in (1.0, inf, 1.0, inf):
        engine.backward(engine(x, nothing) * factor)
        report = engine.step()
        assert report.updated
        found.append([(finding.kind, finding.step) for finding in report.findings[:1]])
    assert found == [[], [("loss", 2)], [("parameter", 3)], [("parameter", 4)]]  # from then on the weights are NaN
    assert {finding.kind for finding in report.findings} >= {"loss", "parameter"}
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("inf or NaN first in loss on rank 0, step 2, micro-batch 0, and in ")
    engine.close()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask, self.up = nn.Identity(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("inf")
        return (x[:, None] + self.mask(torch.full((8, 8), -inf).triu(1))).softmax(-1)[..., 0].square().mean()


def test_masks_are_finite_and_what_an_interrupted_pass_left_is_forgotten() -> None:
    engine = sf.Engine(Masked(), optimizer=SGD)
    watch = sf.numerics.ActivationWatch(engine)
    engine.backward(engine(torch.ones(2, 8)))
    assert sf.numerics.check(engine).finite
    engine.step()
    with pytest.raises(ValueError, match="inf"):
        engine(torch.full((2, 8), inf))
    assert [path for _, path, _ in watch.found()] == ["up"]
    engine.backward(engine(torch.ones(2, 8)))
    assert sf.numerics.check(engine).finite
    watch.close()
    engine.close()


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_watched_model_is_plain(way: str) -> None:
    """The copy has the user's hook alone, and what it computes does not reach the ActivationWatch."""
    engine = sf.Engine(models.Small(), optimizer=SGD)
    engine.module.head.register_forward_hook(plain_hook)  # type: ignore[union-attr]
    tokens, targets = models.batches(1, rows=4)[0]
    watch = sf.numerics.ActivationWatch(engine)
    for _ in range(2):  # watched, and not any more
        with engine.gathered():
            alone = WAYS[way](engine.module)
        hooks = [hook for module in alone.modules() for hook in module._forward_hooks.values()]
        assert hooks == [plain_hook]
        assert not any("__reduce_ex__" in vars(module) for module in alone.modules())
        (alone(tokens, targets) * inf).backward()
        assert sf.numerics.check(engine).finite
        watch.close()
    engine.backward(engine(tokens, targets))
    assert engine.step().updated
    engine.close()


def plain_hook(module: nn.Module, args: object, output: object) -> None:
    pass
