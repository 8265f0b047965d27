"""The recipe's model: its shapes, its initialization module by module, and that it is causal and learns."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfold.errors import ConfigError
from shardfold.tools.recipes.gpt import GPT, SIZES, GPTConfig, generate, rotary_tables, rotate

SMALL = GPTConfig(d_model=32, layers=2, heads=2, context=16)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def tokens(batch: int = 2, time: int = 16) -> torch.Tensor:
    return torch.randint(256, (batch, time), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
def test_the_number_of_parameters_is_known_beforehand(tied: bool):
    config = GPTConfig(d_model=32, layers=3, heads=4, context=8, tied=tied)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.num_parameters


def test_sizes_grow_to_a_billion():
    numbers = [GPTConfig.named(size).num_parameters for size in SIZES]
    assert numbers == sorted(numbers)
    assert 0.9e9 < numbers[-1] < 1.1e9


def test_overrides_derive_the_feed_forward_width_anew():
    config = GPTConfig.named("demo", d_model=96)
    assert (config.d_model, config.d_ff) == (96, 256)
    assert GPTConfig.named("demo", d_ff=100).d_ff == 100


@pytest.mark.parametrize(
    ("size", "overrides", "says"),
    [
        ("dmeo", {}, "Did you mean 'demo'"),
        ("demo", {"layer": 3}, "Did you mean 'layers'"),
        ("demo", {"heads": 5}, "does not divide into 5 heads"),
        ("demo", {"d_model": 12, "heads": 4}, "even number"),
        ("demo", {"layers": 0}, "layers is 0"),
    ],
)
def test_a_bad_shape_is_one_sentence(size: str, overrides: dict[str, int], says: str):
    with pytest.raises(ConfigError, match=says) as error:
        GPTConfig.named(size, **overrides)
    assert "\n" not in str(error.value)


def test_every_owner_of_parameters_resets_all_of_them(model: GPT):
    """Materializing module by module leaves nothing unset and gives the widths that the plain constructor gives."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            width = 0.02 / math.sqrt(2 * SMALL.layers) if residual else 0.02
            assert parameter.std().item() == pytest.approx(width, rel=0.1), name


def test_rotary_tables_are_no_part_of_a_checkpoint(model: GPT):
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.cos.dtype == torch.float32


def test_rotary_products_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = (table.double() for table in rotary_tables(32, 8))

    def product(m: int, n: int) -> float:
        return (rotate(q, cos[m : m + 1], sin[m : m + 1]) * rotate(k, cos[n : n + 1], sin[n : n + 1])).sum().item()

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)
    assert product(0, 0) == pytest.approx((q * k).sum().item())


def test_the_model_is_causal(model: GPT):
    """Another byte changes the logits from its own place on, and none before."""
    first = tokens()
    second = first.clone()
    second[:, 9] = (second[:, 9] + 1) % 256
    difference = (model(first) - model(second)).abs().amax(dim=(0, 2))
    assert difference[:9].max() < 1e-6
    assert difference[9] > 1e-4


def test_the_loss_is_the_mean_cross_entropy(model: GPT):
    given, targets = tokens(), tokens().flip(0)
    logits = model(given)
    assert logits.shape == (2, 16, 256)
    torch.testing.assert_close(model(given, targets), F.cross_entropy(logits.view(-1, 256), targets.view(-1)))
    assert model(given, targets).item() == pytest.approx(math.log(256), abs=0.1)


def test_the_compute_dtype_is_that_of_the_parameters(model: GPT):
    nn.Module.to(model, torch.bfloat16)
    model.cos, model.sin = rotary_tables(SMALL.context, SMALL.head_dim)
    assert model(tokens()).dtype == torch.bfloat16
    assert model(tokens(), tokens()).dtype == torch.float32


def test_tied_models_share_one_weight():
    model = GPT(GPTConfig(d_model=32, layers=1, heads=2, context=8, tied=True))
    assert model.head.weight is model.embedding.weight


def test_more_than_the_context_is_refused(model: GPT):
    with pytest.raises(ConfigError, match="17 tokens do not fit a context of 16"):
        model(tokens(time=17))


def test_the_model_learns_a_batch_by_heart(model: GPT):
    given = tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(given[:, :-1], given[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.0


def test_generation_is_a_function_of_its_seed(model: GPT):
    def text(seed: int, temperature: float = 1.0) -> bytes:
        return generate(model, b"def ", 24, temperature=temperature, seed=seed)

    assert len(text(0)) == 24  # beyond the context
    assert text(0) == text(0) != text(1)
    assert text(0, temperature=0) == text(1, temperature=0)
    assert generate(model, b"", 0) == b""
    with pytest.raises(ConfigError, match="temperature"):
        text(0, temperature=-1)
