"""Sequence parallelism on the axis of tensor: what flows between cut layers is divided, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ShardfoldError
from shardfold.parallel.plan import TensorPlan
from shardfold.testing import Ranks
from tests.parallel.models import ADAM, MODELS, batches, loss_of, make, part, plain


def _trains(name: str, size: int, heads: int, layout: str, activations: str | None = None) -> None:
    engine = sf.Engine(
        make(name, heads),
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh={"tensor": size}, tensor="auto", sequence_parallel=True),
        clip_norm=0.1,
        activations=activations,
        runtime=sf.Runtime(debug=True),
    )
    time = 2 * size
    losses, norms, grads, whole = plain(name, heads, time=time)
    for step, batch in enumerate(batches(time=time)):
        mine = [t.chunk(engine.data_ranks)[engine.data_rank] for t in batch]
        loss = loss_of(engine, *mine)
        engine.backward(loss)
        with engine.gathered(of="grads") as found:
            for key, grad in found.items():
                if key in grads[step]:
                    torch.testing.assert_close(grad, part(engine, key, grads[step][key]), rtol=1e-12, atol=1e-13,
                                               msg=lambda text, key=key: f"{key}: {text}")  # fmt: skip
        report = engine.step()
        assert engine.mean(loss.item()) == pytest.approx(losses[step], rel=1e-12)
        assert report.grad_norm == pytest.approx(norms[step], rel=1e-12)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, part(engine, key, whole[key]), rtol=1e-12, atol=1e-12)
    assert sf.numerics.replicas(engine) == []
    engine.close()


REFUSED = ("t5", "vit", "mixtral", "mixtral-plain")
FEW = {("gpt-tied", 2), ("gpt", 4), ("qwen3", 2), ("bert", 2), ("gpt2", 2)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in FEW else pytest.mark.soak)
        for name in MODELS
        for size in (2, 3, 4)
        if name not in REFUSED
    ],
)
def test_models(ranks: Ranks, name: str, size: int) -> None:
    """Loss, every gradient (of norms and of biases behind rows among them), the norm before clipping and parameters
    after 5 steps are plain PyTorch's to 1e-12, and what is replicated stays equal."""
    ranks.run(_trains, name, size, 6 if size == 3 else 4, "ddp", world_size=size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layout", "activations"),
    [
        ("gpt", "zero3", "recompute"),
        ("llama-1kv", "zero1", None),
        *(
            pytest.param(name, layout, activations, marks=pytest.mark.soak)
            for name in ("gpt", "gpt-tied", "llama", "gpt2")
            for layout in ("zero1", "zero3")
            for activations in (None, "recompute")
        ),
    ],
)
def test_with_axes_of_data(ranks: Ranks, name: str, layout: str, activations: str | None) -> None:
    """The same on two ranks along tensor by two of data, also where blocks are computed again in backward."""
    ranks.run(_trains, name, 2, 4, layout, activations, world_size=4)


def _sent(name: str, parallel: bool) -> list[tuple[Any, ...]]:
    engine = sf.Engine(
        make(name),
        optimizer=ADAM,
        layout="ddp",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto", sequence_parallel=parallel),
    )
    engine.backward(loss_of(engine, *batches(1)[0]))
    engine.step()
    rows = [tuple(row) for row in engine.traffic().rows]
    engine.close()
    return sorted(rows)


@pytest.mark.soak
def test_bytes_are_those_of_the_formula(ranks: Ranks) -> None:
    """For each sum of the activations a reduce-scatter and a gather, of as many bytes together (arXiv 2205.05198,
    4.2.2): per block and pass two of each, one for the embedding and one for the head. Besides the loss's three numbers
    for each row only gradients of norms are summed."""
    blocks, tokens, width, n = 2, 4 * 6, 16, 2
    sums, norms = 4 * blocks + 2, 2 * blocks + 1
    each = 8 * tokens * width * (n - 1) // n
    loss, gradients = 2 * 8 * 3 * tokens * (n - 1) // n, 2 * 8 * norms * width * (n - 1) // n
    for rows in ranks.run(_sent, "gpt-tied", True, world_size=n):
        assert [row[:4] + row[5:] for row in rows] == [
            ("layers", "ALL_GATHER", ("tensor",), sums, sums * each),
            ("layers", "ALL_REDUCE", ("tensor",), 2 + norms, loss + gradients),
            ("layers", "REDUCE_SCATTER", ("tensor",), sums, sums * each),
        ]
    without = ranks.run(_sent, "gpt-tied", False, world_size=n)[0]
    assert without[0][5] == 2 * sums * each + loss


