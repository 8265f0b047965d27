"""``deepspeed.initialize`` and its engine train as plain PyTorch does, under DeepSpeed's words and its counting."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from shardfold.errors import ConfigError, ShardfoldError, UsageError
from shardfold.testing import Ranks

STEPS, RANKS, ROWS = 4, 2, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def config(stage: int = 2, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": accumulate, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage}, "steps_per_print": None, **more,
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
    engine.destroy()
    return losses, norms, found


def train_all(stage: int) -> dict[tuple[int, str], Any]:
    return {(k, dtype): train(stage, k, dtype) for k in (1, 2) for dtype in DTYPES}


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


WAYS = {
    "divided": (0, 2), "autograd": (1, 3), "scaled": (2,), "optimizer": (2,), "set": (1, 3), "late": (0, 1, 2, 3),
    "unmanaged": (1, 2), "no_sync": (0, 1), "coalesced": (1, 3),
}  # fmt: skip


def train_ways() -> dict[tuple[str, int], list[Tensor]]:
    return {(way, stage): train_by(way, stage) for way, stages in WAYS.items() for stage in stages}


def test_other_ways_to_the_same_gradients(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """Losses that are divided already, PyTorch's own backward, boundaries that the caller sets before the backward or
    behind it, and reductions that are put off."""
    wanted = reference(2, torch.float32)[2]
    for case, found in ranks.run(train_ways, world_size=RANKS)[0].items():
        for mine, other in zip(found, wanted, strict=True):
            assert torch.allclose(mine, other, rtol=2e-5, atol=2e-6), case


# -- fp16


def overflow(accumulate: int) -> list[Any]:
    settings = config(
        1, accumulate, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, optimizer=adamw(),
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_min_lr": 0.004, "warmup_max_lr": 0.008, "warmup_type": "linear"}},
    )  # fmt: skip
    engine, optimizer, _, schedule = initialize(model=build(), config=settings)
    assert optimizer.cur_scale == optimizer.loss_scale == engine.cur_scale == 256.0 and optimizer.dynamic_loss_scale
    seen: list[Any] = []
    for step in range(3):
        for micro in range(accumulate):
            loss = loss_of(engine, batch(step, micro, engine.global_rank))
            if step == 1 and engine.global_rank == 1:
                loss = loss * float("inf")
            engine.backward(loss)
            before = weights(engine) if micro == accumulate - 1 else []
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


# -- what initialize takes


def fit(way: str, folder: str) -> tuple[str, list[Tensor]]:
    model = build()
    parameters = list(model.parameters())
    path = Path(folder) / "config.json"
    section = {"optimizer": adamw()}
    make = partial(AdamW, lr=0.01, weight_decay=0.1)
    arguments: dict[str, Any] = {
        "path": dict(config=str(path)),
        "args": dict(args=Namespace(deepspeed_config=str(path), local_rank=-1)),
        "config_params": dict(config_params=config(**section)),
        "instance": dict(optimizer=make(parameters), config=config(), args=Namespace(device_rank=0)),
        "callable": dict(optimizer=make, model_parameters=iter(parameters), config=config()),
        "generator": dict(model_parameters=model.parameters(), config=config(**section)),
        "filter": dict(model_parameters=filter(lambda p: p.requires_grad, parameters), config=config(**section)),
        "empty": dict(optimizer=make(parameters), model_parameters=[], dist_init_required=False, config=config()),
        "groups": dict(
            model_parameters=[{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}],
            config=config(**section),
        ),
        "hole": dict(optimizer=make([{"params": parameters}, {"params": []}]), config=config()),
    }[way]
    engine, optimizer, _, _ = initialize(model=model, **arguments)
    assert engine.module is model and engine.config["zero_optimization"] == {"stage": 2}
    if "args" in arguments and way == "args":
        assert arguments["args"].local_rank == engine.local_rank
    assert len(optimizer.param_groups) == (2 if way == "groups" else 1)
    for step in range(STEPS):
        engine.backward(loss_of(engine, batch(step, 0, engine.global_rank)))
        engine.step()
    found = weights(engine)
    engine.destroy()
    return engine.optimizer_name() or "", found


def fit_all(folder: str) -> dict[str, Any]:
    ways = ("path", "args", "config_params", "instance", "callable", "generator", "filter", "empty", "groups", "hole")
    return {way: fit(way, folder) for way in ways}


def test_all_forms_of_arguments_train_alike(ranks: Ranks, tmp_path: Path):
    """The config as dict or path, by three arguments; the optimizer given, made, or in the config; parameters in any
    iterable."""
    (tmp_path / "config.json").write_text(json.dumps(config(optimizer=adamw())))
    wanted = reference(1, torch.float32)[2]
    for way, (name, found) in ranks.run(fit_all, str(tmp_path), world_size=RANKS)[0].items():
        assert name == "AdamW" or way == "callable", way
        for mine, other in zip(found, wanted, strict=True):
            assert torch.allclose(mine, other, rtol=2e-5, atol=2e-6), way


def forward_only(stage: int) -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}
    engine, optimizer, _, schedule = initialize(model=build(), config=config(stage, scheduler=section))
    assert (optimizer, engine.optimizer, schedule, engine.lr_scheduler) == (None,) * 4
    with torch.no_grad():
        near(engine(batch(0, 0, 0)), build()(batch(0, 0, 0)))
    assert (engine.get_lr(), engine.get_mom()) == ([], [])
    loss = loss_of(engine, batch(0, 0, 0))
    for call in (lambda: engine.backward(loss), engine.step, lambda: engine.scale(loss)):
        with pytest.raises(AssertionError, match="must provide one, by optimizer= or in the config"):
            call()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_without_an_optimizer_it_only_runs_forward(ranks: Ranks, stage: int):
    """A scheduler in the config is left alone then, even one that could not be made."""
    ranks.run(forward_only, stage, world_size=RANKS)


class Dataset(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def load() -> tuple[list[float], list[int]]:
    settings = config(optimizer=adamw(), dataloader_drop_last=False)
    engine, _, loader, _ = initialize(model=build(), config=settings, training_data=Dataset())
    assert loader is engine.training_dataloader and len(loader) == 3
    seen = [float(x) for part in loader for x in part[:, 0]]
    sizes = [len(part) for part in engine.deepspeed_io(Dataset(), batch_size=5, route="eval")]
    engine.set_data_post_process_func(lambda part, state: part * 0)
    assert float(next(iter(loader)).abs().sum()) == 0.0
    assert [len(x) for x in engine.deepspeed_io(Dataset(), collate_fn=lambda rows: rows[:1])] == [1, 1, 1]
    engine.destroy()
    return seen, sizes


def test_the_loader_has_this_rank_s_share(ranks: Ranks):
    """Micro-batches of the config's size; together the ranks see each sample once."""
    (first, sizes), (second, _) = ranks.run(load, world_size=RANKS)
    assert sorted(first + second) == list(map(float, range(16))) and len(first) == 8 and sizes == [5, 3]


