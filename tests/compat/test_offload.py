"""``offload_optimizer``, ``offload_param``, ``offload_states()``: what rests elsewhere, with the same numbers to the
bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from shardfold.compat.deepspeed import comm
from shardfold.compat.deepspeed.config import read, said
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shardfold.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.presets import PRESETS
from shardfold.testing import Ranks
from tests.support.deepspeed_training import adamw, batch, build, config, loss_of, weights

CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
# As in the examples of Transformers' documentation, for stages 2 and 3.
EXAMPLES: dict[int, dict[str, Any]] = {
    2: {
        "stage": 2, "offload_optimizer": CPU, "allgather_partitions": True, "allgather_bucket_size": 2e8,
        "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
    },
    3: {
        "stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, whose process group ends with the test."""
    yield
    comm.destroy_process_group()


def start(zero: dict[str, Any], **more: Any) -> DeepSpeedEngine:
    if zero["stage"] == 3:  # or all of a model of this size would be whole
        zero = {"stage3_param_persistence_threshold": 0, **zero}
    return initialize(model=build(), config={**config(), "optimizer": adamw(), "zero_optimization": zero, **more})[0]


def steps(engine: DeepSpeedEngine, first: int, count: int = 2) -> list[float]:
    dtype = next(engine.module.parameters()).dtype
    losses: list[float] = []
    for step in range(first, first + count):
        loss = loss_of(engine, batch(step, 0, engine.global_rank).to(dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def tiers(engine: DeepSpeedEngine) -> dict[str, str]:
    """Where each state is that has bytes of its own."""
    return {row.state: row.tier for row in engine._core.memory().rows if row.held}


def trained(zero: dict[str, Any], **more: Any) -> tuple[list[float], list[Tensor], dict[str, str]]:
    engine = start(zero, **more)
    found = steps(engine, 0, 3), weights(engine), tiers(engine)
    engine.destroy()
    return found


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# -- a config that offloads

HOST = {"offload_optimizer": CPU}
STAGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "1": ({"stage": 1, **HOST}, {"master", "moments"}),
    "1, older word": ({"stage": 1, "cpu_offload": True}, {"master", "moments"}),
    "2": (EXAMPLES[2], {"grads", "master", "moments"}),
    "3": ({"stage": 3, **HOST}, {"grads", "master", "moments"}),
    "3, parameters too": (EXAMPLES[3], {"params", "grads", "master", "moments"}),
    "3, parameters only": ({"stage": 3, "cpu_offload_params": True}, {"params", "grads", "master", "moments"}),
}


def each_stage(bf16: bool) -> None:
    more: dict[str, Any] = BF16 if bf16 else {}
    for name, (zero, host) in STAGES.items():
        wanted, on_device, _ = trained({"stage": zero["stage"]}, **more)
        losses, values, where = trained(zero, **more)
        assert losses == wanted and same(values, on_device), name
        assert {state for state, tier in where.items() if tier == "host"} == host & where.keys(), (name, where)
        assert set(where) >= host - {"master"}, (name, where)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_offloading_changes_where_states_rest_and_no_number(bf16: bool):
    """At every stage, on one rank: losses and weights are equal to the bit, and the states rest in host memory."""
    each_stage(bf16)


@pytest.mark.soak
def test_two_ranks_offload(ranks: Ranks):
    """As on one rank."""
    ranks.run(each_stage, True, world_size=2)


@pytest.mark.usefixtures("alone")
def test_a_part_of_the_optimizer_stays_on_the_device():
    """`ratio`: at least that part of the states rests in host memory, and some of them do not; no number changes."""
    wanted, on_device, _ = trained({"stage": 3})
    engine = start({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.4}})
    losses = steps(engine, 0, 3)
    held = {row.tier: row.held for row in engine._core.memory().rows if row.state == "moments"}
    assert losses == wanted and same(weights(engine), on_device)
    assert engine.zero_partial_offload() == 0.4
    assert 0.4 * sum(held.values()) <= held["host"] < sum(held.values())
    engine.destroy()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [AdamW, FusedAdam, DeepSpeedCPUAdam])
def test_the_optimizer_of_any_name_updates_on_the_host(kind: type[Optimizer]):
    """Of PyTorch's, and of DeepSpeed's for the GPU and for the CPU: the same numbers."""
    found: list[list[float]] = []
    for zero in ({"stage": 2}, EXAMPLES[2]):
        model = build()
        optimizer: Any = kind(model.parameters(), lr=0.01, weight_decay=0.1)  # pyright: ignore[reportCallIssue]
        engine = initialize(model=model, optimizer=optimizer, config=config() | {"zero_optimization": zero})[0]
        found.append(steps(engine, 0, 3))
        engine.destroy()
    assert found[0] == found[1]


