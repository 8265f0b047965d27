"""``deepspeed.moe``: experts shared out over ranks, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold.compat.deepspeed as deepspeed
from shardfold.compat.deepspeed.moe.layer import MoE
from shardfold.compat.deepspeed.moe.sharded_moe import TopKGate
from shardfold.compat.deepspeed.moe.utils import (
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.testing import Ranks


def model_of(ep_size: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {"num_experts": 4, "k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False, **options}
    expert = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.moe = nn.Linear(8, 8), MoE(8, expert, ep_size=ep_size, **given)

        def forward(self, x: Tensor) -> Tensor:
            out, loss, counts = self.moe(self.inside(x))
            assert counts.device.type == "cpu" and len(counts) == 4
            return out.square().mean() + 0.0 * loss

    net = Net().double()
    for number in range(4):  # experts begin alike
        net.moe.deepspeed_moe.experts.get_parameter("2__bias").data[number] += number
    return net


def trained(stage: int, ep_size: int, options: dict[str, Any]) -> dict[str, list[Any]]:
    model = model_of(ep_size, **options)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}
    )
    assert [(group["name"], group.get("moe", False)) for group in groups] == [
        ("all", False), (f"ep_size_{ep_size}", True),
    ]  # fmt: skip
    assert is_moe_param_group(groups[1]) and all(map(is_moe_param, groups[1]["params"]))
    assert has_moe_layers(model) == (True, 4)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.1},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    ranks, rank = engine.world_size, engine.global_rank
    losses = []
    for _ in range(3):
        x = torch.randn(4, 8, generator=generator, dtype=torch.float64).chunk(ranks)[rank]
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(engine._core.mean(loss.item()))
    shape = list(model.moe.deepspeed_moe.experts.get_parameter("0__weight").shape)
    engine.destroy()
    return {"losses": losses, "shape": shape}


@pytest.mark.parametrize("options", [{}, {"k": 1, "use_residual": True}])
def test_experts_over_ranks_train_as_on_one(ranks: Ranks, options: dict[str, Any]) -> None:
    """The losses of two ranks that share experts out, at stage 2, are those of one rank at stage 0."""
    one = ranks.run(trained, 0, 1, options, world_size=1)[0]
    for two in ranks.run(trained, 2, 2, options, world_size=2):
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-12)
        assert (one["shape"], two["shape"]) == ([4, 12, 8], [2, 12, 8])


def test_the_gate_keeps_what_has_room() -> None:
    """Of one expert by draw, of two first choices first, of more by weight; weights of what is kept sum up to 1; what
    is not used is nobody's."""
    torch.manual_seed(0)
    x = torch.randn(12, 8)
    for k in (1, 2, 3):
        gate = TopKGate(8, 4, k=k, capacity_factor=0.5, min_capacity=1, top2_2nd_expert_sampling=False)
        loss, kept, weights, counts = gate(x)
        most = -(-k * 12 // 8)
        assert torch.bincount(kept[kept >= 0], minlength=4).max() <= most and int(counts.sum()) == 12 * k
        if k > 1:
            assert torch.allclose(weights.sum(1)[(kept >= 0).any(1)], torch.ones(()))
        assert 0.5 < loss.item() < 4
    used = torch.arange(12) < 5
    _, kept, _, counts = TopKGate(8, 4, drop_tokens=False)(x, used)
    assert int(counts.sum()) == 5 and (kept[5:] == -1).all() and (kept[:5] >= 0).all()


def test_noise_is_of_training_only() -> None:
    x = torch.randn(64, 8)
    for policy in ("Jitter", "RSample"):
        gate = TopKGate(8, 4, noisy_gate_policy=policy, drop_tokens=False)
        assert torch.equal(gate.eval()(x)[1], gate(x)[1])
        gate.train()
        assert not torch.equal(gate(x)[2], gate(x)[2]) or policy == "Jitter"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 3, "ep_size": 2}, "do not divide"),
        ({"use_tutel": True}, "use_tutel=True"),
        ({"noisy_gate_policy": "jitter"}, "'Jitter'"),
        ({"num_experts": 2, "k": 3}, "1 to 2 of them"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongArgument, match=words):
        MoE(8, nn.Linear(8, 8), **options)
