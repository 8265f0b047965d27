"""The engine of DeepSpeed's face trains as plain PyTorch does, under DeepSpeed's words and its counting."""

from __future__ import annotations

import io
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support.deepspeed_training import (
    DTYPES,
    RANKS,
    ROWS,
    STEPS,
    adamw,
    batch,
    build,
    config,
    loss_of,
    near,
    reference,
    weights,
)

# -- training


def train(stage: int, accumulate: int, dtype: str) -> tuple[list[float], list[float], list[Tensor]]:
    mode = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    settings = config(stage, accumulate, optimizer=adamw(), **mode)
    engine, optimizer, loader, schedule = initialize(model=build(), config=settings)
    assert isinstance(optimizer, DeepSpeedOptimizer) and loader is None and schedule is None
    assert engine.get_global_grad_norm() is None
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            loss = loss_of(engine, batch(step, micro, engine.global_rank))
            assert engine.is_gradient_accumulation_boundary() is last
            near(engine.backward(loss), loss / accumulate)
            engine.step()
            assert engine.was_step_applied() is last
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
        engine.zero_grad()
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * accumulate)
    assert engine.global_samples == STEPS * accumulate * RANKS * ROWS
    found = weights(engine)
    assert next(engine.module.parameters()).dtype == DTYPES[dtype]
    with torch.no_grad():  # as DeepSpeed, which casts no inputs and no outputs
        assert engine(batch(0, 0, engine.global_rank).to(DTYPES[dtype])).dtype == DTYPES[dtype]
    engine.destroy()
    return losses, norms, found


def train_all(stage: int) -> dict[tuple[int, str], Any]:
    return {(k, dtype): train(stage, k, dtype) for k in (1, 2) for dtype in DTYPES}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_norms_and_weights_are_those_of_plain_pytorch(ranks: Ranks, stage: int):
    """At every stage, in fp32 and bf16, with one and two micro-batches per step."""
    for (accumulate, dtype), (losses, norms, found) in ranks.run(train_all, stage, world_size=RANKS)[0].items():
        wanted = reference(accumulate, DTYPES[dtype])
        near(losses, wanted[0])
        near(norms, wanted[1])
        for mine, other in zip(found, wanted[2], strict=True):
            near(mine, other)


# -- other ways to the same gradients


def backward(way: str, engine: DeepSpeedEngine, loss: Tensor, last: bool) -> None:
    if way == "divided":
        engine.backward(loss / 2, scale_wrt_gas=False)
    elif way == "autograd":
        loss.backward()
    elif way == "scaled":
        engine.scale(loss).backward()
    elif way == "optimizer":
        engine.optimizer.backward(loss / 2)  # type: ignore[union-attr]  # takes it as it is
    else:
        engine.backward(loss)


def train_by(way: str, stage: int) -> list[Tensor]:
    more = {"managed_gradient_accumulation": False} if way == "unmanaged" else {}
    engine = initialize(model=build(), config=config(stage, 2, optimizer=adamw(), **more))[0]
    for step in range(STEPS):
        for micro in range(2):
            last = micro == 1
            if way == "set":
                engine.set_gradient_accumulation_boundary(last)
            loss = loss_of(engine, batch(step, micro, engine.global_rank))
            if way in ("no_sync", "coalesced") and not last:
                with engine.no_sync() if way == "no_sync" else engine.coalesce_grad_reduction():
                    engine.backward(loss)
            elif way == "optimizer":
                engine._core.accumulate = 1
                backward(way, engine, loss, last)
                engine._core.accumulate = 2
            else:
                backward(way, engine, loss, last)
            if way in ("late", "unmanaged", "set"):  # once per step
                if last and way == "late":
                    engine.set_gradient_accumulation_boundary(True)
                if last:
                    engine.step()
                if way == "late":
                    engine.set_gradient_accumulation_boundary(False)
            else:
                engine.step()
    assert engine.global_steps == STEPS
    found = weights(engine)
    engine.destroy()
    return found


def stepped(engine: DeepSpeedEngine, first: int, micros: int) -> None:
    for micro in range(first, first + micros):
        assert engine.is_gradient_accumulation_boundary() is (micro == first + micros - 1)
        engine.backward(loss_of(engine, batch(0, micro, engine.global_rank)))
        engine.step()


def descended(updates: list[range]) -> list[Tensor]:
    """Weights of plain SGD, each update over these micro-batches."""
    plain = build()
    for micros in updates:
        losses = [loss_of(plain, batch(0, micro, rank)) for micro in micros for rank in range(RANKS)]
        grads = torch.autograd.grad(torch.stack(losses).mean(), [*plain.parameters()])
        with torch.no_grad():
            for p, grad in zip(plain.parameters(), grads, strict=True):
                p -= 0.5 * grad
    return [p.detach() for p in plain.parameters()]


def descending(stage: int) -> DeepSpeedEngine:
    given = {**config(stage, 2), "gradient_clipping": 0}
    return initialize(model=build(), optimizer=partial(torch.optim.SGD, lr=0.5), config=given)[0]


