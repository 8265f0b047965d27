"""What a plan of tensor may say, and what is refused, with a sentence that names the module and the nearest name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ShardfoldError, UsageError
from shardfold.parallel.plan import TensorPlan, split_model
from shardfold.plan import presets
from shardfold.plan.axes import Axis, Mesh
from shardfold.plan.rules import Rules
from shardfold.sharding.partition import cut
from shardfold.testing import Ranks
from tests.parallel.models import ADAM, MODELS, batches, loss_of, make


class Feed(nn.Module):
    """A feed-forward layer, and what cannot be cut."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)
        self.norm = nn.LayerNorm(4)
        self.convolution = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).relu()))


class Scaled(nn.Linear):
    """A linear layer that does more."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Adapted(nn.Linear):
    """A linear layer with a parameter of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(outputs))


def fed(**parts: nn.Module) -> Feed:
    """With other parts."""
    model = Feed()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def replaced() -> Feed:
    """With a forward of a module's own."""
    model = Feed()
    model.up.forward = model.up.forward
    return model


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, padding_idx=7), nn.Linear(4, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens))


TWO = Mesh([Axis("tensor", 2)])
BOTH = {"up": "column", "down": "row"}


@pytest.mark.parametrize(
    ("make_model", "plan", "words"),
    [
        (Feed, "autp", "give 'auto', or a plan"),
        (
            lambda: nn.Sequential(nn.Linear(4, 8)),
            "auto",
            "no plan of Sequential is known, and a trace of it finds nothing "
            "to cut; '0': what it gives leaves the model",
        ),
        (Feed, {}, "Parallel(tensor=...) has no words: it is 'auto'"),
        (Feed, ["up"], "words by patterns"),
        (Feed, {3: "row"}, "Parallel(tensor=...) names 3"),
        (Feed, {"up": 3}, "Parallel(tensor=...) calls 'up' 3"),
        (Feed, {"up": "colum"}, "mean 'column'"),
        (Feed, {"upp": "column"}, "'upp', which matches no module. Did you mean 'up'"),
        (Feed, {**BOTH, "norm": "column"}, "'norm' 'column', but LayerNorm has no weight of two dimensions"),
        (Feed, {"convolution": "row"}, "'convolution' 'row', but Conv1d has no weight of two"),
        (
            lambda: MODELS["mixtral"](4),
            {"*.mlp": "experts"},
            "'model.layers.0.mlp' 'experts', which is for parameters gate_",
        ),
        (lambda: Feed(7), BOTH, "over the 2 ranks along 'tensor'; give the axis another size, as 1, or"),
        (Feed, {"up": "column"}, "columns and no row: of what 'up' gives, each rank has its part alone"),
        (Feed, {"up": ("column", 3)}, "'up' has 8 rows, which are not 3 x 1"),
        (Feed, {"up": ("row", 3)}, "Parallel(tensor=...) calls 'up'"),
        (lambda: fed(down=Scaled(8, 4)), BOTH, "calls 'down' 'row', but Scaled computes in its own way"),
        (lambda: fed(up=Adapted(4, 8)), BOTH, "calls 'up' 'column', but Adapted has parameters besides (scale)"),
        (
            lambda: nn.Sequential(nn.Embedding(8, 4, scale_grad_by_freq=True)),
            {"0": "vocabulary"},
            "'0' has scale_grad_by_freq=, which counts words",
        ),
        (replaced, BOTH, "'up' 'column', but its forward was replaced on the module itself"),
        (lambda: nn.MultiheadAttention(4, 2), {"out_proj": "row"}, "nn.MultiheadAttention reads its weight by itself"),
        (Tied, {"head": "vocabulary"}, "'head' shares its weight with 'words', which the plan leaves whole"),
        (
            lambda: MODELS["llama"](3),
            "auto",
            "has 3 heads, which cannot be divided over the 2 ranks along 'tensor'; give the axis a size that divides "
            "them, as 1.",
        ),
    ],
)
def test_what_is_refused(make_model: Any, plan: Any, words: str) -> None:
    """By its name, and before anything is cut."""
    model = make_model()
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(ConfigError) as caught:
        split_model(model, plan, TWO, {"tensor": 0})
    assert words in str(caught.value)
    assert [p.shape for p in model.parameters()] == shapes


def test_a_plan_is_text() -> None:
    """A line for each module that it names."""
    text = str(TensorPlan(make("gpt"), "auto"))
    assert "blocks.1.attention.qkv: column of 3\n" in text and "\nhead: vocabulary" in text


def test_units_do_not_depend_on_the_part() -> None:
    """Ranks with one word more or less have the same units: what is large is so by its whole."""
    found: list[list[str]] = []
    mesh = Mesh([Axis("tensor", 4)])
    for rank in (0, 3):
        model, coords = make("llama-1kv"), {"tensor": rank}
        split_model(model, "auto", mesh, coords)
        rules = Rules("fp32", presets.named("ddp"), mesh)
        found.append([each.name for each in cut(model, None, {}, rules, mesh, coords=coords)])
    assert found[0] == found[1]


