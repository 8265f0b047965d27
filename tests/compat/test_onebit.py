"""DeepSpeed's 1-bit optimizers in a config: ranks send gradients up to freeze_step, and signs from there on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfold.compat import deepspeed
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_hyper import hyper
from shardfold.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from shardfold.testing import Ranks

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "OneBitAdam": (OneBitAdam, {"freeze_step": 2}),
    "OneBitLamb": (OneBitLamb, {"freeze_step": 2, "max_coeff": 5.0, "factor_min": 0.6, "coeff_beta": 0.8}),
    "ZeroOneAdam": (ZeroOneAdam, {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 2}),
}


def _train(stage: int, kind: str) -> list[Any]:
    torch.manual_seed(0)
    made, own = KINDS[kind]
    params = {"lr": 1e-2, **own, "cuda_aware": False, "comm_backend_name": "nccl"}
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
    core = engine._core
    assert type(core.optimizer) is made and core.optimizer.freeze_step == 2
    if made is OneBitLamb:
        group = core.optimizer.param_groups[0]
        assert group["trust_range"] == (0.01, 5.0) and group["factor_range"] == (0.6, 4.0)
        assert group["coeff_beta"] == 0.8
    sent: list[list[str]] = []
    for step in range(5):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + core.rank))
        engine.backward((engine(x) - x).square().mean())
        engine.step()
        sent.append(sorted(row.op for row in core.traffic().rows if row.sent))
    weights = core.state_dict()["weight"].tolist()
    engine.destroy()
    return [sent, weights]


@pytest.mark.parametrize("kind", KINDS)
def test_one_bit_optimizers_in_a_config_send_signs(ranks: Ranks, kind: str) -> None:
    """Without stages between all ranks, as DeepSpeed does; those of 0/1 Adam go their own way in the last step."""
    by_rank = ranks.run(_train, 0, kind, world_size=2)
    last = [["PULL", "PUSH"]] * 2 + ([["PULL", "PUSH"]] if kind != "ZeroOneAdam" else [[]])
    (sent, weights), (sent_too, others) = by_rank
    assert sent == sent_too == [["ALL_REDUCE"]] * 2 + last
    assert (weights == others) == (kind != "ZeroOneAdam")


@pytest.mark.parametrize(
    ("kind", "key", "nearest"),
    [
        ("OneBitLamb", "factor_treshold", "factor_threshold"),
        ("ZeroOneAdam", "local_step_clip", "local_step_clipper"),
        ("ZeroOneAdam", "freeze_step", "var_freeze_step"),
    ],
)
def test_unknown_arguments_are_refused_with_the_nearest(kind: str, key: str, nearest: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=rf"{key} is not an argument of {kind}.*{nearest}"):
        hyper("optimizer", kind, {key: 1})
