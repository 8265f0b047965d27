"""Ordered rules of precision=: parts of one model that compute in different dtypes, in one engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import LayoutError, ModelError
from shardfold.testing import Ranks
from tests.support import models

LAYOUTS = list(sf.PRESETS)
ADAMW = partial(torch.optim.AdamW, lr=3e-3)
HEAD = {"head": "fp32", "*": "fp16"}


def mesh_for(layout: str, world: int = 2) -> dict[str, int] | None:
    return {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world > 1 else None


class Seen(models.Small):
    """Notes what its head gets and gives; its code casts nothing."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        features = self.features(tokens)
        logits = self.head(features)
        self.dtypes = features.dtype, logits.dtype
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Cast(Seen):
    """The same in plain PyTorch."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            features = self.features(tokens)
        return F.cross_entropy(self.head(features.float()).flatten(0, 1), targets.flatten())


def plain_losses(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Cast()
    optimizer, scaler = ADAMW(model.parameters()), torch.amp.GradScaler("cpu")
    losses = []
    for batch in models.batches(steps, rows=8):
        loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def an_fp32_head(layout: str) -> None:
    torch.manual_seed(0)
    model = Seen()
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout, parallel=mesh_for(layout), precision=HEAD, clip_norm=1e9)
    assert engine.loss_scale is not None
    assert {n: p.dtype for n, p in model.named_parameters() if p.dtype != torch.float16} == {
        "head.weight": torch.float32, "head.bias": torch.float32
    }  # fmt: skip
    for batch, expected in zip(models.batches(10, rows=8), plain_losses(10), strict=True):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        assert model.dtypes == (torch.float16, torch.float32) and loss.dtype == torch.float32
        engine.backward(loss)
        report = engine.step()
        assert report.updated and report.loss_scale == 2.0**16
        assert engine.mean(loss.item()) == pytest.approx(expected, rel=1e-3)
    for row in engine.memory().rows:
        assert row.held == pytest.approx(row.table + row.padding, abs=1), (row, engine.memory())
    assert all(row.sent == row.program and row.calls for row in engine.traffic().rows), engine.traffic()
    text = engine.explain()
    assert "in the precision of head:" in text
    assert [line.split()[3] for line in text.splitlines() if line.startswith(("head ", "blocks.0 "))] == [
        "fp16",
        "fp32",
    ]
    with engine.gathered(of="exp_avg") as moments:
        assert {moment.dtype for moment in moments.values()} == {torch.float32}
    saved = engine.state_dict()
    assert {value.dtype for value in saved.values()} == {torch.float32}
    engine.load_state_dict(saved)
    engine.close()


@pytest.mark.soak
@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_fp32_head_on_an_fp16_backbone_trains_as_under_amp(ranks: Ranks, layout: str) -> None:
    ranks.run(an_fp32_head, layout, world_size=2)


def mixed_states(layout: str) -> None:
    """Two policies inside one unit, whose states have different dtypes."""
    torch.manual_seed(0)
    model = models.Small()
    engine = sf.Engine(
        model, optimizer=ADAMW, layout=layout, parallel=mesh_for(layout), accumulate=2,
        precision=[(nn.LayerNorm, "fp32"), ("blocks.*", "bf16-pure"), ("*", "bf16")],
    )  # fmt: skip
    for batch in models.batches(4, rows=8):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))
        engine.step()
    kinds = {}
    for unit in engine.units:
        for s in unit.trainable:
            assert s.master is not None and s.gradient_flat is not None
            for slot in s.spec.slots:
                kinds[slot.name] = (s.dtype, s.gradient_flat.dtype, s.master.dtype)
    bf16, fp32 = torch.bfloat16, torch.float32
    assert kinds["blocks.1.norm.weight"] == kinds["norm.bias"] == (fp32, fp32, fp32)
    assert kinds["blocks.1.up.weight"] == (bf16, bf16, bf16)
    assert kinds["head.weight"] == kinds["embedding.weight"] == (bf16, fp32, fp32)
    with engine.gathered("blocks.1.up.weight", "head.weight", of="exp_avg") as moments:
        assert [moment.dtype for moment in moments.values()] == [bf16, fp32]
    for row in engine.memory().rows:
        assert row.held == pytest.approx(row.table + row.padding, abs=1), (row, engine.memory())
    assert all(row.sent == row.program and row.calls for row in engine.traffic().rows), engine.traffic()
    engine.module.head = nn.Linear(models.WIDTH, models.VOCAB)  # what is new follows the rule of its place
    engine.module.blocks.append(models.Block())
    engine.backward(engine(*models.batches(1, rows=8)[0]))
    assert engine.module.head.weight.dtype == engine.module.blocks[-1].up.weight.dtype == bf16
    assert engine.module.blocks[-1].norm.weight.dtype == fp32
    engine.close()


@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_one_unit_may_follow_several_policies(ranks: Ranks, layout: str) -> None:
    ranks.run(mixed_states, layout, world_size=2)


class Images(nn.Module):
    """Its running variances grow far beyond 65504, the largest number of fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)
        )
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * 2000.0)
        for block in self.blocks:
            x = block(x * 500.0)
        return self.head(x.mean((2, 3)))


