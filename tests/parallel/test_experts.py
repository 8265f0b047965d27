"""Experts shared out over ranks train like the whole model on one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ShardfoldError
from shardfold.parallel.expert_parallel import Dispatch
from shardfold.testing import Ranks, run_ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.parallel import models
from tests.support.experts import ADAM, batches, build, plain
from tests.support.options import grouped

LIMIT = 0.3  # of norms, so that every step clips


def mine(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's part of a parameter."""
    return whole.chunk(ranks)[rank] if ".experts." in name else whole


def trains_like_the_whole(
    layout: str, experts: int, clip: float | None = LIMIT, accumulate: int = 1, tolerance: float = 1e-12,
    dtype: torch.dtype = torch.float64, options: dict[str, Any] | None = None, rows: int = 8, **settings: Any,
) -> None:  # fmt: skip
    options = options or {}
    engine = sf.Engine(
        build(dtype, **options),
        optimizer=ADAM,
        **grouped(layout=layout, mesh={"expert": experts}, clip_norm=clip, debug=True, **settings),
        accumulate=accumulate,
    )
    place, losses, norms = engine.mesh.coords["expert"], [], []
    for batch in batches(dtype, rows):
        total = 0.0
        for micro in range(accumulate):
            part = [t.chunk(accumulate)[micro].chunk(engine.data_ranks)[engine.data_rank] for t in batch]
            loss = engine(*part)
            total += loss.item() / accumulate
            engine.backward(loss)
            report = engine.step()
        losses.append(engine.mean(total))
        norms.append(report.grad_norm)
    expected, expected_norms, whole = plain(clip, dtype, accumulate, rows, **options)
    assert losses == pytest.approx(expected, rel=tolerance)
    if clip is not None:
        assert norms == pytest.approx(expected_norms, rel=tolerance)
    for name, value in engine.state_dict().items():
        assert torch.allclose(value, mine(name, whole[name], place, experts), rtol=tolerance, atol=tolerance), name
    sent = engine.traffic()
    assert all(row.sent == row.program for row in sent.rows), sent
    engine.close()


LOSSES = {"balance": 0.05, "z": 0.01}


def several(cases: Sequence[tuple[str, int, dict[str, Any]]]) -> None:
    for layout, experts, given in cases:
        trains_like_the_whole(layout, experts, **given)


def test_experts_train_like_the_whole_model(ranks: Ranks) -> None:
    """Two ranks of experts by two of data, and four of experts, each with layouts that differ in what is split: losses,
    norms and weights are those of plain PyTorch with the whole model and the whole batch on one process, where every
    step clips; so is the loss that keeps experts in use, of all ranks' tokens."""
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("ddp", 2, {"options": LOSSES}), ("zero1", 2, {"accumulate": 2, "options": {"bias_rate": 0.01, "shared": 8}}),
        ("zero2", 2, {"options": {"scores": "sigmoid", "normalize": False}}), ("zero3", 2, {"options": LOSSES}),
        ("zero3", 4, {"activations": "recompute", "options": {**LOSSES, "bias_rate": 0.01}}),
    ]  # fmt: skip
    ranks.run(several, cases, world_size=4)


@pytest.mark.soak
def test_none_one_or_all_tokens_to_an_expert(ranks: Ranks) -> None:
    """All tokens go to one rank's experts, or to one expert of all: the other ranks' get none, and gradients are
    those of the whole model."""
    cases = [
        (layout, 2, {"options": {"forced": forced}})
        for layout, forced in (("zero3", [0, 1]), ("ddp", [3]), ("zero2", [2]))
    ]
    ranks.run(several, cases, world_size=2)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz", "offload", "infinity"])