def alone() -> tuple[int, int, list[float]]:
    engine, *_ = initialize(model=build(), config=config(3, optimizer=adamw()))
    losses = []
    for step in range(3):
        loss = loss_of(engine, batch(step, 0, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    ranks, rank = engine.world_size, engine.global_rank
    engine.destroy()
    return ranks, rank, losses


def test_one_process_without_a_launcher(ranks: Ranks):
    """Nothing has to be set or started before."""
    world, rank, losses = ranks.run(alone, world_size=1, distributed=False)[0]
    assert (world, rank, len(losses)) == (1, 0, 3)


# -- schedules


def schedules() -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {}

    def run(name: str, **arguments: Any) -> None:
        model = build()
        inner = SGD(model.parameters(), lr=1.0)
        made = arguments.pop("make", None)
        if made is not None:
            arguments["lr_scheduler"] = made(inner)
        if "optimizer" not in arguments.get("config", {}):
            arguments["optimizer"] = inner
        arguments.setdefault("config", config(accumulate=2))
        engine, optimizer, _, schedule = initialize(model=model, **arguments)
        assert schedule is engine.lr_scheduler
        rates: list[float] = []
        for step in range(3):
            for micro in range(2):
                engine.backward(loss_of(engine, batch(step, micro, engine.global_rank)))
                engine.step()
            rates += engine.get_lr()
            assert optimizer.param_groups[0]["lr"] == rates[-1]
            if name == "stopped":
                engine.lr_scheduler = None
        if name == "by hand":
            after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # made of what initialize returned
            after.step()
            rates += engine.get_lr()
        assert engine.get_mom() == ([0] if engine.optimizer_name() == "SGD" else [(0.9, 0.999)])
        seen[name] = rates
        engine.destroy()

    halve: Any = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    run("instance", make=halve)
    run("callable", lr_scheduler=halve)
    run("stopped", lr_scheduler=halve)
    run("by hand")
    linear = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}}
    run("config", config=config(accumulate=2, optimizer=adamw(), scheduler=linear))
    return seen