@pytest.mark.usefixtures("alone")
def test_states_rest_in_files_of_the_folder(tmp_path: Any):
    """Stage 3 with nvme: the optimizer's states, gradients and parameters are on disk. A folder that is not there is
    made, as DeepSpeed does; what cannot be one is refused, and an optimizer that steps over all states at once."""
    nvme: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    wanted, on_device, _ = trained({"stage": 3})
    losses, values, where = trained(nvme)
    assert losses == wanted and same(values, on_device)
    assert where["moments"] == where["master"] == where["grads"] == "disk" and where["params"] == "device"
    losses, values, where = trained({**nvme, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}})
    assert losses == wanted and same(values, on_device) and set(where.values()) == {"disk"}
    engine = start(nvme)
    assert engine.zero_nvme_offload_optimizer() and not engine.zero_cpu_offload()
    engine.destroy()
    nvme["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path / "new" / "er")}
    start(nvme, optimizer={"type": "SGD", "params": {"lr": 0.01}}).destroy()
    assert (tmp_path / "new" / "er").is_dir()
    with pytest.raises(ConfigError, match=r"offload_optimizer.device is 'nvme'.* LAMB .*device: 'cpu'"):
        start(nvme, optimizer={"type": "Lamb", "params": {"lr": 0.01}})
    (tmp_path / "file").touch()
    nvme["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path / "file")}
    with pytest.raises(ConfigError, match=r"offload_optimizer.nvme_path is '.*file', where no file can be made: "):
        start(nvme)


def test_what_does_not_act_is_listed_or_refused():
    """Options without effect, and devices that are not where they were asked for, with a reason each."""

    def notes(zero: dict[str, Any]) -> str:
        return said(read({"train_batch_size": 8, "gradient_clipping": 1, "zero_optimization": zero}).notes)

    assert not notes({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU})
    assert "for stage 3, and the stage is 2" in notes({"stage": 2, "offload_param": CPU})
    assert "the stage is 0" in notes({"stage": 0, "offload_optimizer": CPU})
    assert "ratio" not in notes({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}})
    assert "no part of" in notes({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0}})
    both = {"offload_optimizer": {**CPU, "ratio": 0.5}, "offload_param": CPU}
    assert "with the parameters all" in notes({"stage": 3, **both})
    assert "pinned" in notes({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}})
    assert "rests in host memory" in notes({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}})
    both = {"device": "nvme", "nvme_path": "/x"}
    assert not notes({"stage": 3, "offload_optimizer": both, "offload_param": both})
    for zero, words in (
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "offload_optimizer.nvme_path"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.nvme_path"),
        ({"stage": 2, "cpu_offload": True, "offload_optimizer": CPU}, "older word"),
        ({"stage": 2, "compute_grad_norm": False, "offload_optimizer": CPU}, "compute_grad_norm"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            notes(zero)


def test_a_folder_is_of_the_disk_tier():
    """Of a cell that rests elsewhere, or that is no path, it is refused."""
    with pytest.raises(LayoutError, match="moments has a folder, but moments rest in the device tier"):
        PRESETS["zero2"].edit("moments", folder="/x")
    with pytest.raises(LayoutError, match="it is the path of a folder"):
        PRESETS["zero2"].edit("moments", tier="disk", folder=3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("there", [False, True], ids=["from the device", "to the device"])
def test_a_checkpoint_does_not_know_of_tiers(tmp_path: Any, there: bool):
    """What an engine that offloads saves, one that does not loads, and the other way round: the run goes on as if it
    had not ended."""
    plain, host = {"stage": 3}, EXAMPLES[3]
    engine = start(host if there else plain)
    steps(engine, 0)
    engine.save_checkpoint(tmp_path)
    wanted = steps(engine, 2)
    engine.destroy()
    engine = start(plain if there else host)
    engine.load_checkpoint(tmp_path)
    assert steps(engine, 2) == wanted
    engine.destroy()


# -- states that move between steps


def move_between_steps(stage: int) -> None:
    wanted, on_device, _ = trained({"stage": stage}, **BF16)
    engine = start({"stage": stage}, **BF16)
    losses, home = steps(engine, 0, 1), tiers(engine)
    engine.offload_states()
    away = {state for state, tier in tiers(engine).items() if tier == "host"}
    assert away == {"master", "moments"} | ({"params"} if stage == 3 else set()) | ({"grads"} if stage > 1 else set())
    engine.reload_states()
    assert tiers(engine) == home
    losses += steps(engine, 1, 1)
    # What is away is read where it is; a forward brings back parameters only, and a step what it needs.
    engine.offload_states()
    there = weights(engine)
    with torch.no_grad():
        loss_of(engine, batch(9, 0, 0).bfloat16())
    assert tiers(engine)["moments"] == tiers(engine)["master"] == "host" and tiers(engine)["params"] == "device"
    assert same(weights(engine), there)
    losses += steps(engine, 2, 1)
    assert tiers(engine) == home and losses == wanted and same(weights(engine), on_device)
    engine.destroy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_move_to_host_memory_and_back_between_steps(ranks: Ranks, stage: int):
    """The device's bytes go down, what needs the states brings them back, and the training is equal to the bit."""
    ranks.run(move_between_steps, stage, world_size=2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "Lamb"])
def test_the_named_states_move(kind: str):
    """On one rank, of the fused update, of a class of PyTorch's and of one of ours: only moments leave, and the run is
    equal to the bit."""
    optimizer = {"type": kind, "params": {"lr": 0.01}}
    wanted, on_device, _ = trained({"stage": 3}, optimizer=optimizer)
    engine = start({"stage": 3}, optimizer=optimizer)
    losses, home = steps(engine, 0, 2), tiers(engine)
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states])
    assert tiers(engine) == {**home, "moments": "host"}
    assert losses + steps(engine, 2, 1) == wanted and same(weights(engine), on_device) and tiers(engine) == home
    engine.offload_states(device=OffloadDeviceEnum.none)
    assert tiers(engine) == home
    engine.destroy()
    engine = start(EXAMPLES[3])
    with pytest.raises(AssertionError, match="not supported for offloaded parameters"):
        engine.offload_states()
    engine.destroy()
