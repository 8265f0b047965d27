"""DeepSpeed's OneBitAdam in a config: ranks send gradients up to freeze_step, and signs of momentum from there on."""

from __future__ import annotations

from typing import Any

import torch

from shardfold.compat import deepspeed
from shardfold.optim import OneBitAdam
from shardfold.testing import run_ranks


def _train(stage: int) -> list[Any]:
    torch.manual_seed(0)
    params = {"lr": 1e-2, "freeze_step": 2, "cuda_aware": False, "comm_backend_name": "nccl"}
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "OneBitAdam", "params": params},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
    core = engine._core
    assert isinstance(core.optimizer, OneBitAdam) and core.optimizer.freeze_step == 2
    sent: list[list[str]] = []
    for step in range(4):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + core.rank))
        engine.backward((engine(x) - x).square().mean())
        engine.step()
        sent.append(sorted(row.op for row in core.traffic().rows if row.sent))
    weights = core.state_dict()["weight"].tolist()
    engine.destroy()
    return [sent, weights]


def test_onebit_adam_in_a_config_sends_signs() -> None:
    """Without stages between all ranks, as DeepSpeed does."""
    (sent, weights), (_, others) = run_ranks(_train, 2, 0)
    assert sent == [["ALL_REDUCE"]] * 2 + [["PULL", "PUSH"]] * 2
    assert weights == others
