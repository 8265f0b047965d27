"""`nn.chunked_cross_entropy` against PyTorch's linear and cross entropy: losses, gradients, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.errors import ConfigError, UsageError
from shardfold.nn import chunked_cross_entropy
from shardfold.testing import Ranks, same_training
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.support.options import grouped

VOCAB, WIDTH = 37, 8


def problem(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, vocab: int = VOCAB) -> Any:
    """Hidden, weight, bias (all requiring gradients) and targets."""
    draw = torch.Generator().manual_seed(seed)
    floats = [
        torch.randn(size, generator=draw, dtype=torch.float64) for size in ((*shape, WIDTH), (vocab, WIDTH), (vocab,))
    ]
    targets = torch.randint(vocab, shape, generator=draw)
    floats[1] *= 0.3  # no row is so certain of its class that its gradient is a difference of nearly equal numbers
    return [each.to(dtype).requires_grad_() for each in floats], targets


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None = None, **options: Any
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits.reshape(-1, len(weight)), targets.reshape(-1), **options)
    return losses.view(targets.shape) if options.get("reduction") == "none" else losses


def chunked(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> Tensor:
    return chunked_cross_entropy(hidden, weight, targets, bias=bias, **options)


def with_gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The loss and the gradients of its sum, each element of it weighted differently."""
    weights = torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * weights).sum(), inputs)]


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element; infinite unless NaN is where it is expected.

    Gradients are differences of probabilities, which may cancel: they cannot be nearer than these are rounded.
    """
    if got.shape != expected.shape or not got.isnan().equal(expected.isnan()):
        return math.inf
    got, expected = got.double().nan_to_num(), expected.double().nan_to_num()
    apart, size = ((each.abs().max().item() if each.numel() else 0.0) for each in (got - expected, expected))
    return apart / max(size, 0.1)


def assert_near(got: Sequence[Tensor], expected: Sequence[Tensor], tol: float) -> None:
    assert max(error(a, b) for a, b in zip(got, expected, strict=True)) <= tol


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(), (0,), (1,), (7,), (2, 0), (3, 5), (2, 2, 3)]),
    vocab=st.integers(2, 40),
    chunk=st.sampled_from([None, 1, 2, 5, 100]),
    ignored=st.sampled_from(["none", "some", "all"]),
    ignore_index=st.sampled_from([-100, 0]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    softcap=st.sampled_from([None, 3.0]),
    bias=st.booleans(),
    double=st.booleans(),
)
def test_losses_and_gradients_are_those_of_pytorch(
    shape: tuple[int, ...], vocab: int, chunk: int | None, ignored: str, bias: bool, double: bool, **options: Any
) -> None:
    """Any shape, chunk and option; also NaN, and zero gradients, where no row counts."""
    inputs, targets = problem(*shape, vocab=vocab, dtype=torch.float64 if double else torch.float32)
    if ignored != "none":
        chosen = torch.ones(shape, dtype=torch.bool) if ignored == "all" else targets % 3 == 0
        targets = targets.masked_fill(chosen, options["ignore_index"])
    given = inputs if bias else inputs[:2]
    args = (*given, targets) if bias else (*given, None, targets)
    got = with_gradients(chunked(*args, chunk=chunk, **options), given)
    expected = with_gradients(plain(*args, **options), given)
    assert [each.dtype for each in got] == [each.dtype for each in expected]
    assert_near(got, expected, 1e-13 if double else 2e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_vocabulary_of_one_has_no_gradients(label_smoothing: float, reduction: str) -> None:
    """All that is summed cancels, so what is left is as large as it is rounded."""
    inputs, targets = problem(7, vocab=1, dtype=torch.float32)
    loss = chunked(*inputs[:2], None, targets, label_smoothing=label_smoothing, reduction=reduction)
    for each in with_gradients(loss, inputs[:2]):
        torch.testing.assert_close(each, torch.zeros_like(each), rtol=0, atol=1e-5)


def test_gradients_equal_those_of_finite_differences() -> None:
    inputs, targets = problem(2, 3, dtype=torch.float64, vocab=5)
    for options in ({}, {"label_smoothing": 0.2, "softcap": 2.0}, {"reduction": "none"}):
        way = partial(chunked_cross_entropy, targets=targets, chunk=2, **options)
        assert torch.autograd.gradcheck(lambda h, w, b, way=way: way(h, w, bias=b), inputs)


def test_a_large_vocabulary_is_as_exact_as_plain_pytorch() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(96, 64, generator=draw).requires_grad_(),
        (torch.randn(9000, 64, generator=draw) * 0.1).requires_grad_(),
    ]
    targets = torch.randint(9000, (96,), generator=draw)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = with_gradients(plain(*exact, None, targets), exact)
    ours, theirs = (with_gradients(way(*inputs, None, targets), inputs) for way in (partial(chunked, chunk=10), plain))
    for mine, other, right in zip(ours, theirs, expected, strict=True):
        assert error(mine, right) <= max(1e-6, 1.2 * error(other, right))
    assert_near(ours, theirs, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_16_bit_inputs_are_summed_in_fp32(dtype: torch.dtype, reduction: str) -> None:
    """The gradient of the weight over many chunks is as near to the exact one as that of one product."""
    inputs, targets = problem(600, dtype=dtype)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    wide = with_gradients(plain(*exact, targets, reduction=reduction), exact)
    got = with_gradients(chunked(*inputs, targets, chunk=3, reduction=reduction), inputs)
    assert [each.dtype for each in got] == [torch.float32, dtype, dtype, dtype]
    one = with_gradients(plain(*inputs, targets, reduction=reduction), inputs)
    for mine, theirs, right in zip(got, one, wide, strict=True):
        assert error(mine, right) <= 1.5 * error(theirs, right) + torch.finfo(dtype).eps


def test_in_fp16_gradients_do_not_vanish_before_the_loss_scale() -> None:
    """The gradient of one logit of a mean over many rows is less than fp16 holds."""
    inputs, targets = problem(20_000, dtype=torch.float16, vocab=2)
    scale = 2.0**14
    loss = chunked(*inputs, targets)
    got = torch.autograd.grad(loss * scale, inputs)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = torch.autograd.grad(plain(*exact, targets) * scale, exact)
    assert_near(got, expected, 4e-3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_autocast_it_is_the_head_under_autocast(reduction: str) -> None:
    inputs, targets = problem(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked(*inputs, targets, chunk=9, reduction=reduction)
        reference = plain(*inputs, targets, reduction=reduction)
    got, expected = (with_gradients(each, inputs) for each in (loss, reference))
    assert [each.dtype for each in got] == [torch.float32] * 4
    assert_near(got[:1], expected[:1], 1e-6)
    assert_near(got, expected, 2e-2)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none(frozen: int) -> None:
    inputs, targets = problem(9)
    expected = with_gradients(plain(*inputs, targets), inputs)
    inputs[frozen].requires_grad_(False)
    rest = [each for each in inputs if each.requires_grad]
    got = with_gradients(chunked(*inputs, targets, chunk=4), rest)
    del expected[1 + frozen]
    assert_near(got, expected, 1e-6)


def test_where_no_gradient_is_wanted_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardfold.nn import cross_entropy

    inputs, targets = problem(9)
    monkeypatch.setattr(cross_entropy, "_add", lambda *args: pytest.fail("a gradient was computed"))
    with torch.no_grad():
        loss = chunked(*inputs, targets, chunk=4)
    assert not loss.requires_grad
    assert_near([loss], [plain(*inputs, targets).detach()], 1e-6)
    assert not chunked(*(each.detach() for each in inputs), targets).requires_grad


def test_a_second_backward_gives_the_same_gradients() -> None:
    inputs, targets = problem(9)
    loss = chunked(*inputs, targets, chunk=4)
    first = torch.autograd.grad(loss * 3, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert_near([each / 3 for each in first], second, 1e-6)


def test_gradients_of_gradients_are_refused() -> None:
    inputs, targets = problem(4)
    with pytest.raises(UsageError, match=r"create_graph=True.*F\.cross_entropy"):
        torch.autograd.grad(chunked(*inputs, targets), inputs, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_may_be_recomputed(use_reentrant: bool) -> None:
    inputs, targets = problem(9)
    loss = checkpoint(chunked, *inputs, targets, use_reentrant=use_reentrant)
    loss.backward()
    assert_near([each.grad for each in inputs], with_gradients(plain(*inputs, targets), inputs)[1:], 1e-6)


def test_nothing_of_rows_times_vocabulary_is_made() -> None:
    """The largest tensor that any operation returns is the gradient of the weight; one chunk's logits are far less."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                largest = max(largest, made.numel())
            return made

    inputs, targets = problem(400, vocab=500)
    with Sizes():
        chunked(*inputs, targets, chunk=5).backward()
    assert largest == inputs[1].numel()


