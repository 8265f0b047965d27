"""The compiled update equals torch's, is refused where it does not act, and is made when the engine is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.optim import fused
from shardfold.optim.compiled import compiled_adam, constants
from tests.support.options import grouped

#: Roundings of fp32 in one element's update that may fall otherwise, in another order of the same operations.
STEPS_OF_ROUNDING = 8 * 2.0**-24
CPU = torch.device("cpu")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "AdamW maximize": partial(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, maximize=True),
    "Adam with L2": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.05),
}


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    """What one test makes of ``torch.compile``, others do not find."""
    compiled_adam.cache_clear()
    yield
    compiled_adam.cache_clear()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same functions, run as they are; the list has the name of each that was to be compiled."""
    made: list[str] = []

    def as_it_is(function: Any, **options: Any) -> Any:
        made.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", as_it_is)
    return made


def _differences(name: str, gradient_dtype: torch.dtype, coefficient: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Differences of masters and moments from torch's class, each with what it may be, after each of four steps; the
    copies are what rounding gives of the masters."""
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(70_001, generator=draw)
    parameter = nn.Parameter(value.clone())
    optimizer = OPTIMIZERS[name]([parameter])
    group = optimizer.param_groups[0]
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    run = compiled_adam(decoupled, torch.float32, torch.float32, gradient_dtype, torch.bfloat16, CPU)
    states = [value.clone(), torch.zeros_like(value), torch.zeros_like(value)]
    copy = torch.empty(len(value), dtype=torch.bfloat16)
    for step in range(1, 5):
        gradient = torch.randn(len(value), generator=draw).to(gradient_dtype)
        parameter.grad = gradient.float() if coefficient is None else gradient.float() * coefficient
        optimizer.step()
        with torch.no_grad():
            factor = torch.ones(()) if coefficient is None else coefficient
            run(*states, gradient, copy, constants(group, decoupled, step, CPU), factor)
        state = optimizer.state[parameter]
        assert torch.equal(copy, states[0].bfloat16())
        for got, expected in zip(states, (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True):
            # A moment is a sum of two terms that may cancel; a parameter changes by the rate times about one.
            yield (got - expected).abs(), step * STEPS_OF_ROUNDING * (expected.abs() + parameter.grad.abs().max())


@pytest.mark.parametrize("coefficient", [None, torch.tensor(0.37)], ids=["", "clipped"])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_pass_is_adam(
    uncompiled: list[str], name: str, gradient_dtype: torch.dtype, coefficient: Tensor | None
) -> None:
    """Masters and moments follow ``torch.optim``'s classes up to the rounding of a few operations in fp32."""
    for difference, allowed in _differences(name, gradient_dtype, coefficient):
        assert (difference <= allowed).all()
    assert uncompiled == ["_adamw" if name.startswith("AdamW") else "_adam"]


@pytest.mark.soak
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_compiled_pass_is_adam(name: str) -> None:
    """The same, of what a compiler makes of it."""
    for difference, allowed in _differences(name, torch.bfloat16, torch.tensor(0.37)):
        assert (difference <= allowed).all()


@pytest.mark.soak
def test_the_compiled_pass_is_the_same_wherever_it_is_cut() -> None:
    """Each element is computed from its own values alone: also at the end of a vector, and alone."""
    run = compiled_adam(True, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, CPU)
    draw = torch.Generator().manual_seed(0)
    value, gradient = torch.randn(10_007, generator=draw), torch.randn(10_007, generator=draw).bfloat16()
    given = constants(
        {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8, "maximize": False}, True, 1, CPU
    )
    results: list[list[Tensor]] = []
    for cuts in ([0, 10_007], [0, 1, 2, 19, 64, 4999, 10_006, 10_007]):
        states = [value.clone(), torch.zeros_like(value), torch.zeros_like(value), gradient, value.bfloat16()]
        with torch.no_grad():
            for a, b in pairwise(cuts):
                run(*(each[a:b] for each in states), given, torch.ones(()))
        results.append(states)
    assert not [a for a, b in zip(*results, strict=True) if not torch.equal(a, b)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(37, 101), nn.Tanh(), nn.Linear(101, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _engine(
    optimizer: Any = OPTIMIZERS["AdamW"], *, block: int = 0, compiled: bool = True, **options: Any
) -> sf.Engine:
    torch.manual_seed(0)
    overlap = sf.Overlap(block=block, compiled_update=compiled)
    return sf.Engine(Model(), optimizer=optimizer, overlap=overlap, **grouped(**{"precision": "bf16", **options}))


def _trained(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine = _engine(**options)
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(4):
        loss = engine(torch.randn(8, 37, generator=draw))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return losses, state


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize("name", ["AdamW", "Adam with L2"])
def test_an_engine_trains_with_it_as_without(
    uncompiled: list[str], monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    """Masters after four clipped steps are those of blocks up to the rounding of fp32, on 1 and 3 threads bit for bit
    the same; one pass is compiled for all units, when the engine is made."""
    monkeypatch.setattr(fused, "CPU_BLOCK", 256)
    found: list[dict[str, Tensor]] = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        found.append(_trained(optimizer=OPTIMIZERS[name], layout=layout, clip_norm=0.1)[1])
    assert len(uncompiled) == 1
    expected = _trained(optimizer=OPTIMIZERS[name], layout=layout, clip_norm=0.1, compiled=False)[1]
    assert len(uncompiled) == 1
    for each, value in expected.items():
        assert torch.equal(found[0][each], found[1][each])
        # Gradients of a later step are of bf16 parameters, of which a few fall to the other side.
        torch.testing.assert_close(found[0][each], value, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"precision": "fp32"}, "here nothing is cast"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "not for SGD"),
        ({"optimizer": partial(torch.optim.AdamW, amsgrad=True)}, "without amsgrad"),
    ],
)
def test_it_is_refused_where_it_does_not_act(uncompiled: list[str], options: dict[str, Any], why: str) -> None:
    """One sentence when the engine is made, and nothing is compiled."""
    with pytest.raises(ConfigError, match=why):
        _engine(**options)
    assert uncompiled == []


def test_the_program_says_that_it_is_one_pass(uncompiled: list[str]) -> None:
    """Beside each update, and nowhere without it."""
    for compiled in (True, False):
        engine = _engine(compiled=compiled)
        lines = [line for line in engine.explain().splitlines() if line.strip().startswith("UPDATE ")]
        engine.close()
        assert lines and all(("in one pass with the casts" in line) == compiled for line in lines)
    assert uncompiled == ["_adamw"]


def test_what_a_compiler_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, the engine is refused with what to do."""

    def fails(*args: Any, **options: Any) -> Any:
        def made(*tensors: Tensor) -> None:
            raise RuntimeError("No working C++ compiler found\nand so on")

        return made

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ConfigError, match=r"No working C\+\+ compiler found\): install a C\+\+ compiler"):
        _engine()


def test_code_is_not_shared_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps what it compiled by the code object, and does not look at dtypes again here."""
    codes: list[Any] = []

    def noted(function: Any, **options: Any) -> Any:
        codes.append(function.__code__)
        return function

    monkeypatch.setattr(torch, "compile", noted)
    compiled_adam(True, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, CPU)
    compiled_adam(True, torch.float32, torch.float32, torch.float32, torch.bfloat16, CPU)
    assert len({id(code) for code in codes}) == 2
