"""Under ``torch.inference_mode`` states are read, loaded and written as without it, on every axis."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.compat import deepspeed
from shardfold.errors import UsageError
from shardfold.parallel.split import SharedInput
from shardfold.sharding.autograd import outside_inference
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

ADAM = partial(torch.optim.Adam, lr=0.1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()


def trained(layout: str, mode: Any, folder: str) -> dict[str, Tensor]:
    """What a run ends with that reads, writes and loads everything in that mode between its steps."""
    engine = sf.Engine(net(), optimizer=ADAM, layout=layout)
    step(engine)
    with mode():
        for of in ("master", "exp_avg"):
            with engine.gathered(of=of) as values:
                assert not any(value.is_inference() for value in values.values())
        with engine.gathered("2.bias", of="master", write=True) as bias:
            bias.fill_(0.25)
        with engine.gathered("0.bias", write=True) as bias:
            bias.add_(0.5)
        state = engine.state_dict()
        engine.save(folder, wait=True)
    with (
        pytest.raises(UsageError, match=r"changed inside engine\.gathered"),
        mode(),
        engine.gathered(of="master") as read,
    ):
        next(iter(read.values())).zero_()
    engine.close()
    engine = sf.Engine(net(), optimizer=ADAM, layout=layout)
    with mode():
        engine.load(folder)
        engine.load_state_dict(state)
    step(engine)  # with what was loaded
    found = engine.state_dict()
    assert not any(value.is_inference() for value in (*state.values(), *found.values()))
    engine.close()
    return found


def both(layout: str, folder: str) -> None:
    usual = trained(layout, torch.no_grad, f"{folder}/usual/step")
    same = trained(layout, torch.inference_mode, f"{folder}/inference/step")
    assert all(torch.equal(same[name], value) for name, value in usual.items())


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_states_are_read_written_and_loaded(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    ranks.run(both, layout, str(tmp_path), world_size=2)


AXES: dict[str, dict[str, Any]] = {
    "tensor": dict(mesh={"tensor": 2}, tensor="auto"),
    "pipeline": dict(mesh={"pipeline": 2}, layout="zero1"),
}


def over_axes(axis: str) -> None:
    tokens, targets = models.batches(1)[0]
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        engine = sf.Engine(models.Small(), optimizer=partial(torch.optim.SGD, lr=0.1), **grouped(**AXES[axis]))
        engine.module.eval()
        with mode():
            before = engine(tokens, targets).item()
        engine.module.train()
        if axis == "pipeline":
            engine.train_batch((tokens, targets))
        else:
            engine.backward(engine(tokens, targets))
        engine.step()
        found.append((before, engine.state_dict()))
        engine.close()
    # where memory begins may choose the kernel
    assert abs(found[0][0] - found[1][0]) <= 1e-5 * abs(found[0][0]), (found[0][0], found[1][0])
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_evaluates(ranks: Ranks, axis: str) -> None:
    ranks.run(over_axes, axis, world_size=2)


def accessors() -> None:
    model = net()
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    step(engine)
    weight = model[0].weight
    usual = deepspeed.utils.safe_get_full_fp32_param(weight)
    with torch.inference_mode():
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), usual)
        moment = deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
        state = engine.module_state_dict()
    assert not moment.is_inference() and not any(value.is_inference() for value in state.values())
    engine.destroy()


def test_deepspeeds_accessors_read_states(ranks: Ranks) -> None:
    ranks.run(accessors, world_size=2)


def test_what_two_columns_read_may_be_written_in_between() -> None:
    """Of what is gathered for columns (``sequence_parallel``); an inference tensor does not tell of changes."""
    for mode, again in ((torch.no_grad, False), (torch.inference_mode, True)):
        shared = SharedInput()
        with mode():
            x = torch.ones(2)
            first = shared.copy(x, torch.clone)
            assert (shared.copy(x, torch.clone) is not first) == again
            x.mul_(2)
            assert torch.equal(shared.copy(x, torch.clone), torch.full((2,), 2.0))


def test_outside_of_it_tensors_count_changes() -> None:
    with torch.inference_mode(), outside_inference():
        assert not torch.is_grad_enabled() and torch.ones(1)._version == 0
    with outside_inference():
        assert torch.is_grad_enabled()