def test_a_model_of_an_unknown_style() -> None:
    """A plan of transformers with a style that there is no word for is not followed: the model is traced, and where
    that does not do, refused with the style."""
    model: Any = make("llama")
    model.config.base_model_tp_plan = {"layers.*.mlp": "mla_kv_a_proj"}
    assert TensorPlan(model, "auto").traced
    with pytest.raises(ConfigError, match=r"the style 'mla_kv_a_proj' for 'layers\.\*\.mlp'"):
        TensorPlan(model, "auto", sequence_parallel=True)


def _said(call: Any, kind: type[ShardfoldError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_row_behind_no_column() -> None:
    """It is given whole tensors, and says which layers need a word."""
    model = Feed()
    split_model(model, {"down": "row"}, TWO, {"tensor": 0})
    assert "'down' is a row of 4 inputs on each rank along 'tensor', and gets 8" in _said(
        lambda: model(torch.ones(1, 4)), UsageError
    )


def _lives() -> None:
    model = make("gpt2")
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    engine = sf.Engine(model, optimizer=ADAM, layout="ddp", parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"))
    assert (list(model.state_dict()), [type(module) for module in model.modules()]) == (names, kinds)
    batch = batches(1)[0]
    first = loss_of(engine, *batch).item()
    with engine.gathered():  # where ranks along other axes may do as they like
        assert loss_of(model, *batch).item() == pytest.approx(first, rel=1e-12)
    with engine.gathered():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert "no engine connects it" in _said(lambda twin=twin: loss_of(twin, *batch), UsageError)
    engine.close()
    assert "no engine connects it" in _said(lambda: loss_of(model, *batch), UsageError)
    engine = sf.Engine(
        model, optimizer=ADAM, layout="zero3", parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto")
    )  # it is cut already
    assert loss_of(engine, *batch).item() == pytest.approx(first, rel=1e-12)
    engine.close()
    assert "cut into 2 parts along 'tensor', and parallel= has 1" in _said(lambda: sf.Engine(make_cut()), UsageError)


def make_cut() -> nn.Module:
    model = Feed().double()
    split_model(model, BOTH, TWO, {"tensor": 0})
    return model


def test_the_life_of_a_cut_model(ranks: Ranks) -> None:
    """It keeps its classes and names; inside ``gathered()`` it runs as it is; copies and what is left behind a closed
    engine refuse to compute with parts; another engine takes it up, one for another number of ranks does not."""
    ranks.run(_lives, world_size=2)


def _pads() -> None:
    torch.manual_seed(1)
    whole, model = Tied().double(), Tied().double()
    model.load_state_dict(whole.state_dict())
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        layout="ddp",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor={"words": "vocabulary", "head": "vocabulary"}),
    )
    tokens = torch.tensor([[1, 7, 9, 2]])
    loss = engine(tokens).square().sum()
    engine.backward(loss)
    expected = whole(tokens).square().sum()
    expected.backward()
    with engine.gathered(of="grads") as grads:
        theirs = whole.words.weight.grad
        assert theirs is not None
        torch.testing.assert_close(grads["words.weight"], theirs.chunk(2)[engine.mesh.coords["tensor"]])
    engine.close()


def test_padding_of_an_embedding(ranks: Ranks) -> None:
    """The word that pads gets no gradient of the embedding's, on the rank that has it."""
    ranks.run(_pads, world_size=2)


def _misses(rank: int) -> str:
    import torch.distributed as dist

    engine = sf.Engine(
        make("gpt"),
        optimizer=ADAM,
        layout="ddp",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"),
        runtime=sf.Runtime(patience=2.0),
    )
    batch = batches(1)[0]
    try:
        if dist.get_rank() == rank:
            engine.step() if engine.micro_batch else engine.state_dict()
        else:
            loss_of(engine, *batch)
    except ShardfoldError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_rank_that_does_something_else(ranks: Ranks) -> None:
    """It is found, and both ranks say what was about to be done."""
    for text in ranks.run(_misses, 1, world_size=2):
        assert any(each in text for each in ("state_dict", "of a layer along 'tensor'", "comparison of batches"))


def test_numbers_of_heads_are_divided_with_their_columns() -> None:
    """Of a known model under a plan of one's own, too; and not where attention stays whole."""
    plan = {"*.c_attn": ("column", 3), "*.attn.c_proj": "row"}
    for given, heads in ((plan, 2), ({"*.mlp.c_fc": "column", "*.mlp.c_proj": "row"}, 4)):
        model: Any = MODELS["gpt2"](4)
        split_model(model, given, TWO, {"tensor": 0})
        attention = model.transformer.h[0].attn
        assert (attention.num_heads, attention.split_size) == (heads, 16 * heads // 4)
