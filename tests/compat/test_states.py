"""What DeepSpeed's documentation says of split states: kept, read, saved and given back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold.compat.deepspeed as deepspeed
from shardfold.compat.deepspeed import utils, zero
from shardfold.compat.deepspeed.checkpoint import constants
from shardfold.compat.deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from shardfold.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum, get_zero_config
from shardfold.compat.deepspeed.runtime.zero.linear import (
    LinearFunctionForZeroStage3,
    LinearModuleForZeroStage3,
    zero3_linear_wrap,
)
from shardfold.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from shardfold.errors import ConfigError, UsageError
from shardfold.testing import run_ranks
from tests.support.deepspeed_training import keeping_checkpointing

AVAILABLE, NOT_AVAILABLE = zero.ZeroParamStatus.AVAILABLE, zero.ZeroParamStatus.NOT_AVAILABLE


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, whose process group ends with the test."""
    yield
    deepspeed.comm.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).float().square().mean()


def _config(stage: int, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        **more,
    }


def _engine(stage: int, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model if model is not None else Net()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(stage, **options))[0]


def _batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + rank))


def _train(engine: Any, *numbers: int) -> list[float]:
    losses: list[float] = []
    for number in numbers:
        loss = engine(_batch(number, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _between(root: str) -> None:
    """Gradients and checkpoints between the micro-batches of a step."""
    for stage in range(4):
        engine, plain = _engine(stage, accumulate=2), Net()
        weight = engine.module.up.weight
        state = {name: utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
        plain.load_state_dict(state)  # pyright: ignore[reportArgumentType]
        sum(plain(_batch(0, rank)) for rank in range(engine.world_size)).div(2 * engine.world_size).backward()
        _train(engine, 0)
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(utils.safe_get_full_grad(ours), theirs.grad)
        assert engine.save_checkpoint(f"{root}/{stage}")  # without what has come of the step
        _train(engine, 1)
        undisturbed = _engine(stage, accumulate=2)
        _train(undisturbed, 0, 1)
        there = utils.safe_get_full_fp32_param(undisturbed.module.up.weight)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), there)  # pyright: ignore
        undisturbed.load_checkpoint(f"{root}/{stage}")
        assert torch.equal(utils.safe_get_full_fp32_param(undisturbed.module.up.weight), state["up.weight"])  # pyright: ignore
        with pytest.raises(UsageError, match=r"engine.save\(\) while gradients of 1 micro-batches"):
            engine.backward(engine(_batch(2, engine.global_rank)))
            engine._core.save(f"{root}/{stage}/core")
        for each in (engine, undisturbed):
            each.destroy()


def _given_back() -> None:
    """A model whose engine was destroyed: read, run and trained on, under the same and another stage."""
    model = Net()
    engine = _engine(3, model)
    _train(engine, 0, 1)
    weight = model.up.weight
    value = utils.safe_get_full_fp32_param(weight)
    engine.destroy()
    engine.destroy()
    assert weight.ds_status is NOT_AVAILABLE and dist.get_world_size() > 1
    with zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(weight, value)  # pyright: ignore[reportArgumentType]
        expected = model(_batch(5, 0)).item()
    for stage in (3, 1):
        again = _engine(stage, model)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), value)  # pyright: ignore
        if stage == 3:
            again.destroy()
    assert model(_batch(5, 0)).item() == pytest.approx(expected)
    _train(again, 2)  # pyright: ignore[reportPossiblyUnboundVariable]


def _states(root: str) -> bool:
    torch.set_num_threads(1)
    _between(root)
    _given_back()
    return True


@pytest.mark.soak
def test_between_the_micro_batches_and_after_destroy(tmp_path: Path) -> None:
    """On two ranks: gradients so far, checkpoints without them, models that are given back split."""
    assert run_ranks(_states, 2, str(tmp_path)) == [True, True]