@pytest.mark.parametrize(("experts", "world"), [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_every_layout_with_every_count(layout: str, experts: int, world: int) -> None:
    """The same for all of them."""
    each: list[dict[str, Any]] = [
        {"options": LOSSES}, {"accumulate": 2, "rows": 16}, {"activations": "recompute", "options": LOSSES},
        {"options": {"forced": [1]}}, {"options": {"forced": [1, 3]}},
    ]  # fmt: skip
    run_ranks(several, world, [(layout, experts, given) for given in each], timeout=250.0)


def _fp32() -> None:
    # With the usual eps of 1e-8 rounding errors in gradients of nearly 0 are 1e2 times as large in weights, here and in
    # plain PyTorch.
    adam = partial(ADAM, eps=1e-3)
    engine = sf.Engine(build(torch.float32, **LOSSES), optimizer=adam, parallel={"expert": 2}, clip_norm=LIMIT)
    model = build(torch.float32, **LOSSES).double()
    optimizer = adam(model.parameters())
    for batch in batches(torch.float32):
        loss = engine(*(t.chunk(2)[engine.data_rank] for t in batch))
        engine.backward(loss)
        expected = model(*(t.double() for t in batch))
        expected.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.mean(loss.item()) == pytest.approx(expected.item(), rel=1e-6)
        assert engine.step().grad_norm == pytest.approx(norm, rel=1e-6)
    whole = model.state_dict()
    for name, value in engine.state_dict().items():
        assert torch.allclose(value.double(), mine(name, whole[name], engine.rank, 2), rtol=0, atol=1e-6), name
    engine.close()


def test_fp32(ranks: Ranks) -> None:
    """With products in one kernel: losses, norms and weights of fp64 from the same values, to 1e-6."""
    ranks.run(_fp32, world_size=2)


def _counts() -> tuple[list[int], list[int], list[int], int]:
    engine = sf.Engine(build(), layout="ddp", parallel={"expert": 2})
    batch = [t.chunk(engine.data_ranks)[engine.data_rank] for t in batches()[0]]
    with torch.no_grad():
        engine(*batch)
    dispatch = vars(engine.module.blocks[1].moe.experts)["forward"]
    assert isinstance(dispatch, Dispatch)
    rows = [row for row in engine.traffic().rows if row.purpose == "layers"]
    engine.close()
    return list(dispatch.sent), list(dispatch.came), [len(rows)], batch[0].shape[0] * batch[0].shape[1]


def test_counts_are_conserved(ranks: Ranks) -> None:
    """What each rank sends to another is what comes there, and all choices of all tokens are sent."""
    said = ranks.run(_counts, world_size=2)
    for rank, (sent, came, _, tokens) in enumerate(said):
        assert sum(sent) == tokens * 2
        assert came == [other[0][rank] for other in said]


def _bytes() -> None:
    """Of a step: counts in forward, rows there and back, in forward and in backward."""
    engine = sf.Engine(build(), optimizer=ADAM, layout="ddp", parallel={"expert": 2})
    batch = [t.chunk(engine.data_ranks)[engine.data_rank] for t in batches()[0]]
    engine.backward(engine(*batch))
    away = 0
    for block in engine.module.blocks:
        dispatch = vars(block.moe.experts)["forward"]
        other = 1 - engine.rank
        away += 2 * 8 + 2 * (dispatch.sent[other] + dispatch.came[other]) * 8 * 8  # int64; rows of 8 fp64
    engine.step()
    (row,) = [row for row in engine.traffic().rows if row.purpose == "layers"]
    assert (row.op, row.axes, row.calls, row.sent) == ("ALL_TO_ALL", ("expert",), 2 * 5, away)
    text = engine.explain()
    assert "experts along 'expert' over 2 ranks" in text and "2 of 4 experts here" in text
    assert "ALL_REDUCE blocks.0 local [expert]" in text and "ALL_REDUCE blocks.0.moe.experts" not in text
    engine.close()


def test_bytes_are_those_of_the_rows(ranks: Ranks) -> None:
    """What is counted is what the other rank's rows come to, twice there and twice back, and the counts."""
    ranks.run(_bytes, world_size=2)


def _no_gradient_of_tokens() -> None:
    """Tokens need no gradient, and one rank's experts get none of them: all ranks go the way back."""
    torch.manual_seed(0)
    moe = sf.nn.MoE(8, 8, 4, top_k=1, bias_rate=0.0).double()
    moe.router.bias[0] = 100.0
    moe.router.requires_grad_(False)
    engine = sf.Engine(
        moe,
        optimizer=ADAM,
        layout="zero2",
        parallel={"expert": 2},
        runtime=sf.Runtime(patience=5.0, timeout=30.0),
    )
    x = torch.randn(4, 8, dtype=torch.float64)
    engine.backward(engine(x).out.sum())
    assert engine.step().updated
    engine.close()


def _no_tokens() -> None:
    """Of one rank; the other's are those of the whole batch."""
    torch.manual_seed(0)
    moe = sf.nn.MoE(8, 8, 4).double()
    whole = copy.deepcopy(moe)
    engine = sf.Engine(
        moe, optimizer=ADAM, layout="zero2", parallel={"expert": 2}, clip_norm=1e9, runtime=sf.Runtime(timeout=30.0)
    )
    x = torch.randn(4, 8, dtype=torch.float64)
    out = engine(x[: 0 if engine.rank else 4]).out
    engine.backward(out.square().sum())
    norm = engine.step().grad_norm
    engine.close()
    expected = whole(x).out.square().sum() / 2  # gradients are divided by the ranks
    expected.backward()
    assert engine.rank or torch.allclose(out, whole(x).out, rtol=1e-12, atol=0)
    assert norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item())


def test_a_rank_without_tokens_takes_part(ranks: Ranks) -> None:
    ranks.run(_no_tokens, world_size=2)


def test_layers_that_no_gradient_goes_through(ranks: Ranks) -> None:
    ranks.run(_no_gradient_of_tokens, world_size=2)


def _program() -> list[str]:
    engine = sf.Engine(build(), optimizer=ADAM, layout="zero3", parallel={"expert": 2}, overlap=sf.Overlap(prefetch=0))
    lines = [str(op) for op in engine.program.backward if op.unit.startswith("blocks.1")]
    engine.close()
    return lines


def test_a_block_stays_while_its_experts_run(ranks: Ranks) -> None:
    """Experts are inside of their block: it is full, and its gradients are not summed, until they are done."""
    lines = ranks.run(_program, world_size=2)[0]
    assert lines == [
        "ALL_GATHER blocks.1 params -> flat [expert] fp64",
        "GRADS blocks.1 fp64",
        "B blocks.1",
        "B blocks.1.moe.experts",
        "REDUCE_SCATTER blocks.1 [expert] fp64",
        "WAIT blocks.1 grads",
        "DROP blocks.1",
        "FREE blocks.1",
    ]  # fmt: skip


# -- checkpoints


def _trained(path: str, layout: str, mesh: dict[str, int] | None) -> None:
    engine = sf.Engine(build(), optimizer=ADAM, layout=layout, parallel=mesh)
    for batch in batches()[:2]:
        engine.backward(engine(*[t.chunk(engine.data_ranks)[engine.data_rank] for t in batch]))
        engine.step()
    engine.save(path, wait=True)
    engine.close()


def _goes_on(path: str, layout: str, mesh: dict[str, int] | None) -> dict[str, Tensor]:
    engine = sf.Engine(build(), optimizer=ADAM, layout=layout, parallel=mesh)
    assert engine.load(path)
    batch = batches()[2]
    engine.backward(engine(*[t.chunk(engine.data_ranks)[engine.data_rank] for t in batch]))
    engine.step()
    place, ranks = engine.mesh.coords.get("expert", 0), engine.mesh.sizes.get("expert", 1)
    expected = plain(None)[2]
    for name, value in engine.state_dict().items():
        assert torch.allclose(value, mine(name, expected[name], place, ranks), rtol=1e-12, atol=1e-12), name
    engine.close()
    return {}


@pytest.mark.soak
def test_checkpoints_go_from_any_count_to_any_other(ranks: Ranks, tmp_path: Path) -> None:
    """Of two ranks of experts by two of data, of one rank, and of four, under other layouts: the step behind the load
    is that of a run that never stopped."""
    ways: list[tuple[int, str, dict[str, int] | None]] = [
        (4, "zero3", {"expert": 2}), (1, "ddp", None), (2, "zero1", {"expert": 2}), (4, "zero2", {"expert": 4}),
    ]  # fmt: skip
    for i, (world, layout, mesh) in enumerate(ways):
        ranks.run(_trained, str(tmp_path / str(i)), layout, mesh, world_size=world)
        other_world, other, other_mesh = ways[(i + 1) % len(ways)]
        ranks.run(_goes_on, str(tmp_path / str(i)), other, other_mesh, world_size=other_world)


# -- what is refused


def _refused(make: Any, kind: type[ShardfoldError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)


def _refusals() -> list[str]:
    mesh = {"expert": 2}
    odd = nn.Sequential(nn.Linear(8, 8), sf.nn.MoE(8, 8, 3))
    lamb = partial(sf.optim.LAMB, lr=0.1)
    texts = [
        _refused(lambda: sf.Engine(odd, parallel=mesh)),
        _refused(lambda: sf.Engine(nn.Linear(2, 2), parallel=mesh)),
        _refused(lambda: sf.Engine(build(torch.float32), optimizer=lamb, parallel=mesh)),
    ]
    engine = sf.Engine(build(), layout="ddp", parallel=mesh)
    engine.close()
    with pytest.raises(sf.errors.UsageError) as caught:
        engine.module(*batches()[0])
    return [*texts, str(caught.value)]


def test_what_cannot_be_is_refused(ranks: Ranks) -> None:
    """Experts that do not divide, by name; a model without any; optimizers that read whole parameters; and experts
    whose other ranks are gone."""
    words = ("'1.experts' has 3 experts, which cannot be divided over the 2 ranks along 'expert'", "has no experts",
             "the ranks that have the rest read other samples", "needs the other ranks along 'expert'")  # fmt: skip
    for texts in ranks.run(_refusals, world_size=2):
        for text, each in zip(texts, words, strict=True):
            assert each in text


def _own_layer() -> None:
    """A layer of one's own, with a process group of the axis."""

    class Own(nn.Module):
        def __init__(self, rank: int, ranks: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            whole = torch.randn(4, 8, 8, dtype=torch.float64)
            self.weight = nn.Parameter(whole.chunk(ranks)[rank].clone())
            sf.mark_slice(self, "weight", axis="expert", dim=0)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.sum(0)

    model = nn.Sequential(nn.Linear(8, 8).double(), Own(dist.get_rank(), 2))
    engine = sf.Engine(model, optimizer=ADAM, layout="zero3", parallel={"expert": 2})
    assert [unit.name for unit in engine.units] == ["0", "1"]
    engine.backward(engine(torch.ones(2, 8, dtype=torch.float64)).sum())
    engine.step()
    engine.close()


def test_layers_of_ones_own_are_marked(ranks: Ranks) -> None:
    """What is marked on the axis is a unit of its own, and needs no rule."""
    ranks.run(_own_layer, world_size=2)


# -- with other axes


def product(layout: str, mesh: dict[str, int], settings: dict[str, Any]) -> None:
    """Two micro-batches: those of one process are the ranks' together."""
    engine = sf.Engine(
        build(**LOSSES), optimizer=ADAM, **grouped(layout=layout, mesh=mesh, clip_norm=LIMIT, **settings), accumulate=2
    )
    losses, norms = [], []
    for batch in batches():
        parts = [
            tuple(t.chunk(2)[micro].chunk(engine.data_ranks)[engine.data_rank] for t in batch) for micro in range(2)
        ]
        if engine.mesh.sizes.stages:
            total = engine.train_batch(parts, lambda model, part: model(*part)).item()
            report = engine.step()
        else:
            total = 0.0
            for part in parts:
                loss = engine(*part)
                total += loss.item() / 2
                engine.backward(loss)
                report = engine.step()
        losses.append(engine.mean(total))
        norms.append(report.grad_norm)
    expected, expected_norms, whole = plain(LIMIT, pieces=2, **LOSSES)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    for name, value in engine.state_dict().items():
        own = mine(name, whole[name], engine.mesh.coords["expert"], mesh["expert"])
        assert torch.allclose(value, own, rtol=1e-12, atol=1e-12), name
    engine.close()


WHOLE_EXPERTS = {"tensor": {"*.mix": "replicated"}}


@pytest.mark.soak
def test_with_stages(ranks: Ranks) -> None:
    """Two ranks of experts in each of two stages."""
    ranks.run(product, "zero3", {"expert": 2, "pipeline": 2}, {}, world_size=4)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [({"expert": 2, "pipeline": 2}, {}), ({"expert": 2, "tensor": 2}, WHOLE_EXPERTS),
     ({"expert": 2, "pipeline": 2}, {"pipeline": "gpipe"})],
)  # fmt: skip
def test_with_stages_or_tensor_by_data(layout: str, mesh: dict[str, int], settings: dict[str, Any]) -> None:
    """By two ranks of data, on eight."""
    run_ranks(product, 8, layout, mesh, settings, timeout=250.0)


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    shape = GPTConfig(vocab=models.VOCAB, d_model=16, layers=2, heads=4, context=12, d_ff=24, experts=4, top_k=2)
    return GPT(shape).double()


def _by_the_models_plan() -> None:
    cut = {"gpt": "blocks.0.attention.qkv.weight", "mixtral": "model.layers.0.self_attn.q_proj.weight"}
    for build_one, column in ((_gpt, cut["gpt"]), (partial(models.make, "mixtral"), cut["mixtral"])):
        whole = build_one()
        engine = sf.Engine(
            build_one(),
            optimizer=models.ADAM,
            layout="zero3",
            parallel=sf.Parallel(mesh={"tensor": 2, "expert": 2}, tensor="auto"),
            clip_norm=0.1,
        )
        optimizer = models.ADAM(whole.parameters())
        for batch in models.batches(3):
            loss = models.loss_on(engine, *batch)
            engine.backward(loss)
            norm = engine.step().grad_norm
            expected = models.loss_of(whole, *batch)
            expected.backward()
            assert engine.mean(loss.item()) == pytest.approx(expected.item(), rel=1e-12)
            assert norm == pytest.approx(nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item(), rel=1e-11)
            assert norm > 0.1
            optimizer.step()
            optimizer.zero_grad()
        place, state = engine.mesh.coords["expert"], whole.state_dict()
        assert engine.state_dict()[column].numel() == state[column].numel() // 2
        for name, value in engine.state_dict().items():
            at = mine(name, state[name], place, 2) if ".experts." in name else models.part(engine, name, state[name])
            assert torch.allclose(value, at, rtol=1e-10, atol=1e-10), name
        engine.close()


def test_a_models_own_plan_leaves_experts_whole(ranks: Ranks) -> None:
    """By ``tensor="auto"`` beside an axis of experts attention is cut and each rank of tensor has all of its experts,
    whose gradients are the same there and count once: losses, norms and weights after steps that clip are those of the
    whole model, of ours and of transformers' Mixtral, whose own plan cuts experts."""
    ranks.run(_by_the_models_plan, world_size=4)


def _cut_twice() -> str:
    model = nn.Sequential(sf.nn.MoE(8, 8, 4), nn.Linear(8, 8))
    plan = {"0.experts": "experts"}
    return _refused(lambda: sf.Engine(model, parallel=sf.Parallel(mesh={"expert": 2, "tensor": 2}, tensor=plan)))


def test_experts_are_cut_along_one_axis(ranks: Ranks) -> None:
    for text in ranks.run(_cut_twice, world_size=4):
        assert "'0.experts' has experts that Parallel(tensor=...) cuts" in text
