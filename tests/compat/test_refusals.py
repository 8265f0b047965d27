"""What DeepSpeed refuses is refused, with an exception of the same type; what one rank refuses, all refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardfold.compat import deepspeed
from shardfold.compat.deepspeed import comm
from shardfold.compat.deepspeed.config_keys import KEYS, REFUSED
from shardfold.compat.deepspeed.runtime.utils import clip_grad_norm_, get_global_norm_of_tensors
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support.deepspeed_training import batch, build, config, loss_of

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def _refused_keys() -> dict[str, dict[str, Any]]:
    """A config for each key that is refused."""
    found: dict[str, dict[str, Any]] = {}
    for path, key in KEYS.items():
        if key.kind != REFUSED:
            continue
        on = {key.switch: 2 if "size" in key.switch else True} if key.switch else {"x": 1}
        value: Any = {"boolean": True, "integer": 2, "object": on, "any": on, "list of strings": ["autosp"]}[key.type]
        for name in reversed(path.split(".")):
            value = {name: value}
        found[path] = value
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    **_refused_keys(),
    "unknown key": {"zero_optimization": {"stge": 3}},
    "wrong type": {"gradient_clipping": "a lot"},
    "no optimizer of ours": {"optimizer": {"type": "LBFGS"}},
    "argument when it is made": {"optimizer": {"type": "Lamb", "params": {"amsgrad": True}}},
    "monitor that only rank 0 imports": {"comet": {"enabled": True}},
    "schedule": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
    "group size": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
    "sum at stage 3": {"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"},
    "batch": {"train_batch_size": 7},
}


def _refuse(who: tuple[int, ...]) -> dict[str, str]:
    """What this rank is told for each config that the ranks of ``who`` have, and the others a good one."""
    comm.init_distributed()
    said: dict[str, str] = {}
    for name, bad in CONFIGS.items():
        good = config(3, optimizer=SGD)
        given = {**good, **bad} if comm.get_rank() in who else good
        try:
            deepspeed.initialize(model=build(), config=given)
            said[name] = "nothing"
        except ConfigError as error:
            said[name] = str(error)
    engine = deepspeed.initialize(model=build(), config=config(3, optimizer=SGD))[0]
    engine.backward(loss_of(engine, batch(0, 0, engine.global_rank)))
    engine.step()
    engine.destroy()
    return said


def _refuse_data(who: tuple[int, ...]) -> str:
    """What this rank is told where the ranks of ``who`` have a dataset that is none, and the others have one."""
    comm.init_distributed()
    given: Any = 3 if comm.get_rank() in who else torch.utils.data.TensorDataset(torch.ones(4, 4))
    with pytest.raises(ConfigError) as refused:
        deepspeed.initialize(model=build(), config=config(3, optimizer=SGD), training_data=given)
    engine = deepspeed.initialize(model=build(), config=config(3, optimizer=SGD))[0]
    engine.backward(loss_of(engine, batch(0, 0, engine.global_rank)))
    engine.step()
    engine.destroy()
    return str(refused.value)


@pytest.mark.parametrize("who", [(0, 1), (0,), (1,)])
def test_no_rank_waits_for_one_that_refused_its_training_data(who: tuple[int, ...], ranks: Ranks) -> None:
    """The others raise with its words, and all go on with what they make next."""
    told = ranks.run(_refuse_data, who, world_size=2, timeout=120)
    for rank, said in enumerate(told):
        assert "training_data=...) was given a int" in said, said
        assert ("was refused on rank" in said) == (rank not in who), said


@pytest.mark.sampled(3)
@pytest.mark.parametrize("who", [(0, 1), (0,), (1,)])
def test_no_rank_waits_for_one_that_refused_its_config(who: tuple[int, ...], ranks: Ranks) -> None:
    """Every refused config, on both ranks or on one of them: both end with the sentence, and then train together."""
    told = ranks.run(_refuse, who, world_size=2, timeout=120)
    for name in CONFIGS:
        if name == "monitor that only rank 0 imports" and who == (1,):
            assert {said[name] for said in told} == {"nothing"}
            continue
        if len(who) == 1:
            own, other = told[who[0]][name], told[1 - who[0]][name]
            assert f"refused on rank {who[0]}" in other and own in other, name
        for said in told:
            assert said[name] != "nothing" and "\n" not in said[name], name


def _engine(stage: int, *, optimizer: bool = True, **more: Any) -> Any:
    given = config(stage, **{**({"optimizer": SGD} if optimizer else {}), **more})
    return deepspeed.initialize(model=build(), config=given)[0]


def _backward(engine: Any) -> None:
    engine.backward(loss_of(engine, batch(0, 0, 0)))


def _inside(context: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(engine: Any) -> None:
        with getattr(engine, context)():
            call(engine)

    return run


def _enter(context: str) -> Callable[[Any], Any]:
    return _inside(context, lambda engine: None)


NO_OPTIMIZER, UNMANAGED = {"optimizer": False}, {"managed_gradient_accumulation": False}

# Stage, more of the config, the call, DeepSpeed's exception and the key term of its sentence.
CALLS: dict[str, tuple[int, dict[str, Any], Callable[[Any], Any], type[Exception], str]] = {
    "step() in no_sync()": (1, {}, _inside("no_sync", lambda e: e.step()), AssertionError, "illegal to call.*step"),
    "no_sync() again": (0, {}, _inside("no_sync", _enter("no_sync")), AssertionError, "reentry is unsupported"),
    "no_sync() at stage 2": (2, {}, _enter("no_sync"), AssertionError, "incompatible with gradient partitioning"),
    "no_sync() at stage 3": (3, {}, _enter("no_sync"), AssertionError, "stage 3"),
    "coalesced at stage 0": (0, {}, _enter("coalesce_grad_reduction"), NotImplementedError, "requires ZeRO stage 1"),
    "coalesced in no_sync()": (
        1, {}, _inside("no_sync", _enter("coalesce_grad_reduction")), AssertionError, "cannot be nested inside another",
    ),
    "step() in coalesced": (
        1, {}, _inside("coalesce_grad_reduction", lambda e: e.step()), AssertionError, "inside no_sync",
    ),
    "coalesced, unmanaged": (
        1, UNMANAGED, _enter("coalesce_grad_reduction"), AssertionError, "not supported with managed_gradient_acc",
    ),
    "boundary, unmanaged": (
        1, UNMANAGED, lambda e: e.set_gradient_accumulation_boundary(True), AssertionError, "not supported with man",
    ),
    "backward() without optimizer": (0, NO_OPTIMIZER, _backward, AssertionError, "must provide optimizer during init"),
    "step() without optimizer": (0, NO_OPTIMIZER, lambda e: e.step(), AssertionError, "must provide optimizer"),
    "scale() without optimizer": (
        0, NO_OPTIMIZER, lambda e: e.scale(torch.ones((), requires_grad=True) * 1), AssertionError, "must provide opt",
    ),
    "backward() of no scalar": (0, {}, lambda e: e.backward(e(batch(0, 0, 0))), AssertionError, "scalar"),
    "scale() of no scalar": (0, {}, lambda e: e.scale(e(batch(0, 0, 0))), AssertionError, "scalar"),
    "a batch that does not divide": (0, {}, lambda e: e.set_train_batch_size(7), ValueError, "must be divisible"),
    "a loader of nothing": (0, {}, lambda e: e.deepspeed_io(3), ValueError, "torch Dataset"),
    "states to NVMe": (
        3, {}, lambda e: e.offload_states(device=deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.nvme),
        ValueError, "nvme",
    ),
    "states without optimizer": (
        3, NO_OPTIMIZER, lambda e: e.offload_states(), AssertionError, "not supported without an optimizer",
    ),
    "consolidated at stage 2": (
        2, {}, lambda e: e._zero3_consolidated_16bit_state_dict(), ValueError, "ZeRO stage 3",
    ),
    # What DeepSpeed takes and this cannot do.
    "clip_fp32_gradients() at stage 2": (2, {}, lambda e: e.clip_fp32_gradients(), AssertionError, "by itself"),
    "compile(schedule=)": (0, {}, lambda e: e.compile(schedule=[]), ValueError, "schedule"),
    "compile(compiled_autograd_enabled=)": (
        0, {}, lambda e: e.compile(compiled_autograd_enabled=True), ValueError, "compiled_autograd_enabled=True",
    ),
}  # fmt: skip


def _calls() -> dict[str, str]:
    wrong: dict[str, str] = {}
    for name, (stage, more, call, kind, words) in CALLS.items():
        engine = _engine(stage, **more)
        try:
            with pytest.raises(kind, match=words) as error:
                call(engine)
            if "\n" in str(error.value):
                wrong[name] = str(error.value)
        except BaseException as error:
            wrong[name] = f"{type(error).__name__}: {error}"
        engine.destroy()
    return wrong


@pytest.mark.soak
def test_calls_that_are_refused_have_deepspeed_s_types(ranks: Ranks) -> None:
    """Each in one sentence, with the key term of DeepSpeed's."""
    assert ranks.run(_calls, world_size=2) == [{}, {}]