@pytest.mark.soak
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # Dynamo's own look
def test_a_compiled_function_may_call_it() -> None:
    inputs, targets = problem(9)
    compiled = torch.compile(lambda *args: chunked(*args, chunk=4) * 2, backend="eager")
    got = with_gradients(compiled(*inputs, targets), inputs)
    assert_near(got, with_gradients(plain(*inputs, targets) * 2, inputs), 1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reduction": "meen"}, "Did you mean 'mean'"),
        ({"chunk": 0}, "chunk is 0"),
        ({"label_smoothing": 1.5}, "from 0 to 1"),
        ({"softcap": 0.0}, "softcap is 0"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\)"),
        ({"weight": torch.zeros(VOCAB, 3)}, "do not fit"),
        ({"weight": torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16)}, r"one dtype.*bfloat16"),
        ({"targets": torch.zeros(5)}, "integer classes"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, r"of shape \(4,\), but must be"),
        ({"targets": torch.ones(5, dtype=torch.bool)}, r"are torch.bool of shape"),
        ({"targets": [0, 1, 2, 3, 4]}, r"takes tensors, but targets is \[0, 1"),
        ({"softcap": math.inf}, "softcap is inf, but must be more than 0 and finite"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change: dict[str, Any], says: str) -> None:
    (hidden, weight, _), targets = problem(5)
    with pytest.raises(ConfigError, match=says) as error:
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("target", [VOCAB, -1])
def test_a_target_outside_of_the_vocabulary_raises(target: int) -> None:
    """Its value is told, and those that there are."""
    inputs, targets = problem(5)
    targets[2] = target
    with pytest.raises(ConfigError, match=f"a target is {target}, but there are {VOCAB} classes, 0 to {VOCAB - 1}"):
        chunked(*inputs, targets)