def resized(stage: int) -> list[Tensor]:
    engine = descending(stage)
    stepped(engine, 0, 2)
    engine.set_train_batch_size(3 * ROWS * RANKS)
    stepped(engine, 2, 3)
    assert (engine.global_steps, engine.micro_steps) == (2, 5)
    engine.backward(loss_of(engine, batch(0, 5, engine.global_rank)))
    engine.set_train_batch_size(3 * ROWS * RANKS)  # as it is
    with pytest.raises(AssertionError, match="of 1 of the 3 micro-batches of an update are there"):
        engine.set_train_batch_size(ROWS * RANKS)
    engine.zero_grad()
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_the_update_behind_a_change_has_the_new_number_of_micro_batches(ranks: Ranks, stage: int):
    """Whatever number of them came before; inside an update it cannot be changed."""
    for found in ranks.run(resized, stage, world_size=RANKS):
        for mine, other in zip(found, descended([range(2), range(2, 5)]), strict=True):
            near(mine, other)


def failed(stage: int, where: str) -> tuple[list[Tensor], str]:
    engine, said = descending(stage), io.StringIO()
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)

    def fail(*_: Any) -> None:
        raise KeyError("of the program")

    stepped(engine, 0, 2)
    engine.backward(loss_of(engine, batch(0, 2, engine.global_rank)))
    engine.step()
    layer = engine.module[3]
    kept = layer.register_forward_pre_hook(fail) if where == "forward" else layer.register_full_backward_hook(fail)
    with pytest.raises(KeyError):
        engine.backward(loss_of(engine, batch(0, 3, engine.global_rank)))
    kept.remove()
    loss = loss_of(engine, batch(0, 4, engine.global_rank))
    assert engine.is_gradient_accumulation_boundary() is False
    engine.backward(loss)
    engine.step()
    engine.backward(loss_of(engine, batch(0, 5, engine.global_rank)))
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (2, 4)
    found = weights(engine)
    engine.destroy()
    logger.removeHandler(handler)
    return found, said.getvalue()


@pytest.mark.parametrize(("stage", "where"), [(1, "forward"), (3, "backward")])
def test_an_update_that_an_exception_interrupts_begins_anew(ranks: Ranks, stage: int, where: str):
    """What had come of it is lost, which is said, and it has as many micro-batches as any other."""
    for found, said in ranks.run(failed, stage, where, world_size=RANKS):
        for mine, other in zip(found, descended([range(2), range(4, 6)]), strict=True):
            near(mine, other)
        assert "begins anew: 1 micro-batches of it did not count" in said


WAYS = {
    "divided": (0, 2), "autograd": (1, 3), "scaled": (2,), "optimizer": (2,), "set": (1, 3), "late": (0, 1, 2, 3),
    "unmanaged": (1, 2), "no_sync": (0, 1), "coalesced": (1, 3),
}  # fmt: skip


def train_ways() -> dict[tuple[str, int], list[Tensor]]:
    return {(way, stage): train_by(way, stage) for way, stages in WAYS.items() for stage in stages}


