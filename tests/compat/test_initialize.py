"""``deepspeed.initialize`` takes its arguments in all documented forms, and refuses the others with a sentence."""

from __future__ import annotations

import io
import json
import logging
import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.compat.finder import VERSION
from shardfold.errors import ConfigError, ShardfoldError, UsageError
from shardfold.testing import Ranks
from tests.support.deepspeed_training import (
    RANKS,
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

# -- what initialize takes


def fit(way: str, folder: str) -> tuple[str, list[Tensor]]:
    model = build()
    parameters = list(model.parameters())
    path = Path(folder) / "config.json"
    section: dict[str, Any] = {"optimizer": adamw()}
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


@pytest.mark.soak
def test_all_forms_of_arguments_train_alike(ranks: Ranks, tmp_path: Path):
    """The config as dict or path, by three arguments; the optimizer given, made, or in the config; parameters in any
    iterable."""
    (tmp_path / "config.json").write_text(json.dumps(config(optimizer=adamw())))
    wanted = reference(1, torch.float32)[2]
    for way, (name, found) in ranks.run(fit_all, str(tmp_path), world_size=RANKS)[0].items():
        assert name.lower() == "adamw", way
        for mine, other in zip(found, wanted, strict=True):
            assert torch.allclose(mine, other, rtol=2e-5, atol=2e-6), way


def forward_only(stage: int) -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}
    engine, optimizer, _, schedule = initialize(model=build(), config=config(stage, scheduler=section))
    assert (optimizer, schedule, engine.lr_scheduler) == (engine.optimizer, None, None)
    assert optimizer is None or (stage == 3 and optimizer.module is engine.module)
    with torch.no_grad():
        near(engine(batch(0, 0, 0)), build()(batch(0, 0, 0)))
    assert (engine.get_lr(), engine.get_mom()) == ([], [])
    loss = loss_of(engine, batch(0, 0, 0))
    for call in (lambda: engine.backward(loss), engine.step, lambda: engine.scale(loss)):
        with pytest.raises(AssertionError, match="must provide optimizer during init"):
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


@pytest.mark.soak
def test_schedules_are_stepped_after_each_update(ranks: Ranks):
    """A schedule that was given, made of the optimizer, or in the config; None stops it."""
    for seen in ranks.run(schedules, world_size=RANKS):
        near(seen["instance"], [0.5, 0.25, 0.125])
        near(seen["callable"], [0.5, 0.25, 0.125])
        near(seen["stopped"], [0.5, 0.5, 0.5])
        near(seen["by hand"], [1.0, 1.0, 1.0, 0.5])
        near(seen["config"], [0.0, 0.25, 0.5])


# -- what was given wins, and it is said


def unsent(stage: int) -> list[Tensor]:
    engine = initialize(
        model=build(), optimizer=partial(SGD, lr=0.5), config={**config(stage, 2), "gradient_clipping": 0}
    )[0]
    for micro in range(2):  # the last one before the step, too
        with engine.no_sync():
            engine.backward(loss_of(engine, batch(0, micro, engine.global_rank)))
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_no_gradient_is_lost_in_no_sync(ranks: Ranks, stage: int) -> None:
    """Where the last backward of a step is inside too, the step sums what none has sent: weights are plain SGD's."""
    plain = build()
    loss = sum(loss_of(plain, batch(0, micro, rank)) for micro in range(2) for rank in range(RANKS))
    grads = torch.autograd.grad(loss / (2 * RANKS), [*plain.parameters()])
    for found in ranks.run(unsent, stage, world_size=RANKS):
        for mine, p, grad in zip(found, plain.parameters(), grads, strict=True):
            assert torch.allclose(mine, p - 0.5 * grad, rtol=1e-5, atol=1e-6)


def interrupted(stage: int) -> list[Tensor]:
    engine = initialize(
        model=build(), optimizer=partial(SGD, lr=0.5), config={**config(stage, 3), "gradient_clipping": 0}
    )[0]
    losses = iter([loss_of(engine, batch(0, micro, engine.global_rank)) for micro in range(3)])
    with pytest.raises(KeyError), engine.no_sync():
        engine.backward(next(losses))
        raise KeyError("of the program")
    engine.step()
    with engine.no_sync():
        engine.backward(next(losses))  # its forward ran outside
        for wrong in (engine.no_sync().__enter__, engine.step):
            with pytest.raises(AssertionError, match=r"no_sync\(\)"):
                wrong()
        assert engine.inside_no_sync_ctxt and engine.micro_steps == 1
    engine.step()
    engine.backward(next(losses))
    engine.step()
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_wrong_in_no_sync_loses_nothing(ranks: Ranks, stage: int) -> None:
    """An exception of the program's, another no_sync() and a step() inside: what came before counts, and so does what
    comes after."""
    plain = build()
    loss = sum(loss_of(plain, batch(0, micro, rank)) for micro in range(3) for rank in range(RANKS))
    grads = torch.autograd.grad(loss / (3 * RANKS), [*plain.parameters()])
    for found in ranks.run(interrupted, stage, world_size=RANKS):
        for mine, p, grad in zip(found, plain.parameters(), grads, strict=True):
            assert torch.allclose(mine, p - 0.5 * grad, rtol=1e-5, atol=1e-6)


