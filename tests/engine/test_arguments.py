"""What is no argument of a public call: one sentence that names the argument and how to mend it, and nothing done."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import CheckpointError, ConfigError, ModelError, ShardfoldError, UsageError
from shardfold.testing import Ranks
from tests.support.options import grouped

SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = torch.optim.AdamW
ODD = object()
WRONG: dict[str, Any] = {
    "None": None,
    "text": "x",
    "-1": -1,
    "NaN": math.nan,
    "1e300": 1e300,
    "object": ODD,
    "list": [1],
}
"""Given for every argument; what a row names is legal there."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def engine(**more: Any) -> sf.Engine:
    return sf.Engine(model(), **grouped(**{"optimizer": SGD, "layout": "zero3", **more}))


def entered(manager: AbstractContextManager[Any]) -> None:
    with manager:
        pass


def inside_whole(source: Any = None, strict: Any = True) -> None:
    entered(sf.whole(nn.Linear(2, 2).weight, source=source, strict=strict))


def loader(dataset: Any = None, **more: Any) -> sf.Loader:
    data = torch.utils.data.TensorDataset(torch.arange(8)) if dataset is None else dataset
    return sf.Loader(data, **{"sampler": sf.Sampler(8, 2), **more})


ENGINE: dict[str, set[str]] = {
    "layout": set(), "precision": set(), "accumulate": set(), "units": {"None"}, "overlap": {"None"},
    "device": {"None"},
    "activations": {"None"}, "clip_norm": {"None", "1e300"}, "loss_scale": {"None"}, "seed": {"-1"},
    "lr_schedule": {"None"}, "mesh": {"None"}, "weights": {"None"}, "patience": set(), "timeout": set(),
    "debug": set(),
    "optimizer": {"None"}, "runtime": {"None"}, "init": {"None"},
}  # fmt: skip
OTHERS: list[tuple[Callable[..., Any], dict[str, set[str]]]] = [
    (sf.Clip, {"norm": {"1e300"}, "value": {"1e300"}}),
    (partial(sf.Clip, norm=1.0), {"p": {"1e300"}, "error_if_nonfinite": set()}),
    (sf.LossScale, {n: set() for n in ("initial", "backoff", "interval", "hysteresis", "refill", "delay", "floor")}),
    (sf.LossScale, {"growth": {"1e300"}, "patience": {"None"}}),
    (sf.Overlap, {"prefetch": set(), "reduces_in_flight": {"None"}, "block": set(), "order": set()}),
    (sf.Overlap, {"update_thread": set()}),
    (partial(sf.Sampler, dataset=8, batch_size=2), {"seed": {"-1"}, "shuffle": set(), "drop_last": set()}),
    (partial(sf.Sampler, dataset=8, batch_size=2), {"fill_last": set(), "rank": {"None"}, "num_ranks": {"None"}}),
    (partial(sf.Sampler, batch_size=2), {"dataset": {"list"}}),
    (partial(sf.Sampler, 8), {"batch_size": set()}),
    (loader, {"dataset": {"None", "list"}, "sampler": set(), "num_workers": set()}),
    (lambda **k: entered(sf.sharded_init(**k)), {"patience": {"None"}, "timeout": set()}),
    (lambda **k: entered(sf.sharded_init(**k)), {"apply": set(), "hollow": set()}),
    (lambda **k: entered(sf.sharded_init(**k)), {"dtype": {"None"}, "device": {"None"}, "shard_device": {"None"}}),
    (inside_whole, {"source": {"None"}, "strict": set()}),
    (lambda parameters: entered(sf.whole(parameters)), {"parameters": set()}),
    (sf.set_rng_state, {"state": set()}),
    (sf.Checkpoint, {"path": set()}),
    (partial(sf.load_model, model=nn.Linear(2, 2)), {"path": set()}),
    (partial(sf.load_model, "x"), {"model": set()}),
    (partial(sf.load_model, "x", nn.Linear(2, 2)), {"dtype": {"None"}, "device": {"None"}, "strict": set()}),
    (sf.Activations, {"mode": set(), "among": set(), "smallest": set(), "kept": set()}),
    (sf.Activations, {"folder": {"None"}}),
    (sf.Layout, {"params": {"None"}, "held": {"None"}, "grads": set(), "master": set(), "moments": set()}),
    (sf.Parallel, {"msh": set(), "device": set()}),
    (sf.Runtime, {"gpu": set()}),
    (sf.Init, {"seeds": set()}),
    (sf.Auto, {"samples": set()}),
    (sf.Layout, {"gather": set(), "reduce": set(), "activations": set()}),
    (partial(sf.PRESETS["zero3"].edit, "params"), {"dtype": set(), "tier": set(), "over": set(), "ovr": set()}),
    (sf.PRESETS["zero3"].replace, {"parms": set()}),
    (sf.Precision, {"compute": set(), "master": set(), "autocast": {"None"}, "tf32": {"None"}, "rounding": set()}),
]  # fmt: skip


