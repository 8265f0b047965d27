"""What the tests of DeepSpeed's face train, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.runtime.activation_checkpointing import checkpointing

STEPS, RANKS, ROWS = 4, 2, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(model: Any, x: Tensor) -> Tensor:
    """Of a model, or of the engine of one; inputs are in the model's dtype, as nothing casts them."""
    dtype = next(getattr(model, "module", model).parameters()).dtype
    return model(x.to(dtype)).float().square().mean()


def config(stage: int = 2, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": accumulate, "gradient_clipping": 0.5,
        "zero_optimization": zero, "steps_per_print": None, **more,
    }  # fmt: skip


def adamw(**more: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, **more}}


def reference(accumulate: int, dtype: torch.dtype, clip: float = 0.5) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses of rank 0, norms and weights of the same training in plain PyTorch: fp32 masters, copies in ``dtype``."""
    master = build()
    optimizer = AdamW(master.parameters(), lr=0.01, weight_decay=0.1)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        model = build().to(dtype)
        with torch.no_grad():
            for low, high in zip(model.parameters(), master.parameters(), strict=True):
                low.copy_(high)
        for high in master.parameters():
            high.grad = torch.zeros_like(high)
        for micro in range(accumulate):
            for rank in range(RANKS):
                loss = loss_of(model, batch(step, micro, rank).to(dtype))
                if rank == 0:
                    losses.append(loss.item())
                for high, grad in zip(
                    master.parameters(), torch.autograd.grad(loss / accumulate, list(model.parameters())), strict=True
                ):
                    high.grad += grad.float() / RANKS  # type: ignore[operator]
        norms.append(float(nn.utils.clip_grad_norm_(master.parameters(), clip)))
        optimizer.step()
    return losses, norms, [p.detach() for p in master.parameters()]


def near(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), rtol=2e-5, atol=2e-6)


def weights(engine: DeepSpeedEngine) -> list[Tensor]:
    return list(engine._core.state_dict().values())


@contextmanager
def keeping_checkpointing() -> Iterator[None]:
    """What is configured inside is not for the tests behind it: as in DeepSpeed, no call takes it back."""
    state = checkpointing._State
    before = state.settings, state.configured
    try:
        yield
    finally:
        state.settings, state.configured = before
        checkpointing.get_cuda_rng_tracker().reset()
