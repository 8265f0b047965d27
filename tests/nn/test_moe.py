"""A mixture of experts on one rank, compared with a token-by-token loop."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.nn._grouped import grouped_linear
from shardfold.nn.experts import sorted_rows
from shardfold.nn.moe import within_capacity
from tests.support.experts import reference

KINDS: list[dict[str, Any]] = [
    {},
    {"scores": "sigmoid", "normalize": False, "scale": 2.5},
    {"top_k": 1, "shared": 6, "gated": False},
    {"top_k": 3, "scores": "sigmoid", "bias_rate": 0.01},
]


@pytest.mark.parametrize("options", KINDS)
def test_it_is_what_a_loop_over_tokens_gives(options: dict[str, Any]) -> None:
    """Outputs and gradients in fp64, for each kind of scores, with and without shared experts and a bias."""
    torch.manual_seed(0)
    moe = sf.nn.MoE(8, 12, 5, std=0.5, **options).double()
    if "bias_rate" in options:
        moe.router.bias += torch.randn(5)
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    out = moe(x).out
    expected = reference(moe, x.reshape(-1, 8)).view(x.shape)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    wanted = [x, *moe.parameters()]
    found = torch.autograd.grad(out.square().sum(), wanted)
    for one, other in zip(found, torch.autograd.grad(expected.square().sum(), wanted), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_products_in_one_kernel_are_those_one_by_one(dtype: torch.dtype, bound: float) -> None:
    """With experts without rows, from the first to the last, and with shapes that the kernel does not take."""
    torch.manual_seed(0)
    for inputs, counts in ((16, [3, 0, 5]), (16, [0, 0, 4]), (16, [0, 0, 0]), (3, [2, 1, 0])):
        rows = torch.randn(sum(counts), inputs, dtype=dtype, requires_grad=True)
        weights = torch.randn(3, 24, inputs, dtype=dtype, requires_grad=True)
        made = grouped_linear(rows, weights, counts)
        parts = zip(rows.double().split(counts), weights.double().unbind(), strict=True)
        expected = torch.cat([part @ weight.t() for part, weight in parts])
        assert torch.allclose(made.double(), expected, rtol=bound, atol=bound * 4)
        grads = torch.autograd.grad(made.sum(), [rows, weights])
        for one, other in zip(grads, torch.autograd.grad(expected.sum(), [rows, weights]), strict=True):
            assert torch.allclose(one.double(), other.double(), rtol=bound, atol=bound * 8)


def test_the_router_computes_in_fp32() -> None:
    """Under autocast, and of 16-bit tokens."""
    moe = sf.nn.MoE(8, 8, 4, balance=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert moe.router(torch.randn(3, 8)).logits.dtype == torch.float32
        assert moe(torch.randn(3, 8)).loss.dtype == torch.float32
    moe = moe.bfloat16()
    out, loss = moe(torch.randn(3, 8, dtype=torch.bfloat16))
    assert (out.dtype, loss.dtype) == (torch.bfloat16, torch.float32)


def test_losses_are_the_papers() -> None:
    """``experts * balance`` where one expert is chosen alone, ``balance`` where scores are alike; that of logits."""
    torch.manual_seed(0)
    moe = sf.nn.MoE(8, 8, 4, top_k=1, balance=0.5).double()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = 1e3
    x = torch.rand(64, 8, dtype=torch.float64) + 0.1
    assert moe(x).loss.item() == pytest.approx(0.5 * 4)
    moe = sf.nn.MoE(8, 8, 4, top_k=2, balance=0.5).double()
    with torch.no_grad():
        moe.router.weight.zero_()  # scores are alike, so it is one, whatever is chosen
    assert moe(x).loss.item() == pytest.approx(0.5)
    moe = sf.nn.MoE(8, 8, 4, z=0.5).double()
    logits = x @ moe.router.weight.t()
    assert moe(x).loss.item() == pytest.approx(0.5 * logits.logsumexp(-1).square().mean().item())


def test_the_bias_follows_the_load() -> None:
    """What had more tokens than the mean falls by the rate, what had fewer rises, whatever a checkpoint runs twice; the
    weights of what was chosen do not have it."""
    moe = sf.nn.MoE(4, 4, 3, top_k=1, scores="sigmoid", normalize=False, bias_rate=0.01)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(3, 4))
    x = torch.eye(3, 4)[[0, 0, 0, 1]].requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda x: moe(x).out, x, use_reentrant=False)
    out.sum().backward()
    assert moe.router._seen is not None and moe.router._seen.sum() == 4  # not of the recomputation too
    moe.router.rebalance()
    assert moe.router.bias.tolist() == pytest.approx([-0.01, 0.01, 0.01])
    moe.eval()
    moe(x)
    moe.train()
    moe.router.rebalance()  # of nothing
    assert moe.router.bias.tolist() == pytest.approx([-0.01, 0.01, 0.01])
    assert moe.router(x).weights[0].item() == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 20).flatmap(lambda t: st.lists(st.permutations(range(5)), min_size=t, max_size=t)),
    st.integers(1, 4), st.integers(1, 8),
)  # fmt: skip
def test_nothing_is_lost_or_doubled(orders: list[list[int]], top_k: int, most: int) -> None:
    """Each choice is one row of its expert, in the order of tokens; with a capacity no expert has more, what is dropped
    was behind as many of its expert, and first choices go first."""
    chosen = torch.tensor([order[:top_k] for order in orders], dtype=torch.int64).view(len(orders), top_k)
    order, counts = sorted_rows(chosen, 5)
    assert sorted(order.tolist()) == list(range(chosen.numel())) and sum(counts) == chosen.numel()
    for expert, rows in enumerate(order.split(counts)):
        assert (chosen.reshape(-1)[rows] == expert).all() and rows.tolist() == sorted(rows.tolist())
    kept = within_capacity(chosen, 5, most)
    assert ((kept == chosen) | (kept == -1)).all()
    for expert in range(5):
        wanted = [(k, t) for k in range(top_k) for t in range(len(orders)) if chosen[t, k] == expert]
        assert [(k, t) for k in range(top_k) for t in range(len(orders)) if kept[t, k] == expert] == wanted[:most]


@pytest.mark.parametrize("options", [{}, {"balance": 0.1}, {"z": 0.1}])
def test_without_values_the_forms_are_those_with_them(options: dict[str, Any]) -> None:
    """As stages of a pipeline ask for them: shapes, dtypes, and what has a gradient."""
    moe, x = sf.nn.MoE(8, 8, 4, **options), torch.randn(2, 3, 8)
    with_values, without = moe(x), moe.to("meta")(x.to("meta"))
    for one, other in zip(with_values, without, strict=True):
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)


def test_what_is_over_capacity_goes_past() -> None:
    """In training by one factor, in evaluation by another."""
    torch.manual_seed(0)
    moe = sf.nn.MoE(8, 8, 4, top_k=1, capacity=1.0, eval_capacity=4.0, bias_rate=0.0)
    moe.router.bias[1] = 100.0
    x = torch.randn(8, 8)
    assert [bool(row.any()) for row in moe(x).out] == [True] * 2 + [False] * 6
    assert moe.eval()(x).out.any(1).all()


def test_copies_and_pickles_are_plain() -> None:
    moe = sf.nn.MoE(8, 8, 4, balance=0.1)
    moe.everyone.axes = [lambda: None]  # what an engine puts there is not copied
    for made in (copy.deepcopy(moe), pickle.loads(pickle.dumps(copy.deepcopy(moe)))):
        assert made.everyone.size == 1 and made(torch.randn(2, 8)).out.shape == (2, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 5}, "1 to 4 of them"),
        ({"scores": "softmx"}, "'softmax' or 'sigmoid'"),
        ({"activation": "gelo"}, "did you mean 'gelu'"),
        ({"capacity": 0}, "above 0"),
        ({"balance_over": "ranks"}, "'all' or 'rank'"),
        ({"topk": 2}, "top_k"),
    ],
)
def test_wrong_arguments_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sf.nn.MoE(8, 8, 4, **options)
    assert words.lower() in str(caught.value).lower()
