"""What DeepSpeed's documentation says of its engine, schedules and helpers, one small behaviour at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardfold.compat.deepspeed as deepspeed

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).float().square().mean()


class Made(NamedTuple):
    engine: Any
    optimizer: Any
    loader: Any
    scheduler: Any


@pytest.fixture
def make() -> Iterator[Callable[..., Made]]:
    """Engines, which are ended with the test."""
    made: list[Made] = []

    def one(**changes: Any) -> Made:
        torch.manual_seed(0)
        model, config = Model(), copy.deepcopy(CONFIG) | changes
        data = TensorDataset(torch.arange(32.0).view(8, 4) / 32)
        made.append(
            Made(
                *deepspeed.initialize(
                    model=model, model_parameters=model.parameters(), config=config, training_data=data
                )
            )
        )
        return made[-1]

    yield one
    for each in made:
        each.engine.destroy()
    deepspeed.comm.destroy_process_group()


def train(engine: Any, micro_batches: int) -> list[bool]:
    """Whether each micro-batch was at the boundary."""
    seen = []
    for i in range(micro_batches):
        engine.backward(engine(torch.full((2, 4), 0.1 * (i + 1), dtype=engine.module.up.weight.dtype)))
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    return seen


SAID = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "get_batch_info": (4, 2, 2),
    "gradient_clipping": 0.5,
    "zero_optimization": False,
    "zero_optimization_stage": 0,
    "fp16_enabled": False,
    "bfloat16_enabled": False,
    "steps_per_print": 7,
    "wall_clock_breakdown": False,
    "scheduler_name": "WarmupLR",
    "get_lr": [0.0],
    "get_mom": [[0.8, 0.9]],
}


@pytest.mark.parametrize("name", SAID)
def test_the_engine_says_what_the_config_said(name: str, make: Callable[..., Made]):
    """The accessors of the configuration."""
    said = getattr(make().engine, name)()
    assert (list(map(list, said)) if name == "get_mom" else said) == SAID[name]


def test_steps_are_counted(make: Callable[..., Made]):
    """Boundaries, micro-steps, steps, samples; the schedule goes on once a step."""
    engine, _, loader, scheduler = make()
    assert train(engine, 4) == [False, True, False, True]
    assert (engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps) == (4, 2, 8, 0)
    assert engine.get_lr() == scheduler.get_last_lr() == [pytest.approx(0.01)]
    assert len(loader) == 4 and engine.get_global_grad_norm() > 0 and engine.was_step_applied()


def test_initialize_gives_four(make: Callable[..., Made]):
    """An engine that is a module, an optimizer with live groups, a loader, a schedule."""
    engine, optimizer, loader, scheduler = make()
    assert isinstance(engine, nn.Module) and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer) and engine.optimizer is optimizer
    assert engine.training_dataloader is loader and engine.lr_scheduler is scheduler
    assert optimizer.param_groups[0]["betas"] in ((0.8, 0.9), [0.8, 0.9])
    assert engine.global_rank == 0 and engine.world_size == 1 and isinstance(engine.device, torch.device)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_goes_back(stage: int, tmp_path: Path, make: Callable[..., Made]):
    """Tag, `latest`, client state, weights and schedule."""
    changes = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0}}
    first = make(**changes).engine
    train(first, 4)
    assert first.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text().strip() == "global_step2" and (tmp_path / "global_step2").is_dir()
    second = make(**changes).engine
    path, client_state = second.load_checkpoint(str(tmp_path))
    assert path is not None and Path(path).name == "global_step2" and client_state["epoch"] == 3
    assert second.global_steps == 2 and second.get_lr() == first.get_lr()
    train(first, 2)
    train(second, 2)
    for a, b in zip(first.module_state_dict().values(), second.module_state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_no_checkpoint_is_none(tmp_path: Path, make: Callable[..., Made]):
    assert make().engine.load_checkpoint(str(tmp_path))[0] is None


def test_the_batch_size_changes_by_accumulation(make: Callable[..., Made]):
    """`set_train_batch_size` keeps the micro-batch."""
    engine = make().engine
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 4)


def test_full_states_of_stage_3(make: Callable[..., Made]):
    """`safe_get_*` between backward and step, and what a split parameter tells of itself."""
    engine = make(zero_optimization={"stage": 3}, gradient_accumulation_steps=1, train_batch_size=2).engine
    train(engine, 1)
    engine.backward(engine(torch.ones(2, 4)))
    weight = engine.module.up.weight
    assert deepspeed.utils.safe_get_full_fp32_param(weight).shape == (8, 4)
    assert deepspeed.utils.safe_get_full_grad(weight).shape == (8, 4)
    assert deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg").shape == (8, 4)
    assert weight.ds_numel == 32 and tuple(weight.ds_shape) == (8, 4)
    engine.step()


def test_a_config_that_is_wrong_says_where():
    """An unknown key, and sizes that do not multiply up."""
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="optimzer"):
        deepspeed.DeepSpeedConfig(CONFIG | {"optimzer": {}})
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="7"):
        deepspeed.DeepSpeedConfig(CONFIG | {"train_micro_batch_size_per_gpu": 7})


def test_a_flops_profile():
    """FLOPs, MACs and parameters of a model, as numbers."""
    from shardfold.compat.deepspeed.profiling.flops_profiler import get_model_profile

    _, macs, params = get_model_profile(Model(), input_shape=(2, 4), print_profile=False, as_string=False)
    assert macs == 2 * (4 * 8 + 8) and params == 4 * 8 + 8 + 8 + 1