@pytest.mark.sampled(18)
@pytest.mark.parametrize("argument", ENGINE)
def test_an_engine_names_the_argument_that_is_none(argument: str):
    """None, a text, -1, NaN, a huge number, an object, a list: refused by name, and the model stays a plain one."""
    for name, wrong in WRONG.items():
        if name in ENGINE[argument]:
            continue
        mine = model()
        with pytest.raises((ConfigError, ModelError)) as caught:
            sf.Engine(mine, **grouped(**{"optimizer": SGD, argument: wrong}))
        named = {"mesh": "parallel"}.get(argument, argument)  # where it is typed
        assert named in str(caught.value), f"{argument}={name}: {caught.value}"
        sf.Engine(mine, optimizer=SGD).close()


@pytest.mark.parametrize(("call", "legal"), OTHERS)
def test_public_constructors_refuse_what_is_no_argument(call: Callable[..., Any], legal: dict[str, set[str]]):
    """The same of every other constructor and block."""
    for argument, fine in legal.items():
        for name, wrong in WRONG.items():
            if name not in fine:
                with pytest.raises(ShardfoldError):
                    call(**{argument: wrong})


SENTENCES: dict[str, tuple[Callable[[], Any], type[ShardfoldError], str]] = {
    "no model": (lambda: sf.Engine(None), ModelError, "the model is None: give a torch.nn.Module"),  # pyright: ignore
    "a class": (lambda: sf.Engine(nn.Linear), ModelError, "Linear is a class: give a module"),  # pyright: ignore
    "an engine": (lambda: sf.Engine(engine()), ModelError, "Its own model is its .module"),  # pyright: ignore
    "TorchScript": (
        lambda: sf.Engine(nn.Sequential(torch.jit.script(nn.Linear(2, 2)))), ModelError, "0 is TorchScript"
    ),
    "DataParallel": (lambda: sf.Engine(nn.DataParallel(model())), ModelError, "torch's DataParallel"),
    "inference mode": (
        partial(torch.inference_mode()(lambda of: sf.Engine(of, optimizer=SGD)), model()), ModelError,
        "make the engine outside of it",
    ),
    "an inference tensor": (
        lambda: sf.Engine(torch.inference_mode()(model)(), optimizer=SGD), ModelError, "0.weight was made under"
    ),
    "a pattern": (lambda: engine(units="0.*"), ConfigError, r"units=\['0.\*'\]"),
    "meta": (lambda: engine(device="meta"), ConfigError, "models are trained on 'cpu'"),
    "no such GPU": (lambda: engine(device="cuda:99"), ConfigError, "PyTorch finds .* of the type cuda here"),
    "no time": (lambda: engine(patience=0), ConfigError, "patience= is 0: it is a number of seconds"),
    "an axis": (lambda: engine(mesh={"intra": "x"}), ConfigError, "'x' for 'intra'"),
    "a schedule": (lambda: engine(lr_schedule=3), ConfigError, "lr_schedule= was given a int"),
    "all frozen": (lambda: sf.Engine(model().requires_grad_(False), optimizer=SGD), ConfigError, "are frozen"),
    "no parameters": (lambda: sf.Engine(nn.ReLU(), optimizer=SGD), ConfigError, "it has no parameters"),
    "a seed": (lambda: sf.Sampler(8, 2, seed=1.5), ConfigError, "the sampler's seed is 1.5"),  # pyright: ignore
    "a decay": (lambda: sf.Average(engine(), decay="x"), ConfigError, r"decay='x'\)"),  # pyright: ignore
    "averaged": (lambda: sf.Average(None), ConfigError, "the engine is None"),  # pyright: ignore
    "deepspeed's offload": (lambda: engine(offload_optimizer="cpu"), ConfigError, "Did you mean 'offload'"),
    "deepspeed's drive": (lambda: engine(nvme_path="/mnt/a"), ConfigError, "Did you mean 'offload'"),
    "a loader's order": (lambda: loader(shuffle=True), ConfigError, "the order of samples is the sampler's"),
    "a loader's option": (lambda: loader(num_worker=1), ConfigError, "Did you mean 'num_workers'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.script
@pytest.mark.parametrize("case", SENTENCES)
def test_the_sentence_says_how_to_mend_it(case: str):
    """What is meant most often instead is in the message."""
    call, kind, words = SENTENCES[case]
    with pytest.raises(kind, match=words):
        call()


def used_wrongly(folder: str) -> dict[str, str]:
    """What calls on an engine say of what is no argument; the engine then trains as if nothing had been called."""
    trained, x, told = engine(), torch.ones(2, 4), dict[str, str]()
    calls: dict[str, Callable[[], Any]] = {
        "a number": lambda: trained.backward(1.0),  # pyright: ignore[reportArgumentType]
        "a tensor of outputs": lambda: trained.backward(trained(x)),
        "a detached loss": lambda: trained.backward(trained(x).sum().detach()),
        "a loss of integers": lambda: trained.backward(trained(x).argmax()),
        "a weight": lambda: trained.backward(trained(x).sum(), weight="x"),  # pyright: ignore[reportArgumentType]
        "a closure": lambda: trained.step(lambda: 1.0),  # pyright: ignore[reportArgumentType]
        "mean": lambda: trained.mean(None),  # pyright: ignore[reportArgumentType]
        "agree": lambda: trained.max_over_ranks(None),  # pyright: ignore[reportArgumentType]
        "agree of text": lambda: trained.max_over_ranks("x"),  # pyright: ignore[reportArgumentType]
        "one rank's": lambda: trained.mean("x" if trained.rank else 1.0),  # pyright: ignore[reportArgumentType]
        "last": lambda: setattr(trained, "last_micro_batch", "x"),
        "gathered": lambda: entered(trained.gathered(3)),  # pyright: ignore[reportArgumentType]
        "stats": lambda: trained.stats(peak_flops="x"),  # pyright: ignore[reportArgumentType]
        "strict": lambda: trained.load(folder, strict="x"),  # pyright: ignore[reportArgumentType]
    }
    for name, call in calls.items():
        try:
            call()
        except ShardfoldError as error:
            told[name] = str(error)
        trained.zero_grad()
    trained.backward(trained(x).sum())
    assert trained.step().updated
    told["steps"] = str(trained.steps)
    trained.close()
    return told


@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_on_an_engine_refuse_and_change_nothing(ranks: Ranks, world_size: int, tmp_path: Path):
    """Also where one rank only was given the wrong thing, all raise, and training goes on."""
    for rank, told in enumerate(ranks.run(used_wrongly, str(tmp_path), world_size=world_size)):
        words = {
            "a number": "the loss is of type float: give the tensor that forward made, without .item()",
            "a tensor of outputs": "the loss has shape (2, 4), but a backward begins at one number: give loss.mean()",
            "a detached loss": "the loss, of float32, does not require grad, so no parameter leads to it: it was detac",
            "a loss of integers": "engine.backward(): the loss, of int64, does not require grad, so no parameter leads",
            "a weight": "engine.backward(weight='x')", "a closure": "engine.backward(loss), then engine.step()",
            "mean": "engine.mean(): the value is None", "agree": "engine.max_over_ranks(): the values are None",
            "agree of text": "engine.max_over_ranks(): the values are 'x'", "last": "last_micro_batch= is 'x'",
            "gathered": "no parameter 3", "stats": "peak_flops='x'", "strict": "strict= is 'x': it is True or False",
            "steps": "1",
        }  # fmt: skip
        if world_size == 2:
            words["one rank's"] = "the value is 'x'" if rank else "refused on another rank"
        for name, said in words.items():
            assert said in told[name], (name, told.get(name))


def test_what_a_module_has_is_found_by_the_message():
    """An engine is no module: hasattr() says so, and the error says where the name is."""
    mine = engine()
    for name in ("eval", "train", "parameters", "state_dict_", "to", "cuda", "named_modules", "state"):
        assert not hasattr(mine, name)
    with pytest.raises(AttributeError, match=r"use engine\.module\.eval"):
        mine.eval()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"use engine\.optimizer\.state"):
        _ = mine.state  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="Did you mean 'zero_grad'"):
        mine.zero_grads()  # pyright: ignore[reportAttributeAccessIssue]
    for name, now in (("agree", "max_over_ranks"), ("synchronize", "outer_step"), ("activations", "count_saved")):
        with pytest.raises(AttributeError, match=f"Did you mean '{now}'"):
            getattr(mine, name)