class Moved(torch.nn.Sequential):
    """Has something beside parameters, which its own ``to()`` moves."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.asked = args
        return super().to(*args, **kwargs)


def said_of(**arguments: Any) -> tuple[Any, str]:
    """The engine, and what its start logs."""
    text = io.StringIO()
    handler, level = logging.StreamHandler(text), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine = initialize(**arguments)[0]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return engine, text.getvalue()


def given_beside_the_config() -> tuple[list[Tensor], str, str]:
    model = build()
    sections = dict(optimizer={"type": "Lamb", "params": {"lr": 5.0}}, scheduler={"type": "WarmupLR", "params": {}})
    optimizer = SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    engine, said = said_of(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={**config(1, **sections), "gradient_clipping": 0},
    )
    assert engine.optimizer.optimizer is optimizer and engine.optimizer_name() == "SGD"
    assert engine.lr_scheduler is schedule and engine.config["optimizer"]["type"] == "Lamb"
    for step in range(2):
        engine.backward(loss_of(engine, batch(step, 0, 0)))
        engine.step()
    found = weights(engine)
    engine.destroy()
    engine, alone = said_of(model=build(), optimizer=partial(SGD, lr=0.5), config=config(0))
    engine.destroy()
    return found, said, alone


def test_an_optimizer_and_a_schedule_that_are_given_win_over_the_config_s(ranks: Ranks) -> None:
    """Weights are those of plain SGD at 0.5 and 0.05, and the start says of both sections that they are not used."""
    found, said, alone = ranks.run(given_beside_the_config, world_size=1)[0]
    plain = build()
    for step, rate in enumerate((0.5, 0.05)):
        grads = torch.autograd.grad(loss_of(plain, batch(step, 0, 0)), [*plain.parameters()])
        for p, grad in zip(plain.parameters(), grads, strict=True):
            p.data.sub_(rate * grad)
    for mine, other in zip(found, plain.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
    assert "optimizer.type = Lamb" in said and "initialize(optimizer=...) was given one" in said
    assert "scheduler.type = WarmupLR" in said and "initialize(lr_scheduler=...) was given one" in said
    assert "trust ratio" not in said and "it is not used" not in alone
    assert f"DeepSpeed info: version={VERSION}, git-hash=unknown, git-branch=unknown" in alone


def moves(stage: int) -> None:
    for kind in (Moved, torch.nn.Sequential):
        model = kind(torch.nn.Linear(4, 4))
        settings = config(stage, optimizer=adamw(), bf16={"enabled": True})
        engine = initialize(model=model, config=settings)[0]
        assert getattr(model, "asked", None) == ((engine.device,) if kind is Moved else None)
        assert model[0].weight.dtype == torch.bfloat16
        engine.backward(loss_of(engine, batch(0, 0, engine.global_rank).bfloat16()))
        engine.step()
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_s_own_to_is_called(ranks: Ranks, stage: int) -> None:
    ranks.run(moves, stage, world_size=RANKS)


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
        (dict(model=model, optimizer=foreign, config=config()), "holds 6 tensors that are no parameters of the model"),
        (dict(model=model, optimizer=3, config=config()), "was given a int: give a torch.optim.Optimizer, or a func"),
        (dict(model=model, optimizer=lambda p: p, config=config()), "made a list: it has to return a torch.optim"),
        (dict(model=model, model_parameters=[], config=section), "is empty, so there is nothing to optimize"),
        (dict(model=model, optimizer=inner, lr_scheduler=other, config=config()), "a StepLR of another optimizer"),
        (dict(model=model, config=section, mesh_param=(1, 3)), "(data-parallel, sequence-parallel) sizes"),
        (dict(model=model, config=section, training_data=3), "was given a int: give a torch Dataset."),
        (dict(model=model, config={**section, "gradient_clipp1ng": 1}), "gradient_clipp1ng"),
    ]  # fmt: skip
    for arguments, words in cases:
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            initialize(**arguments)
        assert "\n" not in str(caught.value)
    assert issubclass(DeepSpeedConfigError, ShardfoldError)

    engine = initialize(model=model, optimizer=inner, config=config(2))[0]
    with pytest.raises(AssertionError, match=r"no_sync\(\) is incompatible with gradient partitioning"):
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
        with pytest.raises(AssertionError, match="is illegal to call engine"):
            engine.step()
    engine.destroy()
    engine = initialize(model=build(), config=config(0, optimizer=adamw()))[0]
    with pytest.raises(NotImplementedError, match="stage 1, 2 or 3"):
        engine.coalesce_grad_reduction().__enter__()
    engine.destroy()


def test_wrong_arguments_and_calls_are_refused_with_a_sentence(ranks: Ranks):
    ranks.run(refusals, world_size=RANKS)