@pytest.mark.usefixtures("alone")
def test_status_with_one_rank() -> None:
    """With one rank nothing is freed, and the parameters of stage 3 say what they say on more."""
    engine, seen = _engine(3), []
    weight = engine.module.up.weight
    engine.module.up.register_forward_hook(lambda module, *_: seen.append(module.weight.ds_status))
    _train(engine, 0)
    assert weight.ds_status is NOT_AVAILABLE and seen == [AVAILABLE]
    with zero.GatheredParameters(weight):
        assert weight.ds_status is AVAILABLE
    assert weight.ds_status is NOT_AVAILABLE
    engine.destroy()


@pytest.mark.usefixtures("alone")
def test_init_takes_a_config_object() -> None:
    """A `DeepSpeedConfig` in place of a dict, also for activation checkpointing."""
    config = deepspeed.DeepSpeedConfig(_config(3, bf16={"enabled": True}))
    with zero.Init(config_dict_or_path=config):
        assert nn.Linear(2, 2).weight.dtype is torch.bfloat16
    with keeping_checkpointing():
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
        assert deepspeed.checkpointing.is_configured()


def test_checkpoint_function() -> None:
    """Its outputs are in a list as well."""
    outputs: list[torch.Tensor] = []
    x = torch.ones(2, requires_grad=True)
    deepspeed.checkpointing.CheckpointFunction.apply(lambda a, b: (a * b, a), outputs, x, x.detach() + 2)
    sum(output.sum() for output in outputs).backward()  # pyright: ignore
    assert len(outputs) == 2 and x.grad is not None and x.grad.tolist() == [4.0, 4.0]


def test_sections_as_objects() -> None:
    """Defaults, what is given, other names of keys, and errors."""
    config = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=12, offload_param={"device": "cpu"})
    assert config.stage == ZeroStageEnum.weights and config.prefetch_bucket_size == 12
    assert config.offload_param.device == OffloadDeviceEnum.cpu and config.offload_optimizer is None
    assert DeepSpeedZeroConfig().reduce_bucket_size == 500_000_000 and DeepSpeedZeroConfig().stage == 0
    assert config.overlap_comm is True and DeepSpeedZeroConfig(stage=2).overlap_comm is False  # if it is not given
    assert get_zero_config({"zero_optimization": {"stage": 2}}).stage == 2
    assert DeepSpeedZeroOffloadParamConfig().device == "none" and DeepSpeedZeroOffloadParamConfig().buffer_count == 5
    assert DeepSpeedZeroOffloadOptimizerConfig(device="cpu", ratio=0.5).ratio == 0.5
    section = DeepSpeedActivationCheckpointingConfig({"activation_checkpointing": {"number_checkpoints": 4}})
    assert section.number_checkpoints == 4 and section.cpu_checkpointing is False
    with pytest.raises(ConfigError, match="stage"):
        DeepSpeedZeroConfig(stage=7)


def test_linear_layers_by_other_names() -> None:
    """They are PyTorch's."""
    x = torch.randn(3, 4)
    layer = LinearModuleForZeroStage3(4, 5)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), expected) and zero.MemoryEfficientLinear is LinearModuleForZeroStage3
    assert torch.equal(zero3_linear_wrap(x, layer.weight, layer.bias), expected)
    assert torch.equal(LinearFunctionForZeroStage3.apply(x, layer.weight, layer.bias), expected)


@pytest.mark.soak
@pytest.mark.usefixtures("alone")
def test_universal_checkpoint(tmp_path: Path) -> None:
    """`python -m deepspeed.checkpoint.ds_to_universal`, and `load_universal` without a tag."""
    assert constants.OPTIMIZER_STATE_DICT == "optimizer_state_dict"
    engine = _engine(2)
    _train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    expected = _train(engine, 2, 3)
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "global_step4"
    made = tmp_path / "global_step2_universal"
    module = "shardfold.compat.deepspeed.checkpoint.ds_to_universal"
    command = [sys.executable, "-m", module, "--input_folder", tmp_path / "global_step2", "--output_folder", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest_universal").read_text() == made.name
    other = _engine(3, checkpoint={"load_universal": True})
    path, _ = other.load_checkpoint(tmp_path)
    assert path == str(made) and _train(other, 2, 3) == pytest.approx(expected)
    for each in (engine, other):
        each.destroy()
