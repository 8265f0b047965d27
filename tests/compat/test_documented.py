"""What DeepSpeed's documentation says of its engine, schedules and helpers, one small behaviour at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardfold.compat.deepspeed as deepspeed
from shardfold.errors import NonFiniteError
from shardfold.testing import Ranks

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


def overflow(engine: Any) -> None:
    loss = engine(torch.ones(2, 4, dtype=engine.module.up.weight.dtype))
    engine.backward(loss * float("inf"))
    engine.step()


SCALES: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "static": ({"loss_scale": 128}, "x.", [128, 128]),
    "window": ({"initial_scale_power": 4, "loss_scale_window": 2}, "......", [16, 16, 32, 32, 64, 64]),
    "hysteresis": ({"initial_scale_power": 8, "hysteresis": 2}, "x.x.x", [256, 256, 128, 128, 64]),
    "consecutive": (
        {"initial_scale_power": 8, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [256] * 5 + [128]
    ),
    "window after an overflow": (
        {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1}, ".x.....", [16, 8, 8, 8, 8, 16, 16]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_a_schedule_of_loss_scales(name: str, make: Callable[..., Made]):
    """`x` overflows, `.` does not; a step that overflows leaves weights and the learning rate alone."""
    fp16, steps, scales = SCALES[name]
    engine, optimizer, _, scheduler = make(
        fp16={"enabled": True, **fp16}, gradient_accumulation_steps=1, train_batch_size=2
    )
    seen = []
    for step in steps:
        before, at = engine.module.up.weight.clone(), scheduler.last_batch_iteration
        overflow(engine) if step == "x" else train(engine, 1)
        assert optimizer.overflow is (step == "x") is not engine.was_step_applied()
        assert step == "." or torch.equal(before, engine.module.up.weight)
        assert scheduler.last_batch_iteration == at + (step == ".")
        seen.append(optimizer.cur_scale)
    assert seen == scales and engine.skipped_steps == steps.count("x") and engine.global_steps == len(steps)


def trained(micro_batches: list[int]) -> dict[str, torch.Tensor]:
    """The weights that plain PyTorch has after calls of :func:`train` with these numbers, under ``CONFIG``."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.8, 0.9), weight_decay=0.0)
    inputs = [torch.full((2, 4), 0.1 * (i + 1)) for count in micro_batches for i in range(count)]
    for step in range(len(inputs) // 2):
        # The warm-up's first rate holds before its first step and behind it.
        optimizer.param_groups[0]["lr"] = 0.02 * math.log(max(step, 1)) / math.log(4)
        optimizer.zero_grad()
        for x in inputs[2 * step : 2 * step + 2]:
            (model(x) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_of_a_stage(stage: int, make: Callable[..., Made]):
    """It is a ZeROOptimizer; states that are offloaded and reloaded go on as plain PyTorch's do."""
    from shardfold.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer
    from shardfold.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    engine = make(zero_optimization={"stage": stage}).engine
    assert isinstance(engine.optimizer, ZeROOptimizer) and isinstance(engine.optimizer, torch.optim.Optimizer)
    train(engine, 4)
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False, non_blocking=True)
    engine.reload_states(non_blocking=True)
    train(engine, 4)
    for name, value in trained([4, 4]).items():
        torch.testing.assert_close(engine.module_state_dict()[name], value, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="nvme"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(ValueError, match="optim_states"):
        engine.offload_states(include=["optimizer"])


def test_what_was_given_is_kept(make: Callable[..., Made]):
    """And what is not here says no."""
    engine = make().engine
    assert engine.client_optimizer is None is engine.client_lr_scheduler and engine.gradient_average
    assert engine.optimizer_name() == "adamw" and engine.dynamic_loss_scale_args()["scale_window"] == 1000
    for name in ("amp", "sparse_gradients", "elasticity", "curriculum_learning", "data_efficiency"):
        assert getattr(engine, f"{name}_enabled")() is False
    assert engine.is_map_style_dataset([1]) and not engine.is_iterable_style_dataset([1])
    assert "up" in dir(engine) and engine.get_wall_clock_timers() == {}
    train(engine, 4)
    assert engine.tput_timer.global_step_count == 2 and engine.tput_timer.micro_step_count == 4


def test_times_of_a_step(make: Callable[..., Made]):
    """With `wall_clock_breakdown`."""
    engine = make(wall_clock_breakdown=True).engine
    train(engine, 2)
    assert all(engine.get_wall_clock_timers()[name] > 0 for name in ("fwd", "bwd", "step"))


def test_adam_of_a_config_without_bias_correction(make: Callable[..., Made]):
    """`x -= lr * m / (sqrt(v) + eps)` in the first step."""
    params = {"lr": 0.1, "betas": [0.9, 0.99], "bias_correction": False}
    engine = make(
        optimizer={"type": "Adam", "params": params}, scheduler={}, gradient_clipping=0.0,
        gradient_accumulation_steps=1, train_batch_size=2,
    ).engine  # fmt: skip
    model = copy.deepcopy(engine.module)
    model(torch.full((2, 4), 0.1)).backward()
    train(engine, 1)
    weight, grad = model.up.weight, model.up.weight.grad
    torch.testing.assert_close(engine.module.up.weight, weight - 0.1 * 0.1 * grad / (0.1 * grad.abs() + 1e-8))


def test_one_cycle_sets_both_betas(make: Callable[..., Made]):
    """`get_mom` of the schedule and of the engine."""
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
    engine, _, _, scheduler = make(scheduler={"type": "OneCycle", "params": params})
    train(engine, 2)
    assert engine.get_mom() == scheduler.get_mom() == [(pytest.approx(0.85), 0.99)]
    scheduler.step(batch_iteration=1)
    assert scheduler.get_last_lr() == [pytest.approx(0.2)]


def test_a_loader_and_scalers_made_by_hand():
    """With DeepSpeed's arguments."""
    from shardfold.compat.deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    made = deepspeed.DeepSpeedDataLoader(
        list(range(8)), batch_size=3, pin_memory=False, local_rank=0, tput_timer=None,
        data_sampler=torch.utils.data.SequentialSampler(range(8)), dataloader_drop_last=True,
    )  # fmt: skip
    assert [batch.tolist() for batch in made] == [[0, 1, 2], [3, 4, 5]]
    arguments = dict(init_scale=16, scale_window=1, min_scale=8, delayed_shift=1, consecutive_hysteresis=False)
    scaler, seen = CreateLossScaler(torch.half, 1.0, True, arguments), []
    for overflowed in (False, False, True):
        scaler.update_scale(overflowed)
        seen.append(scaler.loss_scale)
    assert seen == [16, 32, 16] and CreateLossScaler(torch.half, 4.0, False, None).loss_scale == 4.0
    scaler.update_scale(True)
    with pytest.raises(NonFiniteError, match="minimum"):
        scaler.update_scale(True)


def test_words_of_a_config():
    from shardfold.compat.deepspeed.runtime import constants

    assert constants.TRAIN_BATCH_SIZE == "train_batch_size" and constants.GRADIENT_CLIPPING_DEFAULT == 1.0


def summed(op: str, stage: int) -> torch.Tensor:
    """How far two ranks' weights go with a rate of 1."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_allreduce_op": op,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine = deepspeed.initialize(model=Model(), config=config)[0]
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    rank = engine.global_rank
    engine.backward(engine(torch.full((2, 4), 0.1 * (rank + 1))))
    engine.step()
    loss = engine(torch.full((2, 4), 0.3))
    loss.backward()  # the engine divides what is not its own backward()'s
    engine.step()
    after = engine.module_state_dict()
    engine.destroy()
    return torch.cat([(after[name] - value).reshape(-1) for name, value in before.items()])


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_are_summed_if_asked(stage: int, ranks: Ranks):
    """`gradient_allreduce_op`, on two ranks."""
    mean, total = (ranks.run(summed, op, stage, world_size=2)[0] for op in ("mean", "sum"))
    torch.testing.assert_close(total, 2 * mean)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("torch_adam", "name"), [(False, "fused_optimizer"), (True, "unfused_optimizer")])
def test_the_class_of_an_optimizer_of_stage_0(precision: str, torch_adam: bool, name: str, make: Callable[..., Made]):
    """DeepSpeed wraps its own Adam in `FP16_Optimizer` and others in `FP16_UnfusedOptimizer`, in fp16 and in bf16."""
    from shardfold.compat.deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer

    params = {"lr": 0.01, "torch_adam": torch_adam}
    optimizer = make(optimizer={"type": "AdamW", "params": params}, **{precision: {"enabled": True}}).optimizer
    wanted = fused_optimizer.FP16_Optimizer, unfused_optimizer.FP16_UnfusedOptimizer
    assert [isinstance(optimizer, kind) for kind in wanted] == [name == "fused_optimizer", name == "unfused_optimizer"]


def test_the_class_of_an_optimizer_that_accumulates_in_fp32(make: Callable[..., Made]):
    """`BF16_Optimizer` for bf16 at stage 1 with gradients in fp32, and for no other stage."""
    from shardfold.compat.deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    changes = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    kinds = [type(make(zero_optimization={"stage": stage}, **changes).optimizer) for stage in (1, 2)]
    assert [issubclass(kind, BF16_Optimizer) for kind in kinds] == [True, False]