class _Parallel:
    """Half of the ranks are of one model."""

    def get_data_parallel_world_size(self) -> int:
        return 2


def test_other_parallelism_is_refused_where_it_is_given() -> None:
    """``mpu`` and the group of experts of functions on gradients; one of data-parallel ranks alone is fine."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    for call in (
        lambda: clip_grad_norm_([p], 1.0, mpu=_Parallel()),
        lambda: get_global_norm_of_tensors([p], mpu=_Parallel()),
        lambda: get_global_norm_of_tensors([p], moe_ep_group=1),
    ):
        with pytest.raises(ValueError, match="parallelism are not here"):
            call()


@pytest.mark.parametrize(
    "name, value",
    [
        ("zero_quantized_weights", True),
        ("zero_quantized_nontrainable_weights", True),
        ("zero_param_parallel_group", object()),
        ("param_swapper", object()),
        ("tensor_overrides", object()),
    ],
)
def test_init_refuses_what_the_config_refuses(name: str, value: Any) -> None:
    """Arguments of ``zero.Init`` that would change the numbers, or do nothing."""
    with pytest.raises(ConfigError, match=name):
        deepspeed.zero.Init(**{name: value})


def _loaded() -> list[str]:
    said = []
    for stage in (1, 3):
        engine = _engine(stage)
        state = {name: torch.full_like(value, 2.0) for name, value in build().state_dict().items()}
        bias = state.pop("0.bias")
        engine.load_module_state_dict({"module": state}, allowed_missing_keys=["0.bias"])
        found = engine.module_state_dict()
        if not all(value.eq(2).all() for name, value in found.items() if name in state) or found["0.bias"].eq(2).any():
            said.append(f"stage {stage}: other values")
        for more, allowed in (({"x": bias}, ["0.bias"]), ({}, ["2.bias"]), ({}, None)):
            try:
                engine.load_module_state_dict({"module": {**state, **more}}, allowed_missing_keys=allowed)
                said.append(f"stage {stage}: {more}, {allowed} were taken")
            except ValueError:
                pass
        engine.destroy()
    return said


def test_names_that_may_be_missing(ranks: Ranks) -> None:
    """``allowed_missing_keys``: those keep their values; others, and unexpected names, are errors."""
    assert ranks.run(_loaded, world_size=2) == [[], []]


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, whose process group ends with the test."""
    yield
    comm.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_leaf_modules_and_log_level_of_a_config_act(capsys: pytest.CaptureFixture[str]) -> None:
    """Modules are flagged by class, name and suffix, and what matches none is logged."""
    leaf = {"classes": "Tanh", "names": ["0", "9"], "name_suffixes": ["4"]}
    engine = _engine(2, zero_optimization={"stage": 2, "leaf_module": leaf}, log_level="error")
    module: Any = engine.module
    flagged = deepspeed.utils.get_z3_leaf_modules(module)
    assert flagged == [module[0], module[1], module[3], module[4]]
    assert deepspeed.utils.logger.level == 40
    engine.destroy()
    _engine(2, zero_optimization={"stage": 2, "leaf_module": leaf}, log_level="warning").destroy()
    assert deepspeed.utils.logger.level == 30 and "no module named 9" in capsys.readouterr().out
