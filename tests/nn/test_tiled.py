"""`nn.tiled`: values and gradients of the whole, activations of one tile, forwards no more often than they must be."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.nn import tiled
from shardfold.torch_internals import expired, free_weak, weak_storage


class Feed(nn.Module):
    """Counts its forwards and the most bytes that autograd had saved in one."""

    def __init__(self, width: int = 6, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, 4 * width, dtype=dtype), nn.Linear(4 * width, width, dtype=dtype)
        self.dropout, self.count = dropout, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.down(F.dropout(F.gelu(self.up(x)), self.dropout))


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    return x.requires_grad_(), grad


def gradients(out: Tensor, wanted: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 23), tile=st.integers(1, 30), rows=st.integers(0, 3))
def test_values_and_gradients_are_those_of_the_whole(tokens: int, tile: int, rows: int) -> None:
    """To 1e-12 in fp64, whatever the tile and whether it divides the tokens."""
    feed = Feed()
    x, grad = inputs(*([rows] if rows else []), tokens, 6)
    wanted = [x, *feed.parameters()]
    expected = gradients(feed(x), wanted, grad)
    for mine, theirs in zip(gradients(tiled(feed, x, tile=tile), wanted, grad), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(tiled(feed, x, tile=tile), expected[0], rtol=1e-12, atol=1e-12)


def test_any_function_of_several_tensors() -> None:
    """All of them are cut; what the function closes over has its gradient."""
    x, grad = inputs(2, 7, 6)
    other, weight = inputs(7, 6)[0], torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(a @ weight) * b

    expected = gradients(function(x, other), [x, other, weight], grad)
    for mine, theirs in zip(
        gradients(tiled(function, x, other, tile=3), [x, other, weight], grad), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_saved_is_that_of_one_tile() -> None:
    """Between forward and backward the inputs alone are held, and in backward what one tile saves."""
    feed, (x, grad) = Feed(), inputs(64, 6)
    held: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = tiled(feed, x, tile=8)
    assert out.shape == x.shape and held == [x.numel()]
    made: list[Any] = []
    most = 0

    def hidden(module: Any, args: Any, output: Tensor) -> None:
        nonlocal most
        made.append(weak_storage(output.untyped_storage()))
        most = max(most, sum(not expired(each) for each in made))

    feed.up.register_forward_hook(hidden)
    tiled(feed, x, tile=8).backward(grad)
    assert len(made) == 16 and most == 1
    for each in made:
        free_weak(each)


def test_a_recomputed_block_computes_tiles_once_more() -> None:
    """In a checkpoint of the whole block the tiles of backward are all that runs again: the checkpoint stops where the
    inputs of the first tile are."""
    feed, norm, (x, grad) = Feed(), nn.LayerNorm(6, dtype=torch.float64), inputs(2, 12, 6)
    wanted = [x, *feed.parameters(), *norm.parameters()]
    expected = gradients(x + feed(norm(x)), wanted, grad)
    feed.count = 0
    out: Any = checkpoint(lambda x: x + tiled(feed, norm(x), tile=3), x, use_reentrant=False)
    assert feed.count == 4
    found = gradients(out, wanted, grad)
    assert feed.count == 8
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_random_numbers_are_those_of_forward() -> None:
    """Dropout draws anew for each tile, and in backward as it drew in forward."""
    feed, (x, grad) = Feed(dropout=0.5), inputs(8, 6)
    torch.manual_seed(3)
    expected = gradients(torch.cat([feed(part) for part in x.split(4)]), [x, *feed.parameters()], grad)
    torch.manual_seed(3)
    for mine, theirs in zip(gradients(tiled(feed, x, tile=4), [x, *feed.parameters()], grad), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_sums_of_16_bit_gradients_are_wide() -> None:
    """A gradient of a bf16 parameter is rounded to 16 bits once per tile and once for all, and not once more with each
    tile: ones are added up past 256, where bf16 has no next whole number."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    tiled(layer, x, tile=1).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.item() == 512
    plain: Any = sum(layer(part).sum() for part in x.split(1))
    assert torch.autograd.grad(plain, [layer.weight])[0].item() == 256
    assert isinstance(layer.weight, nn.Parameter)


def test_parameters_get_their_gradient_once() -> None:
    """Whoever listens to a parameter hears the sum over tiles; one that a tile does not read misses nothing of the
    others, and one that no tile reads has none."""
    both = nn.ModuleList([nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for _ in range(2)])
    heard: list[float] = []
    both[0].weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.item()))  # type: ignore[union-attr]

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = both

        def forward(self, x: Tensor) -> Tensor:
            return self.both[0](x) if x.sum() > 1.5 else 1 * x

    x = torch.tensor([[2.0], [1.0], [3.0]], dtype=torch.bfloat16, requires_grad=True)
    tiled(Chosen(), x, tile=1).sum().backward()
    assert heard == [5.0] and both[1].weight.grad is None


def test_backward_twice_and_in_parts() -> None:
    """A graph that is retained gives the same again, inside a checkpoint too."""
    feed, (x, grad) = Feed(), inputs(6, 6)
    for out in (tiled(feed, x, tile=2), checkpoint(lambda x: tiled(feed, x * 1, tile=2), x, use_reentrant=False)):
        first = torch.autograd.grad(out, [x], grad, retain_graph=True)[0]
        torch.testing.assert_close(torch.autograd.grad(out, [x], grad)[0], first, rtol=0, atol=0)


@pytest.mark.soak
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # Dynamo's own look
def test_compiled() -> None:
    """In what is compiled it is the same."""
    torch._dynamo.reset()
    feed, (x, grad) = Feed(), inputs(6, 6)
    wanted = [x, *feed.parameters()]
    expected = gradients(feed(x * 2) / 2, wanted, grad)
    compiled = torch.compile(lambda x: tiled(feed, x * 2, tile=4) / 2, backend="eager")
    for mine, theirs in zip(gradients(compiled(x), wanted, grad), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: tiled(Feed(), x, tile=0), "a number of tokens, 1 or more"),
        (lambda x: tiled(Feed(), tile=2), "shapes none"),
        (lambda x: tiled(Feed(), x, x[:3], tile=2), "of one number of tokens"),
        (lambda x: tiled(torch.sum, x, tile=2), "for functions of single tokens"),
        (lambda x: tiled(cast(Any, str), x, tile=2), "for functions of single tokens"),
        (lambda x: tiled(Feed(), x, **{"tiles": 2}), "mean 'tile'"),
    ],
)
def test_misuse_is_told(call: Any, words: str) -> None:
    """What has no tokens, or does not keep them, is refused in one sentence."""
    with pytest.raises(ConfigError) as caught:
        call(inputs(6, 6)[0])
    assert words in str(caught.value)
    assert sf.nn.tiled is tiled