GROUPED: dict[str, tuple[dict[str, Any], str]] = {
    "mesh": ({"mesh": {"intra": 1}}, "parallel=sf.Parallel(mesh=...)"),
    "several": ({"mesh": {"tensor": 1}, "seed": 1, "tensor": "auto"}, "parallel=sf.Parallel(mesh=..., tensor=...)"),
    "attention": ({"attention": "ring"}, "parallel=sf.Parallel(attention=...)"),
    "sequence_parallel": ({"sequence_parallel": True}, "parallel=sf.Parallel(sequence_parallel=...)"),
    "pipeline": ({"pipeline": "1f1b"}, "parallel=sf.Parallel(pipeline=...)"),
    "stages": ({"stages": ["1"]}, "parallel=sf.Parallel(stages=...)"),
    "device": ({"device": "cpu"}, "runtime=sf.Runtime(device=...)"),
    "timeout": ({"timeout": 1.0}, "runtime=sf.Runtime(timeout=...)"),
    "patience": ({"patience": 1.0}, "runtime=sf.Runtime(patience=...)"),
    "debug": ({"debug": True}, "runtime=sf.Runtime(debug=...)"),
    "weights": ({"weights": {}}, "init=sf.Init(weights=...)"),
    "seed": ({"seed": 1}, "init=sf.Init(seed=...)"),
    "units": ({"units": ["0"]}, "init=sf.Init(units=...)"),
    "clip": ({"clip": None}, "clip_norm=sf.Clip(...)"),
    "outer": ({"outer": None}, "layout=sf.PRESETS['zero3'].replace(outer=sf.Outer(...))"),
    "sample": ({"sample": 1}, "layout=sf.Auto(sample=...)"),
}


