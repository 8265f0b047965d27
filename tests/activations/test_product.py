"""Losses and gradients are, bit for bit, those with kept activations: for every mode under every layout in every
precision, with dropout and without, on architectures of several kinds."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.activations.modes import MODES
from shardfold.testing import Ranks
from shardfold.tools.recipes.gpt import GPT, Block
from shardfold.tools.recipes.train_config import GPTConfig
from tests.support import zoo
from tests.support.options import grouped

SGD = partial(torch.optim.SGD, lr=0.1)
CHANGED = [mode for mode in MODES if mode not in ("keep", "int8")]
"""Those that change nothing; ``int8`` rounds (see test_encoded.py)."""
ARCHITECTURES = ["gpt", "gpt2_tied", "llama", "bert", "t5_tied", "vit", "mixtral"]
PRECISIONS = ["fp32", "bf16", "fp16", "bf16-autocast", "fp16-autocast", "bf16-pure"]
NODES = {"hsdp": {"inter": 2, "intra": 2}, "hpz": {"inter": 2, "intra": 2}}  # others: two ranks in one node


class Setting(NamedTuple):
    layout: str
    precision: str
    architecture: str
    dropout: bool
    mode: str


EVERY = [
    Setting(*values) for values in itertools.product(sf.PRESETS, PRECISIONS, ARCHITECTURES, (False, True), CHANGED)
]


def covering(settings: Sequence[Setting]) -> list[Setting]:
    """Some of them, in which every two values of two factors occur together: each first one with the most new pairs."""
    left = {setting: pairs_of(setting) for setting in settings}
    chosen: list[Setting] = []
    while left:
        best = max(left, key=lambda setting: len(left[setting]))
        new = left[best]
        chosen.append(best)
        left = {setting: rest for setting, pairs in left.items() if (rest := pairs - new)}
    return chosen


def pairs_of(setting: Setting) -> set[Any]:
    return set(itertools.combinations(enumerate(setting), 2))


# -- models and their training, of other tests of activations too


def as_mode(mode: str) -> sf.Activations:
    """The mode, for the small tensors of tests."""
    return sf.Activations(mode=mode, smallest=0)


class Dropping(Block):
    """A block of the GPT with dropout."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return F.dropout(super().forward(x, cos, sin), 0.2, self.training)


def _gpt(dropout: bool) -> nn.Module:
    model = GPT(GPTConfig(vocab=61, d_model=32, layers=3, heads=2, context=8))
    for block in model.blocks:
        block.__class__ = Dropping if dropout else Block
    return model


def _of_zoo(name: str, dropout: bool) -> nn.Module:
    model = zoo.build(name)
    for module in model.modules() if dropout else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model


def job(name: str, dropout: bool) -> tuple[nn.Module, dict[str, Any], Callable[[Any], Tensor]]:
    """A model, a global batch and what makes the loss of an output."""
    torch.manual_seed(0)
    if name == "gpt":
        draw = torch.Generator().manual_seed(0)
        batch = {"tokens": zoo.tokens(draw), "targets": zoo.tokens(draw)}
        return _gpt(dropout), batch, lambda output: output
    batch = zoo.batches(name, 1)[0]
    return _of_zoo(name, dropout), batch, lambda output: zoo.loss(name, output, batch)


def train(model: nn.Module, batch: dict[str, Any], loss: Callable[[Any], Tensor], **options: Any) -> dict[str, Any]:
    """Losses, whole gradients and traffic of two steps."""
    engine = sf.Engine(copy.deepcopy(model), optimizer=SGD, **grouped(**options))
    part = {key: value.chunk(engine.world_size)[engine.rank] for key, value in batch.items()}
    found: dict[str, Any] = {}
    for step in range(2):
        torch.manual_seed(10 * step + engine.rank)
        before = torch.get_rng_state()
        value = loss(engine(**part))
        found[f"drew {step}"] = not torch.equal(before, torch.get_rng_state())
        engine.backward(value)
        found[f"loss {step}"] = value.detach()
        with engine.gathered(of="grads") as grads:
            found.update({f"gradient {step} of {key}": grad for key, grad in grads.items()})
        engine.step()
        found[f"random {step}"] = torch.rand(2)
    found["traffic"] = [(row.op, row.calls, row.sent) for row in engine.traffic().rows]
    found |= {f"buffer {key}": value.clone() for key, value in engine.module.named_buffers()}
    found["explained"] = engine.explain()
    assert engine.memory().transient == 0
    engine.close()
    return found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What is not the same to the bit."""
    assert expected.keys() == found.keys()
    return [key for key, value in expected.items() if key != "explained" and _bits(value) != _bits(found[key])]


def _bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()


def compare(settings: Sequence[Setting]) -> list[str]:
    """Where any of them differs from its like with kept activations, which is trained once for equals in a row."""
    wrong: list[str] = []
    for (layout, precision, name, dropout), equals in itertools.groupby(settings, lambda setting: setting[:4]):
        model, batch, loss = job(name, dropout)
        options: dict[str, Any] = {"layout": layout, "precision": precision, "mesh": NODES.get(layout)}
        if precision.startswith("fp16"):
            options["loss_scale"] = 256.0  # at which no gradient here overflows
        expected = train(model, batch, loss, **options)
        values = [value for key, value in expected.items() if key.startswith(("loss", "gradient"))]
        assert all(value.isfinite().all() for value in values if value is not None)
        assert not dropout or (expected["drew 0"] and expected["drew 1"])
        for setting in equals:
            found = train(model, batch, loss, **options, activations=as_mode(setting.mode))
            assert f"  {setting.mode}\n" in found["explained"], found["explained"]
            wrong += [f"{setting}: {key}" for key in differences(expected, found)]
    return wrong


def check(ranks: Ranks, settings: Sequence[Setting], timeout: float = 120.0) -> None:
    world = 4 if settings[0].layout in NODES else 2
    assert ranks.run(compare, settings, world_size=world, timeout=timeout) == [[]] * world


SOME = covering(EVERY)


def test_the_selection_has_every_pair_of_values() -> None:
    assert set().union(*map(pairs_of, SOME)) == set().union(*map(pairs_of, EVERY))
    assert len(SOME) < 0.03 * len(EVERY)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.soak if name in ("hsdp", "fsdp2") else ()) for name in sf.PRESETS]
)
def test_losses_gradients_and_traffic_are_those_of_kept_activations(ranks: Ranks, layout: str) -> None:
    check(ranks, [setting for setting in SOME if setting.layout == layout])


def test_what_is_recomputed_fills_an_empty_cache_as_in_forward(ranks: Ranks) -> None:
    """Attention with dropout sums in another order where keys and values come from no cache."""
    check(ranks, [Setting("ddp", "fp32", "gpt2_tied", True, mode) for mode in ("recompute", "select")])


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layout", ["zero3", "hpz"])
def test_every_two_of_the_rest_on_each_architecture(ranks: Ranks, layout: str, architecture: str) -> None:
    """Precision, dropout and mode."""
    some = [setting for setting in EVERY if (setting.layout, setting.architecture) == (layout, architecture)]
    assert len(some) == len(PRECISIONS) * 2 * len(CHANGED)
    check(ranks, covering(some), timeout=280.0)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(zoo.ZOO.keys() - {"albert_one_block"}))  # which is no unit but all root
def test_every_architecture_trains_the_same(ranks: Ranks, name: str) -> None:
    settings = [Setting("zero3", "fp32", name, False, mode) for mode in CHANGED]
    for wrong in ranks.run(compare, settings, world_size=2):
        # Reformer takes its seeds from the clock.
        assert not [key for key in wrong if name != "reformer" or ": random" not in key]
