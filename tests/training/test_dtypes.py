"""Several dtypes in one model: the main one follows the precision policy, the others stay what they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ModelError
from shardfold.testing import Ranks, same_training

pytestmark = pytest.mark.product

WIDTH = 16
LAYOUTS = list(sf.PRESETS)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAGRAD = partial(torch.optim.Adagrad, lr=1e-2)  # not one of the fused ones


def mesh_for(layout: str, world: int = 2) -> dict[str, int] | None:
    return {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world > 1 else None


class Block(nn.Module):
    """A narrow or wide part inside of a block: ``inner`` has a dtype of its own."""

    def __init__(self, dtype: torch.dtype, inner: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=inner)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=inner))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.inner(x.to(self.inner.weight.dtype)) * self.scale
        return x + self.down(torch.tanh(self.up(x))) + wide.to(x.dtype)


class Mixed(nn.Module):
    """Blocks, and a root, of ``dtype``, each with parameters of ``inner``."""

    def __init__(self, dtype: torch.dtype, inner: torch.dtype, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dtype, inner) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH, dtype=inner), nn.Linear(WIDTH, 3, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return F.cross_entropy(self.head(x), y)


class Quantized(nn.Module):
    """Frozen weights of one byte, with a scale for each row, and a trained part beside each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(QuantizedBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


class QuantizedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.bytes = nn.Parameter(torch.randint(0, 255, (WIDTH,), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.1))
        self.low = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (
            x
            + torch.tanh(x @ (self.codes.to(x.dtype) / 127 * self.scale).t() + self.bytes.to(x.dtype) * 1e-3)
            + self.low(x)
        )


def batches(steps: int = 6, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    made = [(torch.randn(16, WIDTH, generator=g), torch.randint(3, (16,), generator=g)) for _ in range(steps)]
    return [(x.to(dtype), y) for x, y in made]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", [ADAMW, SGD, ADAGRAD], ids=["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp64_parts_of_an_fp32_model_train_as_in_plain_pytorch(ranks: Ranks, layout: str, optimizer: Any) -> None:
    same_training(
        partial(Mixed, torch.float32, torch.float64), batches(), layout=layout, world_size=2, parallel=mesh_for(layout),
        optimizer=optimizer, steps=6, tol=1e-6, parameter_tol=2e-6, clip_norm=0.5, accumulate=2, ranks=ranks,
    )  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", [ADAMW, SGD, ADAGRAD], ids=["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_fp64_model_trains_in_fp64_under_every_policy(
    ranks: Ranks, layout: str, precision: str, optimizer: Any
) -> None:
    same_training(
        partial(Mixed, torch.float64, torch.float64), batches(dtype=torch.float64), layout=layout, world_size=2,
        parallel=mesh_for(layout), precision=precision, optimizer=optimizer, steps=6, tol=1e-12, parameter_tol=1e-12,
        clip_norm=0.5, ranks=ranks,
    )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bit_parts_of_an_fp32_model_stay_so_and_train_as_in_plain_pytorch(
    ranks: Ranks, layout: str, narrow: torch.dtype
) -> None:
    same_training(
        partial(Mixed, torch.float32, narrow), batches(), layout=layout, world_size=2, parallel=mesh_for(layout),
        optimizer=SGD, steps=6, tol=2e-3, parameter_tol=4e-2, ranks=ranks,
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_weights_of_one_byte_are_read_as_they_are(ranks: Ranks, layout: str) -> None:
    for precision, tol in (("fp32", 1e-6), ("bf16", 3e-2)):
        same_training(
            Quantized, batches(), layout=layout, world_size=2, parallel=mesh_for(layout), precision=precision,
            optimizer=SGD, steps=4, tol=tol, parameter_tol=tol, ranks=ranks,
        )  # fmt: skip


def test_the_main_dtype_is_the_one_that_most_elements_have() -> None:
    with_policy = {"fp32": {torch.float32}, "bf16": {torch.bfloat16, torch.float32}}
    for precision, expected in with_policy.items():
        model = Mixed(torch.bfloat16, torch.float32)  # as a checkpoint in bf16 with norms in fp32 is loaded
        engine = sf.Engine(model, optimizer=SGD, precision=precision)
        assert {p.dtype for p in model.parameters()} == expected
        assert all(s.master.dtype == torch.float32 for u in engine.units for s in u.trainable if s.master is not None)
        engine.close()


def test_bf16_parameters_are_updated_by_sgd_on_the_cpu() -> None:
    """torch's fused kernel leaves all but the last few elements of a 16-bit parameter as they are."""
    model = nn.Linear(64, 64)
    engine = sf.Engine(model, optimizer=SGD, precision="bf16-pure")
    before = engine.state_dict()["weight"]
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    assert torch.allclose(engine.state_dict()["weight"].float(), before.float() - 0.1, atol=2e-3)
    engine.close()


def test_a_dtype_that_can_not_be_split_is_named() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    with pytest.raises(ModelError, match=r"'phase' has dtype torch\.complex64, which cannot be split"):
        sf.Engine(Complex())


# -- what is held and sent ------------------------------------------------------------------------------------------


class Many(Mixed):
    """Frozen and trained parameters of four dtypes."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.float64, blocks=2)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.codes = nn.Parameter(torch.arange(100, dtype=torch.uint8), requires_grad=False)
        self.blocks[1].inner.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + self.narrow(x.to(self.narrow.weight.dtype)).to(x.dtype), y)


def _reports(layout: str, precision: str, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Many()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout, precision=precision, parallel=mesh_for(layout, world))
    for x, y in batches(2):
        engine.backward(engine(*(t.chunk(world)[engine.rank] for t in (x, y))))
        engine.step()
    state = engine.state_dict()
    main = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}[precision]
    wrong = []
    for name, p in model.named_parameters():
        policy = dtypes[name] == torch.float32
        if p.dtype != (main if policy else dtypes[name]):
            wrong.append(f"{name} is {p.dtype}")
        if not policy and state[name].dtype != dtypes[name]:
            wrong.append(f"{name} is saved as {state[name].dtype}")
    for unit in engine.units:
        for s in unit.trainable:
            if s.spec.own and {s.master.dtype, s.grads.dtype, s.flat.dtype} != {s.dtype}:  # type: ignore[union-attr]
                wrong.append(f"{unit.name} has states of other dtypes than {s.dtype}")
    other = Many()
    other.load_state_dict(state)
    wrong += [n for n, v in other.state_dict().items() if not torch.equal(v, state[n].to(v.dtype))]
    said = {"memory": engine.memory(), "traffic": engine.traffic(), "wrong": wrong, "text": engine.explain()}
    engine.close()
    return said


@pytest.mark.sampled(9)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_and_traffic_of_several_dtypes_are_what_table_and_program_say(
    ranks: Ranks, layout: str, precision: str, world: int
) -> None:
    for said in ranks.run(_reports, layout, precision, world, world_size=world):
        assert said["wrong"] == []
        for row in said["memory"].rows:
            assert row.held == pytest.approx(row.table + row.padding, abs=1), (row, said["memory"])
        assert said["memory"].transient == 0
        assert bool(said["traffic"].rows) == (world > 1)
        assert all(row.sent == row.program and row.calls for row in said["traffic"].rows), said["traffic"]
        assert "fp64 own" in said["text"] and "uint8 own frozen" in said["text"]