@pytest.mark.parametrize("case", GROUPED)
def test_what_stands_in_a_value_is_told_with_it(case: str):
    """One sentence names the value and how it is given."""
    flat, said = GROUPED[case]
    with pytest.raises(ConfigError) as caught:
        sf.Engine(model(), optimizer=SGD, **flat)
    assert str(caught.value) == f"Engine() has no argument {next(iter(flat))!r}: give {said}."


def test_names_of_others_and_slips_lead_to_the_value():
    """What DeepSpeed and FSDP call it, and one letter wrong."""
    for name, said in (
        ("device_mesh", "parallel=sf.Parallel(mesh=...)"),
        ("wrap_policy", "init=sf.Init(units=...)"),
        ("gpu", "runtime=sf.Runtime(device=...)"),
        ("timeuot", "runtime=sf.Runtime(timeout=...)"),
    ):
        with pytest.raises(ConfigError) as caught:
            sf.Engine(model(), optimizer=SGD, **{name: 1})  # pyright: ignore[reportArgumentType]
        assert str(caught.value) == f"Engine() has no argument {name!r}. Did you mean {said}?"


def test_an_engine_says_whether_and_why_it_is_closed():
    mine = engine()
    assert mine.closed is False and mine.close_reason == ""
    mine.close()
    assert mine.closed is True and mine.close_reason.startswith("this engine is closed")


