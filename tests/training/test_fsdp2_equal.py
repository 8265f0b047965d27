"""The policies that docs/precision.md sets beside FSDP2's train as FSDP2 does."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.support import models

STEPS = 20
ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1, fused=True)
NARROW_WIRE = sf.Precision(compute="bf16", reduce="bf16")
NARROW_SUMS = sf.Precision(compute="bf16", reduce="bf16", grads="bf16")


def share(batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch]


class Fine(models.Small):
    """Its loss is taken in fp32: in bf16 it would have three digits."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(tokens)).float().flatten(0, 1), targets.flatten())


def made() -> nn.Module:
    torch.manual_seed(0)
    return Fine()


def norm_of(grads: Iterable[Tensor]) -> float:
    """Of all gradients, of which this rank has these parts; FSDP2's own is rounded to the gradients' dtype."""
    total = sum((grad.double().square().sum() for grad in grads), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(total)
    return total.sqrt().item()


def of_fsdp2(policy: dict[str, torch.dtype], model_dtype: torch.dtype) -> tuple[list[float], list[float]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = made().to(model_dtype)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    optimizer = ADAMW(model.parameters())
    losses, norms = [], []
    for batch in models.batches(STEPS, rows=8):
        loss = model(*share(batch))
        loss.backward()
        norms.append(norm_of(p.grad.to_local() for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def of_ours(precision: Any) -> tuple[list[float], list[float]]:
    engine = sf.Engine(made(), optimizer=ADAMW, layout="fsdp2", precision=precision, clip_norm=1e9)
    losses, norms = [], []
    for batch in models.batches(STEPS, rows=8):
        loss = engine(*share(batch))
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))
        losses.append(loss.item())
    engine.close()
    return losses, norms


def compare(precision: Any, policy: dict[str, torch.dtype], dtype: torch.dtype) -> tuple[float, float, int]:
    theirs, ours = of_fsdp2(policy, dtype), of_ours(precision)
    apart = [max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for pair in zip(ours, theirs, strict=True)]
    same = next((i for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)) if a != b), STEPS)
    return apart[0], apart[1], same


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("precision", "policy", "dtype"),
    [
        ("bf16", {"param_dtype": BF16, "reduce_dtype": FP32}, FP32),
        ("bf16-pure", {}, BF16),
        (NARROW_SUMS, {"param_dtype": BF16, "reduce_dtype": BF16}, FP32),
    ],
    ids=["fp32 on the wire", "pure", "bf16 on the wire, summed in it"],
)
def test_every_loss_is_fsdp2s_to_the_bit(
    ranks: Ranks, precision: Any, policy: dict[str, torch.dtype], dtype: torch.dtype
) -> None:
    for loss, norm, same in ranks.run(compare, precision, policy, dtype, world_size=2):
        assert loss == 0.0 and same == STEPS
        assert norm < 1e-6  # both of the same numbers, added up in another order


@pytest.mark.soak
def test_what_bf16_brings_is_summed_in_fp32_where_gradients_are_fp32(ranks: Ranks) -> None:
    """FSDP2 sums over Gloo in the dtype on the wire and casts the sum, so that the digits of the sum differ."""
    policy = {"param_dtype": BF16, "reduce_dtype": BF16}
    for loss, norm, same in ranks.run(compare, NARROW_WIRE, policy, FP32, world_size=2):
        assert 0 < loss < 1e-3 and norm < 1e-3 and same >= 1
