"""``Precision(inputs="own")``: the model gets what it is given. DeepSpeed casts under ``fp16.auto_cast`` only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.compat import deepspeed
from shardfold.errors import LayoutError
from shardfold.plan.layout import Precision
from shardfold.testing import Ranks

TIME = 998.3897  # 1000 in bf16, 998.5 in fp16


class Timed(nn.Module):
    """Code of its own casts what its layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.time = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        t = options["t"]
        self.seen.append(t)
        angles = (t * torch.arange(1, 5, device=t.device)).sin()
        return self.body(x.to(self.body.weight.dtype)) + self.time(angles.to(self.time.weight.dtype))


def seen(precision: Any) -> tuple[torch.dtype, float]:
    engine = sf.Engine(Timed(), optimizer=torch.optim.SGD, precision=precision)
    assert engine(torch.ones(2, 4), {"t": torch.tensor(TIME)}).dtype == torch.float32
    (found,) = engine.module.seen
    engine.close()
    return found.dtype, found.item()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_inputs_are_cast_unless_they_are_to_keep_their_dtype(name: str) -> None:
    narrow = torch.bfloat16 if name == "bf16" else torch.float16
    assert seen(name) == (narrow, torch.tensor(TIME, dtype=narrow).item())
    own = Precision(compute=name, inputs="own")
    assert seen(own) == (torch.float32, torch.tensor(TIME).item())


class Parted(Timed):
    """No cast of its own: rules give each layer what it reads."""

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        self.seen.append(options["t"])
        return self.body(x) + self.time((options["t"] * torch.arange(1, 5)).sin())


def test_with_rules_layers_still_read_their_own_dtype() -> None:
    own = Precision(compute="bf16", inputs="own")
    engine = sf.Engine(Parted(), optimizer=torch.optim.SGD, precision={"time": "fp32", "*": own})
    engine(torch.ones(2, 4), {"t": torch.tensor(TIME)})
    assert torch.equal(engine.module.seen[0], torch.tensor(TIME))
    engine.close()


def of_a_pipeline() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Timed(), nn.Linear(4, 1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.second(self.first(x, {"t": t}).to(self.second.weight.dtype))

    engine = sf.Engine(
        Stage(),
        optimizer=torch.optim.SGD,
        precision=Precision(compute="bf16", inputs="own"),
        parallel=sf.Parallel(mesh={"pipeline": 2}, stages=["second"]),
    )
    engine.train_batch(((torch.ones(2, 4), torch.tensor(TIME)), torch.zeros(2, 1)), lambda m, b: m(*b[0]).sum())
    engine.step()
    if engine.rank == 0:  # which has the first stage
        assert torch.equal(engine.module.first.seen[-1], torch.tensor(TIME))
    engine.close()


def test_stages_get_what_they_are_given(ranks: Ranks) -> None:
    ranks.run(of_a_pipeline, world_size=2)


def test_what_inputs_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(LayoutError, match=r"Precision.inputs is 'fp32': it is 'compute', or 'own' for what"):
        Precision(inputs="fp32")
    rules = {"body": "bf16", "*": Precision(compute="bf16", inputs="own")}
    with pytest.raises(LayoutError, match=r"the rules of precision= differ in inputs \('compute', 'own'\)"):
        sf.Engine(Timed(), precision=rules)


CONFIGS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({"bf16": {"enabled": True}}, torch.float32),
    ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, torch.float32),
    ({"fp16": {"enabled": True}}, torch.float32),
    ({"fp16": {"enabled": True, "auto_cast": True}}, torch.float16),
]


def by_deepspeeds_interface() -> None:
    for config, dtype in CONFIGS:
        model = Timed()
        given = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given)[0]
        engine(torch.ones(2, 4), {"t": torch.tensor(TIME)})
        assert torch.equal(model.seen[0], torch.tensor(TIME, dtype=dtype)) and model.seen[0].dtype == dtype, config
        engine.destroy()


def test_deepspeed_casts_under_auto_cast_only(ranks: Ranks) -> None:
    ranks.run(by_deepspeeds_interface, world_size=2)
