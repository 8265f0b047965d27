"""A base that becomes codes as it is loaded: no rank ever holds more of it than its codes and one unit."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardfold as sf
from shardfold.errors import ModelError
from shardfold.plan.blocks import AT_ONCE
from shardfold.plan.placement import Box
from shardfold.sharding import materialize
from shardfold.sharding.materialize import Weights
from shardfold.testing import run_ranks

WIDTH, UNITS, EACH = 2048, 6, 2
SMALL = 12 * 2**20
"""Bytes of code that runs for the first time, and of holes between small blocks."""


class Frozen(nn.Module):
    """Frozen matrices, and one that is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(EACH)).requires_grad_(False)
        self.trained = nn.Linear(width, 1)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _engine(folder: Path, width: int, units: int, layout: str, precision: str) -> sf.Engine:
    with sf.meta_init():
        model = nn.Sequential(*[Frozen(width) for _ in range(units)])
    weights = folder / f"{width}.safetensors"
    init = sf.Init(weights=weights, units=[Frozen])
    return sf.Engine(
        model, optimizer=partial(torch.optim.AdamW, lr=1e-3), layout=layout, precision=precision, init=init
    )


def _peak(folder: Path, layout: str, precision: str) -> tuple[int, int]:
    """By how much making an engine let this process grow, and by how much it may."""
    _engine(folder, 64, 2, layout, precision).close()  # what runs for the first time
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at what is resident now
    before = _resident("VmRSS")
    engine = _engine(folder, WIDTH, UNITS, layout, precision)
    grown, held = _resident("VmHWM") - before, engine.memory().held
    matrix = 4 * WIDTH**2
    encoding = 6 * 4 * AT_ONCE + matrix // 7  # what is made of some blocks in fp32, and the codes of a matrix
    engine.close()
    return grown, held + EACH * matrix + materialize.AT_ONCE + encoding + SMALL


def test_a_part_of_a_large_matrix_is_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part, in each of the ways that a matrix may be cut, is that of the matrix; another shape is refused."""
    monkeypatch.setattr(materialize, "AT_ONCE", 64)
    values = torch.arange(12 * 8, dtype=torch.float32).view(12, 8)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    layer = nn.Linear(8, 12, bias=False)
    weights = Weights(tmp_path / "model.safetensors", layer)
    for box in (None, Box((3, 0), (7, 8)), Box((4, 2), (8, 5)), Box((0, 1, 0), (3, 2, 8), (0, 3, 4))):
        part = values if box is None else materialize._box_of(values, box)
        into = torch.empty_like(part)
        weights.fill("weight", into, (12, 8), box)
        assert torch.equal(into, part)
    with pytest.raises(ModelError, match=r"weights give 'weight' the shape \(12, 8\), but the model's is \(12, 4\)"):
        weights.fill("weight", torch.empty(12, 4), (12, 4), None)


class Walked(nn.Sequential):
    """Counts how often all of its modules are walked through."""

    walks = 0

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self.walks += 1
        return super().named_modules(*args, **kwargs)


def test_a_model_of_many_units_is_not_walked_through_for_each() -> None:
    """Else thousands of units, made one after the other, take the square of their number."""

    def walks(units: int) -> int:
        with sf.meta_init():
            model = Walked(*[Frozen(8) for _ in range(units)])
        sf.Engine(model, layout="zero3", init=sf.Init(units=[Frozen])).close()
        return model.walks

    assert walks(9) == walks(3)


class Filled(nn.Module):
    """A matrix of one value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.weight = value, nn.Parameter(torch.empty(4, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.value)


def test_a_tied_parameter_has_the_values_of_the_last_module_that_makes_them() -> None:
    """As in a model that is made with memory, whose modules are initialized one after the other."""
    with sf.meta_init():
        model = nn.Sequential(Filled(1.0), Filled(2.0))
        model[0].weight = model[1].weight
    engine = sf.Engine(model, layout="ddp")
    assert torch.equal(engine.state_dict()["0.weight"], torch.full((4, 4), 2.0))
    engine.close()


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="the largest resident set is asked of Linux")
@pytest.mark.parametrize(
    ("layout", "precision", "count"),
    [
        ("zero3+nf4/64", "fp32", 1),
        ("ddp+nf4/64+double", "bf16", 1),
        ("zero3+int8/64", "bf16", 2),
        ("infinity+nf4/64", "fp32", 2),
    ],
)
def test_a_base_is_loaded_within_its_codes_and_one_unit(
    tmp_path: Path, layout: str, precision: str, count: int
) -> None:
    """Of a file in fp32. A second unit, or a matrix beside the one in the unit, would be more than is left free; the
    whole in 16 bits, and the holes that units leave in the heap, are several times that."""
    for width, units in ((64, 2), (WIDTH, UNITS)):
        model = nn.Sequential(*[Frozen(width) for _ in range(units)])
        save_file(model.state_dict(), tmp_path / f"{width}.safetensors")
        del model
    for grown, most in run_ranks(_peak, count, tmp_path, layout, precision):
        assert grown <= most < UNITS * EACH * WIDTH**2 * 4