@pytest.mark.soak
def test_other_ways_to_the_same_gradients(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """Losses that are divided already, PyTorch's own backward, boundaries that the caller sets before the backward or
    behind it, and reductions that are put off."""
    wanted = reference(2, torch.float32)[2]
    for case, found in ranks.run(train_ways, world_size=RANKS)[0].items():
        for mine, other in zip(found, wanted, strict=True):
            assert torch.allclose(mine, other, rtol=2e-5, atol=2e-6), case


# -- fp16


def overflow(accumulate: int) -> list[Any]:
    linear = {"warmup_num_steps": 4, "warmup_min_lr": 0.004, "warmup_max_lr": 0.008, "warmup_type": "linear"}
    settings = config(
        1, accumulate, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, optimizer=adamw(),
        scheduler={"type": "WarmupLR", "params": linear},
    )  # fmt: skip
    engine, optimizer, _, schedule = initialize(model=build(), config=settings)
    assert optimizer.cur_scale == optimizer.loss_scale == engine.cur_scale == 256.0 and optimizer.dynamic_loss_scale
    seen: list[Any] = []
    for step in range(3):
        before = weights(engine)
        for micro in range(accumulate):
            loss = loss_of(engine, batch(step, micro, engine.global_rank))
            if step == 1 and engine.global_rank == 1:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
        changed = any(not torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
        seen.append((changed, engine.was_step_applied(), optimizer.overflow, engine.cur_scale, schedule.get_last_lr()))
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (3, 1, 3 * accumulate * RANKS * ROWS)
    engine.destroy()
    return seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_overflow_skips_the_step_and_the_schedule(ranks: Ranks, accumulate: int):
    """inf on one rank: no rank updates, the scale is halved, the rate stays; all count the step."""
    for seen in ranks.run(overflow, accumulate, world_size=RANKS):
        assert [each[:4] for each in seen] == [
            (True, True, False, 256.0), (False, False, True, 128.0), (True, True, False, 128.0)
        ]  # fmt: skip
        near([each[4] for each in seen], [[0.004], [0.004], [0.005]])


# -- the engine as a module, its numbers, its optimizer


def members() -> None:
    class Model(nn.Module):
        hidden_size = 7

        def __init__(self) -> None:
            super().__init__()
            self.body = build()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def generate(self) -> str:
            return "made"

    model = Model()
    settings = config(2, 2, optimizer=adamw(betas=[0.8, 0.99]))
    engine, optimizer, _, _ = initialize(model=model, config=settings)
    assert isinstance(engine, nn.Module) and engine.module is model and engine.config is settings
    assert engine.generate() == "made" and engine.hidden_size == 7
    with pytest.raises(AttributeError, match=r"'DeepSpeedEngine' object has no attribute 'nothing'"):
        _ = engine.nothing
    assert not hasattr(engine, "_hf_hook")
    assert next(name for name, _ in engine.named_parameters()) == "module.body.0.weight"
    assert engine.eval().training is False and model.training is False
    assert engine.train().training is True and model.body.training is True
    assert engine.get_batch_info() == (12, 3, 2) == (
        engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    )  # fmt: skip
    engine.set_train_batch_size(24)
    assert engine.get_batch_info() == (24, 3, 4)
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (8, 1, 4)
    with pytest.raises(ValueError, match=r"must be divisible by the micro-batches of all ranks, 1 x 2 = 2\."):
        engine.set_train_batch_size(7)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 2
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()
    assert engine.gradient_clipping() == 0.5 and not engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert engine.zero_reduce_bucket_size() == 500_000_000 and engine.zero_allow_untested_optimizer() is False
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert (engine.get_lr(), engine.get_mom(), engine.get_type()) == ([0.01], [(0.8, 0.99)], [0.0])
    assert engine.device.type == "cpu" and engine.dp_world_size == RANKS and engine.mp_world_size == 1
    assert optimizer.optimizer is engine.basic_optimizer and optimizer.param_groups is optimizer.optimizer.param_groups
    for name in ("train", "eval"):
        assert not hasattr(optimizer, name)
    engine.destroy()


def test_the_engine_s_members(ranks: Ranks):
    ranks.run(members, world_size=RANKS)


def optimizer_state() -> None:
    for kind in (AdamW, torch.optim.RMSprop):
        model = build()
        inner = kind(model.parameters(), lr=0.01)
        group = inner.param_groups[0]
        engine, optimizer, _, _ = initialize(model=model, optimizer=inner, config=config(2))
        assert optimizer.param_groups[0] is group and not list(optimizer.state.items())

        def step(number: int, engine: DeepSpeedEngine = engine) -> None:
            engine.backward(loss_of(engine, batch(number, 0, engine.global_rank)))
            engine.step()

        step(0)
        moments = "exp_avg" if kind is AdamW else "square_avg"
        assert all(moments in kept and kept["step"] == 1 for kept in optimizer.state.values())
        state, before = optimizer.state_dict(), weights(engine)
        state = {**state, "state": {i: {k: _copy(v) for k, v in kept.items()} for i, kept in state["state"].items()}}
        step(1)
        first = weights(engine)
        engine._core.load_state_dict(dict(zip(dict(model.named_parameters()), before, strict=True)))
        group["lr"] = 5.0
        optimizer.load_state_dict(state)
        assert group["lr"] == 0.01
        step(1)
        for mine, other in zip(weights(engine), first, strict=True):
            assert torch.equal(mine, other)
        engine.backward(loss_of(engine, batch(2, 0, engine.global_rank)))
        optimizer.zero_grad(set_to_none=True)
        assert engine._core.micro_batch == 0
        with pytest.raises(ConfigError, match=r"states of another layout load with engine\.load_checkpoint"):
            optimizer.load_state_dict({"param_groups": [], "state": {}})
        engine.destroy()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_the_optimizer_s_groups_and_state(ranks: Ranks):
    """Groups are the very dicts; a state that was kept brings the same step again."""
    ranks.run(optimizer_state, world_size=RANKS)


def several() -> None:
    one = initialize(model=build(), config=config(3, optimizer=adamw()))[0]
    other = initialize(model=build(), config=config(0, optimizer=adamw()))[0]
    frozen = initialize(model=build(), config=config(3))[0]
    x = batch(0, 0, one.global_rank)
    with torch.no_grad():
        target = frozen(x)
    loss = (one(x) - target).square().mean() + loss_of(other, x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        one(torch.zeros(3, 5))
    loss = (one(x) - target).square().mean() + loss_of(other, x)
    other._core.last_micro_batch = one._core.last_micro_batch = True
    loss.backward()
    one.step()
    other.step()
    assert one.was_step_applied() and other.was_step_applied()
    one.destroy()
    again = initialize(model=build(), config=config(3, optimizer=adamw()))[0]
    again.backward(loss_of(again, x))
    again.step()
    assert again.global_steps == 1
    for engine in (other, frozen, again):
        engine.destroy()


def test_several_engines_an_exception_and_another_engine(ranks: Ranks):
    """In one loss, with a reference model that is not trained; and after ``destroy()``."""
    ranks.run(several, world_size=RANKS)