def test_a_mesh_alone_and_what_is_left_out_say_the_same():
    for given in ({"intra": 1}, sf.Parallel(mesh={"intra": 1})):
        with closing(sf.Engine(model(), parallel=given)) as mine:
            assert dict(mine.mesh.sizes) == {"inter": 1, "intra": 1}
    assert repr(sf.Parallel(mesh={"tensor": 2}, pipeline="1f1b")) == "Parallel(mesh={'tensor': 2})"


@pytest.mark.parametrize("given", ["tensor", sf.Parallel])
def test_what_is_neither_a_mesh_nor_a_value_is_told_by_the_name_that_was_written(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^parallel= is .*: give a mesh, as in \{'intra': 8\}, or sf.Parallel"):
        sf.Engine(model(), parallel=given)


def wrapped() -> str:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        sf.Engine(nn.parallel.DistributedDataParallel(model()))
    except ModelError as error:
        return str(error)
    return "nothing"


def test_a_model_that_sends_its_gradients_itself_is_refused(ranks: Ranks):
    """Under DistributedDataParallel gradients would be averaged twice."""
    assert all("torch's DistributedDataParallel" in said for said in ranks.run(wrapped, world_size=2))


# -- checkpoints


def saved(folder: Path, optimizer: Any) -> Path:
    mine = engine(optimizer=optimizer)
    mine.backward(mine(torch.ones(2, 4)).sum())
    mine.step()
    mine.save(folder, wait=True)
    mine.close()
    return folder


def refusal(folder: Path, mine: sf.Engine) -> str:
    with pytest.raises(CheckpointError) as caught:
        mine.load(folder)
    return str(caught.value)


def test_a_checkpoint_says_once_that_nothing_was_changed(tmp_path: Path):
    """Of names, of optimizers of two kinds, and of one kind with other states, which the message tells apart."""
    folder = saved(tmp_path / "step", ADAMW)
    other = sf.Engine(nn.Linear(3, 3), optimizer=ADAMW)
    kinds = [refusal(folder, mine) for mine in (other, engine(), engine(optimizer=partial(ADAMW, amsgrad=True)))]
    assert [said.lower().count("nothing was changed") for said in kinds] == [1, 1, 1]
    assert "was written with AdamW(amsgrad=False) and the engine has AdamW(amsgrad=True)" in kinds[2]


def test_options_of_another_optimizer_are_noted(tmp_path: Path):
    """``strict=False`` takes over what both classes have, such as the learning rate, and says so."""
    folder = saved(tmp_path / "step", partial(ADAMW, lr=0.003))
    mine = engine()
    notes = mine.load(folder, strict=False).notes
    assert mine.optimizer is not None and mine.optimizer.param_groups[0]["lr"] == 0.003
    assert any("Options of AdamW that SGD has too were taken over: lr" in note for note in notes)


# -- beside engines


@pytest.mark.parametrize("number", ["nan", "0", "1e300"])
def test_explain_says_which_numbers_of_parameters_there_are(number: str, capsys: pytest.CaptureFixture[str]):
    """NaN is below every bound and above it: the sentence gives both."""
    from shardfold.tools.cli import main

    with pytest.raises(SystemExit):
        main(["explain", "--params", number])
    assert f"--params {float(number):g}: it is a number of parameters, from 1 to 1e+18." in capsys.readouterr().err


def test_a_schedule_without_an_optimizer_is_listed_and_evaluation_goes_on(capsys: pytest.CaptureFixture[str]):
    """DeepSpeed makes no schedule then; the config is as one that trains, given to an engine that evaluates."""
    from shardfold.compat import deepspeed

    config = {"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}
    evaluating, optimizer, _, schedule = deepspeed.initialize(model=model(), config=config)
    assert optimizer is None and schedule is None
    assert isinstance(evaluating(torch.ones(2, 4)), Tensor)
    told = capsys.readouterr().out
    assert "scheduler.type = WarmupLR" in told and "it is not used: there is no optimizer" in told
    evaluating.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("given", [nn.Linear, dict])
def test_a_class_of_no_optimizer_makes_none(given: type) -> None:
    """It is not called, so nothing of it is told in its own words."""
    with pytest.raises(ConfigError, match=r"is neither a torch.optim.Optimizer nor something that makes one"):
        sf.Engine(nn.Linear(2, 2), optimizer=given)


# -- what is assigned to an engine that is made

ASSIGNED: dict[str, str] = {  # and what is said
    "clip_norm": "An engine takes clip_norm= when it is made.",
    "clip": "An engine takes clip_norm=sf.Clip(...) when it is made.",
    "layout": "An engine takes layout= when it is made.",
    "tensor": "An engine takes parallel=sf.Parallel(tensor=...) when it is made.",
    "acumulate": "Did you mean 'accumulate'?",
    "gradient_accumulation_steps": "Did you mean 'accumulate'?",
    "lr": "The optimizer's settings are in engine.optimizer.param_groups.",
    "steps": "engine.steps is only to be read.",
    "my_own": "Known: accumulate, last_micro_batch.",
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_what_would_do_nothing_cannot_be_assigned(name: str) -> None:
    """One sentence says where it is set instead, and the engine is as it was."""
    with closing(sf.Engine(nn.Linear(2, 2), optimizer=partial(torch.optim.SGD, lr=0.1))) as mine:
        before = dict(vars(mine))
        with pytest.raises(ConfigError) as raised:
            setattr(mine, name, 4)
        assert str(raised.value) == f"engine.{name} = 4 would do nothing. {ASSIGNED[name]}"
        assert vars(mine) == before


class Derived(sf.Engine):
    """With something of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, optimizer=partial(torch.optim.SGD, lr=0.1))
        self.mine = 3


def test_what_acts_can_be_assigned() -> None:
    """What is read at each step, another function in place of a method, and what a derived class adds; but that cannot
    take what its engine has."""
    with closing(Derived(nn.Linear(2, 2))) as mine:
        mine.accumulate, mine.last_micro_batch, mine.mine = 2, True, 4
        called: list[str] = []
        step = mine.step
        mine.step = lambda *_, **__: called.append("step") or step()  # type: ignore[method-assign]
        mine.backward(mine(torch.ones(1, 2)).sum())
        mine.step()
        assert (called, mine.mine, mine.steps) == (["step"], 4, 1)
        with pytest.raises(ConfigError, match="would do nothing"):
            mine.clip = sf.Clip(norm=1.0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_loss_of_a_model_that_trains_nothing_says_so(precision: str):
    """Its optimizer may be there for what is unfrozen later; ``scale()`` says the same where it acts."""
    frozen, scale = model(), None if precision == "fp32" else 1.0
    sgd = SGD(frozen.requires_grad_(False).parameters())
    with closing(sf.Engine(frozen, optimizer=sgd, precision=precision, loss_scale=scale)) as mine:
        loss = mine(torch.ones(2, 4)).sum()
        with pytest.raises(UsageError, match=r"all of the model's parameters are frozen .* unfreeze what is to be"):
            mine.backward(loss)
        if precision == "fp16":
            with pytest.raises(UsageError, match=r"engine.scale\(\): the loss does not require grad, because all of"):
                mine.scale(loss)
        mine.module.requires_grad_(True)
        mine.backward(mine(torch.ones(2, 4)).sum())
        assert mine.step().step == 1


def _alone_without_a_loss() -> str:
    """Rank 1 catches what its detached loss raises, and leaves its micro-batch out, which rank 0 does not."""
    with closing(engine(layout="ddp")) as mine:
        try:
            for step in range(2):
                loss = mine(torch.ones(2, 4)).sum()
                if mine.rank and not step:
                    with pytest.raises(UsageError):
                        mine.backward(loss.detach())
                    continue
                mine.backward(loss)
                mine.step()
        except ShardfoldError as error:
            return str(error)
    return "nothing was raised"


def test_a_rank_that_drops_a_loss_that_cannot_begin_a_backward_is_told_of(ranks: Ranks):
    for said in ranks.run(_alone_without_a_loss, world_size=2, timeout=60):
        assert "the ranks are a" in said, said