def large_variances() -> None:
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 3, 4, 4, generator=draw) for _ in range(30)]
    policies: dict[str, Any] = {"autocast": "fp16-autocast", "rule": {nn.BatchNorm2d: "fp32", "*": "fp16"}}
    for name, precision in policies.items():
        torch.manual_seed(0)
        engine = sf.Engine(Images(), optimizer=ADAMW, layout="zero3", precision=precision)
        for x in batches:
            engine.backward((engine(x).float() - x.mean((2, 3))[:, :2]).square().mean())
            engine.step()
        assert not sf.numerics.check(engine).findings
        saved = engine.state_dict()
        for norm in ("norm", "blocks.0.1", "blocks.1.1"):
            variance = saved[f"{norm}.running_var"]
            assert variance.dtype == torch.float32 and variance.isfinite().all()
            assert variance.min() > 65504 or norm != "norm"
        assert engine.module.blocks[0][0].weight.dtype == (torch.float16 if name == "rule" else torch.float32)
        wide = Images()
        wide.load_state_dict(saved)
        engine.module.eval(), wide.eval()
        with torch.no_grad():
            for x in batches[:4]:
                expected = wide(x)
                assert (engine(x) - expected).abs().max() < 5e-3 * expected.abs().max()
        engine.close()


@pytest.mark.soak
def test_batch_norm_in_fp32_inside_of_fp16_keeps_variances_beyond_fp16_and_evaluates_as_fp32(ranks: Ranks) -> None:
    ranks.run(large_variances, world_size=2)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_casts_between_its_parts() -> None:
    engine = sf.Engine(
        (model := models.Small()), optimizer=ADAMW, layout="ddp", precision={nn.LayerNorm: "fp32", "*": "bf16"}
    )
    batch = models.batches(1, rows=4)[0]
    plain = engine(*batch)
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    compiled = engine(*batch)
    engine.backward(compiled)
    assert engine.step().updated and torch.equal(plain, compiled)
    engine.close()


def test_first_match_wins_and_holds_inside() -> None:
    model = models.Small()
    engine = sf.Engine(model, precision={"blocks.0": "fp32", "blocks.*.up": "fp32", "*": "bf16"})
    assert {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dtype == torch.float32} == {
        "blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.2.up"
    }  # fmt: skip
    engine.close()


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"haed": "fp32", "*": "fp16"}, ModelError, r"a rule for haed, which matches no module. Did you mean 'head'\?"),
        ({nn.Conv2d: "fp32", "*": "fp16"}, ModelError, r"a rule for Conv2d, which matches no module. Known: Block, "),
        ({"head*": "fp32", "head": "bf16", "*": "fp16"}, ModelError, "rule for head, but rules before it match all"),
        ({"head": "fp32"}, LayoutError, r"end them with '\*'"),
        ({"*": "fp16", "head": "fp32"}, LayoutError, r"have head after '\*', which matches everything"),
        ({"head": "fp23", "*": "fp16"}, LayoutError, r"'fp23' is unknown. Did you mean 'fp32'\?"),
        ({"head": "fp32", "*": "fp16-autocast"}, LayoutError, "differ in autocast ('fp16', None), which holds for a"),
        ([("head", "fp32", 1)], LayoutError, "it is a policy, its name, or ordered rules"),
        (16, LayoutError, "precision=16: it is a policy, its name, or ordered rules"),
    ],
)
def test_rules_that_say_nothing_or_contradict_are_refused(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        sf.Engine(models.Small(), precision=rules)


def test_a_tied_parameter_has_one_policy() -> None:
    with pytest.raises(ModelError, match=r"'embedding.weight' and 'head.weight' are one parameter, but precision= has"):
        sf.Engine(models.tied(), precision=HEAD)
    engine = sf.Engine(models.tied(), precision={"embedding": "fp32", "head": "fp32", "*": "bf16"})
    engine.close()
