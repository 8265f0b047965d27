"""Feed-forward layers in tiles under an engine: gradients of the whole, less held, others refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError, ModelError
from shardfold.testing import Ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.parallel.models import part

SGD = partial(torch.optim.SGD, lr=0.1)
TOKENS = 13  # no tile divides them, and ranks along a sequence have other numbers of them


def gpt(dtype: torch.dtype = torch.float64) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=31, d_model=16, layers=2, heads=4, context=TOKENS, d_ff=24)).to(dtype)


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(31, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _gradients(mesh: dict[str, int], layout: str, outside: str) -> dict[str, Any]:
    """The largest difference of a gradient's direction from plain PyTorch's, and bytes that are held."""
    model = gpt()
    model(**batch()).backward()
    expected: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    rules = {"*.feed_forward": "tile:4", "*": outside}
    tensor = "auto" if "tensor" in mesh else None
    engine = sf.Engine(
        gpt(),
        optimizer=SGD,
        layout=layout,
        parallel=sf.Parallel(mesh=mesh, tensor=tensor),
        activations=rules,
        runtime=sf.Runtime(debug=True),
    )
    assert "blocks.1.feed_forward: tile:4" in engine.explain()
    with engine.count_saved() as saved:
        given = sf.sequence_shard(batch()) if "sequence" in mesh else batch()
        engine.backward(engine(**given))
    with engine.gathered(of="grads") as found:
        errors = {}
        for name, grad in found.items():
            assert grad is not None
            theirs = part(engine, name, expected[name])
            errors[name] = float((grad / grad.norm() - theirs / theirs.norm()).abs().max())
    assert "forward" in vars(engine.module.get_submodule("blocks.0.feed_forward"))
    engine.step()
    engine.close()
    return {"worst": max(errors.values()), "held": saved.device}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "layout", "outside"),
    [
        ({"tensor": 2}, "zero3", "keep"),
        pytest.param({"intra": 2}, "zero3", "recompute", marks=pytest.mark.soak),
        pytest.param({"sequence": 2}, "zero2", "host", marks=pytest.mark.soak),
        ({"sequence": 2, "tensor": 2}, "zero3", "recompute"),
    ],
)
def test_gradients_are_those_of_the_whole(ranks: Ranks, mesh: dict[str, int], layout: str, outside: str) -> None:
    """To 1e-12 in fp64, over ranks along tensor and sequence, and whatever holds for the rest of the block."""
    for found in ranks.run(_gradients, mesh, layout, outside, world_size=4 if len(mesh) == 2 else 2):
        assert found["worst"] < 1e-12


def held(rules: Any, precision: str = "fp32") -> tuple[int, dict[str, Tensor]]:
    engine = sf.Engine(gpt(torch.float32), optimizer=SGD, layout="zero3", activations=rules, precision=precision)
    with engine.count_saved() as saved:
        engine.backward(engine(**batch()))
    with engine.gathered(of="grads") as grads:
        found = {name: grad.clone() for name, grad in grads.items() if grad is not None}
    engine.step()
    engine.close()
    assert not any("forward" in vars(module) for module in engine.module.modules())
    return saved.device, found


def test_less_is_held() -> None:
    """Of a feed-forward layer of width f its input stays, which a norm has saved anyway, and not the 4 f of what it
    computes; gradients in bf16 differ by roundings."""
    (kept, whole), (tiled, parts) = (held(rule) for rule in ("keep", {"*.feed_forward": "tile:4", "*": "keep"}))
    assert kept - tiled == 2 * 4 * 24 * 2 * TOKENS * 4  # layers, tensors of width f, rows, tokens, bytes
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, rtol=1e-5, atol=1e-6)
    (_, whole), (_, parts) = (held(rule, "bf16") for rule in ("keep", {"*.feed_forward": "tile:1", "*": "keep"}))
    for name, grad in whole.items():
        assert (parts[name] - grad).norm() <= 2**-6 * grad.norm(), name


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-2)


class Normed(nn.Sequential):
    """Of the batch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Flatten(0, 1), nn.BatchNorm1d(4), nn.Unflatten(0, (2, -1)))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (Mixing(), "gives another output for a token when it sees another one"),
        (Normed(), "gives another output for a token when it sees another one"),
        (Pair(), "gives a tuple"),
    ],
)
def test_what_is_not_token_by_token_is_refused(inner: nn.Module, words: str) -> None:
    """At its first forward, with its name, before anything was computed with it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), inner)

        def forward(self, x: Tensor) -> Any:
            return self.block(x)

    engine = sf.Engine(
        Model(), optimizer=SGD, init=sf.Init(units=["block"]), activations={"block.1": "tile:2", "*": "keep"}
    )
    with pytest.raises(ModelError) as caught:
        engine(torch.randn(2, 6, 4))
    assert words in str(caught.value) and "'block.1'" in str(caught.value)
    engine.close()


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("tile:4", "name them, as in activations={'*.mlp': 'tile:4', '*': 'keep'}"),
        ({"*.feed_forward": "tile:0", "*": "keep"}, "as in 'tile:1024'"),
        ({"*.feed_forward": "tile", "*": "keep"}, "as in 'tile:1024'"),
        ({"*.feed_forward": "tile:4", "*": "select"}, "leave one of them out"),
        ({"*.feed_forward": "tile:4", "*": "fit:1GiB"}, "leave one of them out"),
        ({"*.down": "host", "*.feed_forward": "tile:4", "*": "keep"}, "leave one of them out"),
    ],
)
def test_rules_that_do_not_go_together(rules: Any, words: str) -> None:
    """Each is refused in one sentence as the engine is made."""
    with pytest.raises((ConfigError, LayoutError, ModelError)) as caught:
        sf.Engine(gpt(torch.float32), optimizer=SGD, activations=rules)
    assert words in str(caught.value)


def test_a_layer_that_is_given_no_tokens() -> None:
    """Tensors of other tokens, or none, are refused: which of them to cut is not known."""
    engine = sf.Engine(gpt(torch.float32), optimizer=SGD, activations={"*.attention": "tile:4", "*": "keep"})
    with pytest.raises(
        ModelError, match=r"'blocks.0.attention', which is called with tensors \(2, 13, 16\), \(13, 2\)"
    ):
        engine(**batch())
    engine.close()


class Viewing(nn.Module):
    """A layer that sees tokens as rows, as some of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, 4)).view(x.shape)


def test_a_layer_that_views_its_tokens_as_rows() -> None:
    """Tiles of several sequences are contiguous, as what they are cut from."""
    model = nn.Sequential(nn.Linear(4, 4), Viewing())
    x = torch.randn(3, 5, 4)
    whole = model(x)
    engine = sf.Engine(model, optimizer=SGD, init=sf.Init(units=["1"]), activations={"1": "tile:2", "*": "keep"})
    tiled = engine(x)
    engine.backward(tiled.sum())
    torch.testing.assert_close(tiled, whole)
    engine.close()