def test_bytes_of_a_model_that_cuts_at_its_first_block(ranks: Ranks) -> None:
    """A model of transformers reads the length of what its embedding gives, so that is whole: a sum, and a gather in
    backward; all else is as for ours, the head behind a norm and a slice among it."""
    blocks, tokens, width, n = 2, 4 * 6, 16, 2
    each = 8 * tokens * width * (n - 1) // n
    rows = {row[1]: row[3:] for row in ranks.run(_sent, "llama", True, world_size=n)[0]}
    head = 8 * tokens * 23 // 2  # of logits, uneven: ranks have 12 and 11 of them
    assert rows["REDUCE_SCATTER"][0] == 4 * blocks + 1 and rows["REDUCE_SCATTER"][2] == (4 * blocks + 1) * each
    assert rows["ALL_GATHER"][0] == 4 * blocks + 1 + 1 + 1
    assert 0 <= rows["ALL_GATHER"][2] - (4 * blocks + 2) * each - head <= 8 * tokens


def _saved(parallel: bool) -> int:
    """Bytes that autograd keeps of the second block."""
    engine = sf.Engine(
        make("gpt"), layout="ddp", parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto", sequence_parallel=parallel)
    )
    with engine.count_saved() as saved:
        loss = loss_of(engine, *batches(1)[0])
    engine.close()
    del loss
    return next(row.device for row in saved.rows if row.unit == "blocks.1")


def test_activations_between_layers_are_divided(ranks: Ranks) -> None:
    """Of both norms of a block the input, what it is divided by, and the quotient are halved, and nothing is added."""
    with_it, without = (ranks.run(_saved, parallel, world_size=2)[0] for parallel in (True, False))
    tokens, width = 4 * 6, 16
    assert without - with_it == 8 * tokens * 2 * (2 * width + 1) // 2


class Drops(nn.Module):
    """Dropout between a row and a column, on a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.before, self.drop, self.norm = nn.Dropout(0.5), nn.Dropout(0.5), nn.Identity()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.before(torch.ones(64))
        mask = self.drop(torch.ones_like(self.embedding(tokens)))
        return x, self.norm(mask), self.before(torch.ones(64))


DROPS = {
    "embedding": "vocabulary", "up": "column", "down": "row", "drop": "sequence", "norm": "joined",
}  # fmt: skip


def _drops() -> tuple[Tensor, ...]:
    engine = sf.Engine(
        Drops(), parallel=sf.Parallel(mesh={"tensor": 2}, tensor=DROPS, sequence_parallel=True), layout="ddp"
    )
    torch.manual_seed(5)
    tokens = torch.zeros(2, 6, dtype=torch.long)
    out = engine(tokens)
    torch.manual_seed(5)
    again = engine(tokens)
    assert all(map(torch.equal, out, again))
    engine.close()
    return tuple(each.detach() for each in out)


def test_each_rank_draws_its_own(ranks: Ranks) -> None:
    """Dropout of what is cut takes other random numbers on each rank, and the same again from the same state; that of
    what is whole takes the same on all, before and behind it."""
    (first, mask, last), second = ranks.run(_drops, world_size=2)
    assert all(map(torch.equal, (first, mask, last), second))
    assert not torch.equal(first, last)
    one, two = mask.chunk(2, dim=1)
    assert not torch.equal(one, two) and 0.3 < (one == two).double().mean() < 0.7


def _recomputes() -> None:
    """GPT-2 with dropout, kept and computed again, from one seed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    losses, norms = [], []
    for activations in (None, "recompute"):
        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=16, n_layer=2, n_head=4, vocab_size=23, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        engine = sf.Engine(
            GPT2LMHeadModel(config).double(),
            optimizer=ADAM,
            parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto", sequence_parallel=True),
            activations=activations,
            clip_norm=1.0,
        )
        torch.manual_seed(5)
        for batch in batches(2):
            loss = loss_of(engine, *batch)
            engine.backward(loss)
            losses.append(loss.item())
            norms.append(engine.step().grad_norm)
        assert sf.numerics.replicas(engine) == []
        engine.close()
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-12) and norms[:2] == pytest.approx(norms[2:], rel=1e-12)


@pytest.mark.soak
def test_dropout_is_the_same_where_it_is_computed_again(ranks: Ranks) -> None:
    """With dropout, gradients are the same whether blocks are kept or computed again, and replicas stay equal."""
    ranks.run(_recomputes, world_size=2)