def test_schedules_are_stepped_after_each_update(ranks: Ranks):
    """A schedule that was given, made of the optimizer, or in the config; None stops it."""
    for seen in ranks.run(schedules, world_size=RANKS):
        near(seen["instance"], [0.5, 0.25, 0.125])
        near(seen["callable"], [0.5, 0.25, 0.125])
        near(seen["stopped"], [0.5, 0.5, 0.5])
        near(seen["by hand"], [1.0, 1.0, 1.0, 0.5])
        near(seen["config"], [0.0, 0.25, 0.5])


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
    assert [name for name, _ in engine.named_parameters()][0] == "module.body.0.weight"
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
        with pytest.raises(ConfigError, match="states of another layout load with engine.load_checkpoint"):
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


# -- errors: one sentence each


def refusals() -> None:
    model = build()
    inner = AdamW(model.parameters(), lr=0.1)
    foreign = AdamW(build().parameters(), lr=0.1)
    other = torch.optim.lr_scheduler.StepLR(foreign, 1)
    section = config(optimizer=adamw())
    args = Namespace(deepspeed_config="x.json")
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(model=None, config=section), "was given no model: it requires a torch.nn.Module."),
        (dict(model=3, config=section), "was given a int: it requires a torch.nn.Module."),
        (dict(model=model), "was given no config: it requires one config"),
        (dict(model=model, config=section, args=args), "was given config= and args.deepspeed_config: it requires one"),
        (dict(model=model, optimizer=inner, config=section), "the config's optimizer.type is 'AdamW': take one"),
        (dict(model=model, optimizer=foreign, config=config()), "holds 6 tensors that are no parameters of the model"),
        (dict(model=model, optimizer=3, config=config()), "was given a int: give a torch.optim.Optimizer, or a func"),
        (dict(model=model, optimizer=lambda p: p, config=config()), "made a list: it has to return a torch.optim"),
        (dict(model=model, model_parameters=[], config=section), "is empty, so there is nothing to optimize"),
        (dict(model=model, optimizer=inner, lr_scheduler=other, config=config()), "a StepLR of another optimizer"),
        (dict(model=model, config=section, mesh_param=(1, 2)), "sequence parallelism is not here"),
        (dict(model=model, config=section, training_data=3), "was given a int: give a torch Dataset."),
        (dict(model=model, config={**section, "gradient_clipp1ng": 1}), "gradient_clipp1ng"),
    ]  # fmt: skip
    for arguments, words in cases:
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            initialize(**arguments)
        assert "\n" not in str(caught.value)
    assert issubclass(DeepSpeedConfigError, ShardfoldError)

    engine = initialize(model=model, optimizer=inner, config=config(2))[0]
    with pytest.raises(AssertionError, match=r"no_sync\(\) is incompatible with the gradient partitioning of ZeRO"):
        engine.no_sync().__enter__()
    with pytest.raises(UsageError, match="it takes a scalar loss"):
        engine.backward(torch.zeros(3))
    with pytest.raises(AssertionError, match="a tensor that no parameter leads to"):
        engine.backward(torch.zeros(()))
    engine.destroy()
    engine = initialize(model=build(), config=config(1, optimizer=adamw()))[0]
    with engine.no_sync():
        with pytest.raises(AssertionError, match="reentry is unsupported"):
            engine.no_sync().__enter__()
        with pytest.raises(AssertionError, match="which is illegal"):
            engine.step()
    engine.destroy()
    engine = initialize(model=build(), config=config(0, optimizer=adamw()))[0]
    with pytest.raises(NotImplementedError, match="stage 1, 2 or 3"):
        engine.coalesce_grad_reduction().__enter__()
    engine.destroy()


def test_wrong_arguments_and_calls_are_refused_with_a_sentence(ranks: Ranks):
    ranks.run(refusals, world_size=RANKS)