class Head(nn.Module):
    """A small language model whose root reads the head's, or the embedding's, weight."""

    def __init__(self, tied: bool, reduction: str, ours: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.reduction, self.loss = reduction, chunked if ours else plain

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.embedding(tokens)))
        return self.loss(hidden, self.head.weight, None, targets, reduction=self.reduction).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize(("tied", "reduction"), [(False, "mean"), (True, "mean"), (False, "none")])
def test_it_trains_alike_under_a_layout(ranks: Ranks, layout: str, tied: bool, reduction: str) -> None:
    """Also where the weight is of another unit, and gone until it is read."""
    draw = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(VOCAB, (4, 6), generator=draw) for _ in range(2)) for _ in range(2)]
    build = partial(Head, tied, reduction, True)
    units = ["middle"] if tied else ["middle", "head"]
    options: dict[str, Any] = {"steps": 6, "accumulate": 2, "parameter_tol": 2e-6, "units": units, "ranks": ranks}
    ours = same_training(build, batches, **grouped(layout=layout, **options), world_size=2)
    theirs = same_training(
        partial(Head, tied, reduction, False), batches, **grouped(layout=layout, **options), world_size=2
    )
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.losses[-1] < ours.losses[0] and math.isfinite(ours.losses[-1])


def _scaled() -> tuple[float, float]:
    """The norm of all gradients under a loss scale, ours and plain."""
    norms = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = Head(False, "mean", ours)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        engine = sf.Engine(
            model, optimizer=optimizer, layout="zero2", precision="fp16", loss_scale=2.0**10, clip_norm=1.0
        )
        tokens = torch.arange(12).view(2, 6)
        engine.backward(engine(tokens, tokens))
        report = engine.step()
        norms.append(float(report.grad_norm or 0))
        engine.close()
    return norms[0], norms[1]


def test_a_loss_scale_is_taken_out_again(ranks: Ranks) -> None:
    for ours, reference in ranks.run(_scaled, world_size=2):
        assert ours == pytest.approx(reference, rel=5e-3) and ours > 0


def _heads_of_their_own() -> list[tuple[float, float]]:
    """The recipe's loss beside that of its logits, with an fp32 head, and under autocast."""
    losses = []
    for precision in ({"head": "fp32", "*": "bf16"}, "bf16-autocast"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(d_model=32, layers=1, heads=2, context=16))
        engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), layout="zero3", precision=precision)
        tokens = torch.arange(32).view(2, 16)
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            after = engine(tokens, tokens).item()
            logits = engine(tokens).float()
        losses.append((after, F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).item()))
        assert after < loss.item()
        engine.close()
    return losses


def test_the_recipe_takes_heads_of_their_own_precision(ranks: Ranks) -> None:
    for losses in ranks.run(_heads_of_their_own, world_size=2):
        for loss, reference in losses:
            assert loss == pytest.approx(reference, rel=1e-5)