def _lengths() -> tuple[float, str, Tensor]:
    engine = sf.Engine(
        make("llama"),
        optimizer=ADAM,
        layout="ddp",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto", sequence_parallel=True),
    )
    tokens, targets = batches(1, time=5)[0]
    with torch.no_grad():
        loss = loss_of(engine, tokens, targets).item()
        last = engine.module(input_ids=tokens[:, :1]).logits
    with pytest.raises(ConfigError) as caught:
        loss_of(engine, tokens, targets)
    engine.backward(loss_of(engine, *batches(1)[0]))
    engine.step()
    engine.close()
    with pytest.raises(ConfigError, match="was cut for an engine with True"):
        sf.Engine(engine.module, parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"))
    return loss, str(caught.value), last


def test_lengths_that_do_not_divide(ranks: Ranks) -> None:
    """In training one sentence on all ranks; without gradients sequences stay whole, and give what they give. An engine
    without sequence parallelism does not take the model up."""
    model = make("llama")
    tokens, targets = batches(1, time=5)[0]
    for loss, text, last in ranks.run(_lengths, world_size=2):
        assert loss == pytest.approx(loss_of(model, tokens, targets).item(), rel=1e-12)
        torch.testing.assert_close(last, model(input_ids=tokens[:, :1]).logits, rtol=1e-12, atol=1e-12)
        assert "over the 2 ranks along 'tensor', but this one has 5 tokens: pad it to a multiple of 2" in text


class Named(nn.Module):
    """A block that brings no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm, self.mix = nn.LayerNorm(4), nn.Conv1d(4, 4, 3)


WHOLE = {"words": "vocabulary", "up": "column", "down": "row", "norm": "joined", "mix": "sequence"}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({key: WHOLE[key] for key in ("words", "up", "down", "mix")}, "by 'joined', for the last norm"),
        ({key: WHOLE[key] for key in ("up", "down", "norm", "mix")}, "by the word 'scattered' for the first block"),
        ({**WHOLE, "words": "scattered"}, "the embedding 'words' 'scattered', which is for a block behind it"),
        ({key: WHOLE[key] for key in ("words", "up", "down", "norm")}, "'mix' has parameters (weight, bias), and the"),
        ({**WHOLE, "up": "gathered"}, "'up' is 'gathered', which cannot be"),
    ],
)
def test_plans_that_leave_something_open(plan: dict[str, Any], words: str) -> None:
    """Every module that has parameters needs a word, and sequences a beginning and an end; else the module is named.
    Without sequence parallelism the words say nothing."""
    TensorPlan(Named(), WHOLE, sequence_parallel=True)
    assert set(TensorPlan(Named(), WHOLE).words) == {"words", "up", "down"}
    with pytest.raises(ConfigError) as caught:
        TensorPlan(Named(), plan, sequence_parallel=True)
    assert words in str(caught.value)


def test_models_whose_blocks_are_not_known() -> None:
    """A block with a layer that is no norm, or a body without blocks, is refused by name."""
    model: Any = make("llama")
    model.model.layers[1].mix = nn.Conv1d(4, 4, 3)
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.mix' \(Conv1d\) may look at several tokens"):
        TensorPlan(model, "auto", sequence_parallel=True)
    model = make("llama")
    model.model.ending = model.model.norm
    del model.model.norm
    with pytest.raises(ConfigError, match="where LlamaForCausalLM has its blocks and its last norm is not known"):
        TensorPlan(model, "auto", sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"give a plan, as Parallel\(tensor='auto'\)"):
        sf.Engine(make("llama"), parallel=sf.Parallel(sequence_parallel=True))
    with pytest.raises(ShardfoldError, match="sequence_parallel"):
        sf.Engine(make("llama"), parallel=sf.Parallel(tensor="auto", sequence_parallel="yes"))  # type: ignore[arg-type]


def _crosses() -> None:
    engine = sf.Engine(
        make("gpt"),
        optimizer=ADAM,
        layout="zero1",
        parallel=sf.Parallel(mesh={"sequence": 2, "tensor": 2}, tensor="auto", sequence_parallel=True),
        clip_norm=0.1,
    )
    losses, norms, _, whole = plain("gpt", 4, time=8)
    for step, (tokens, targets) in enumerate(batches(time=8)):
        loss = engine(**sf.sequence_shard({"tokens": tokens, "targets": targets}))
        engine.backward(loss)
        assert engine.mean(loss.item()) == pytest.approx(losses[step], rel=1e-12)
        assert engine.step().grad_norm == pytest.approx(norms[step], rel=1e-12)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, part(engine, key, whole[key]), rtol=1e-12, atol=1e-12)
    engine.close()


@pytest.mark.soak
def test_beside_an_axis_of_sequence(ranks: Ranks) -> None:
    """Ranks along tensor divide the tokens that those along sequence have: five steps are plain PyTorch's."""
    ranks.run(_crosses, world_size=4)
