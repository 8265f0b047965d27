"""The names of DeepSpeed's face: the table in the docs, and those that read, launch and log."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold.compat.deepspeed as deepspeed
from shardfold.compat.deepspeed import comm
from shardfold.compat.deepspeed.comm.config import CommsLoggerConfig, DeepSpeedCommsConfig
from shardfold.compat.deepspeed.git_version_info import version
from shardfold.compat.deepspeed.launcher import constants, runner
from shardfold.compat.deepspeed.monitor.config import CSVConfig, DeepSpeedMonitorConfig, TensorBoardConfig, WandbConfig
from shardfold.compat.deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from shardfold.compat.deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from shardfold.compat.deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from shardfold.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from shardfold.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from shardfold.compat.deepspeed.utils.comms_logging import comms_logger
from shardfold.errors import ConfigError, UsageError
from tests.support.face_names import markdown

ROOT = Path(__file__).parents[2]
ADAM = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, whose process group ends with the test."""
    yield
    comm.destroy_process_group()


def made(**more: Any) -> Any:
    model = nn.Linear(4, 4)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={**ADAM, **more})[0]


# -- the table


def texts() -> list[str]:
    """The files that test the face, and the expressions whose values are DeepSpeed's."""
    files = [*(ROOT / "tests" / "compat").glob("test_*.py"), ROOT / "benchmarks" / "deepspeed_behaviours.py"]
    return [path.read_text(encoding="utf-8") for path in files]


def test_the_names_in_the_docs_are_what_there_is():
    """Each name is a word of a file of tests, or among those of which only the signature is compared."""
    assert markdown(texts()) in (ROOT / "docs" / "from-deepspeed.md").read_text(encoding="utf-8"), (
        "docs/from-deepspeed.md is behind: paste what tests.support.face_names.markdown(texts()) returns"
    )


@pytest.mark.soak
def test_importing_all_that_a_script_uses_leaves_the_compiler_out():
    """It takes longer than torch. An optimizer imports it."""
    script = (
        "import sys, shardfold; shardfold.compat.install(); import deepspeed\n"
        "deepspeed.initialize, deepspeed.DeepSpeedEngine, deepspeed.zero.Init, deepspeed.comm.all_reduce\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0


# -- sections of a config


def test_sections_are_classes_with_the_documented_defaults():
    zero = DeepSpeedZeroConfig()
    assert (zero.stage, zero.overlap_comm, zero.reduce_bucket_size, zero.offload_param) == (0, False, 500_000_000, None)
    assert DeepSpeedZeroConfig(stage=3).overlap_comm is True
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    assert DeepSpeedZeroConfig(stage=2, offload_optimizer={"device": "cpu"}).offload_optimizer.device == "cpu"
    assert DeepSpeedZeroOffloadParamConfig(device="nvme", nvme_path="/x").buffer_count == 5
    assert DeepSpeedZeroOffloadOptimizerConfig().device == "none"
    assert DeepSpeedFP16Config(enabled=True).initial_scale_power == 16 and not DeepSpeedBF16Config().enabled
    assert DeepSpeedFlopsProfilerConfig().profile_step == 1 and CommsLoggerConfig().prof_all
    assert DeepSpeedCommsConfig({"comms_logger": {"enabled": True}}).comms_logger.enabled
    assert TensorBoardConfig(output_path="x").output_path == "x" and WandbConfig().project == "deepspeed"
    assert CSVConfig().job_name == "DeepSpeedJobName"
    assert DeepSpeedMonitorConfig(csv_monitor={"enabled": True}).enabled and not DeepSpeedMonitorConfig().enabled
    given = {"activation_checkpointing": {"partition_activations": True}}
    assert DeepSpeedActivationCheckpointingConfig(given).partition_activations


@pytest.mark.parametrize("keys", [{"stage": 4}, {"stge": 1}, {"offload_optimizer": {"device": "tpu"}}])
def test_sections_are_checked(keys: dict[str, Any]):
    with pytest.raises(ValueError, match="zero_optimization"):
        DeepSpeedZeroConfig(**keys)


@pytest.mark.usefixtures("alone")
def test_the_engine_tells_sections():
    """And where the optimizer's states rest."""
    engine = made(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_cpu_offload()
    assert engine.zero_use_cpu_optimizer() and not engine.super_offload()
    assert engine.zero_offload_param() is None and engine.zero_overlap_comm() is True
    assert engine.checkpoint_tag_validation_enabled() and not engine.checkpoint_tag_validation_fail()
    assert engine.torch_autocast_dtype() is None and engine.dynamic_loss_scale_args()["scale_window"] == 1000
    assert engine.zero_partial_offload() == 1.0 and not engine.zero_nvme_offload_optimizer()
    engine.destroy()
    engine = made(zero_optimization={"stage": 0})
    assert not engine.zero_cpu_offload() and not engine.zero_use_cpu_optimizer()
    with pytest.raises(UsageError, match="1, 2 and 3, and this is stage 0"):
        engine.offload_states()
    engine.destroy()


@pytest.mark.usefixtures("alone")
def test_answers_are_those_of_deepspeed_s_engine() -> None:
    """Values and types that DeepSpeed 0.19.8 answers under the same configs, of what is not here too."""
    engine = made(zero_optimization={"stage": 3}, fp16={"enabled": True, "loss_scale": 128})
    answers: dict[str, Any] = {
        "loss_scale": 128.0, "initial_dynamic_scale": 65536, "cpuadam_cores_perc": 0.9, "zero_partial_offload": 1.0,
        "zero_model_persistence_threshold": sys.maxsize, "is_deepcompile_enabled": False, "autotp_size": 0,
        "autotuning_metric_path": str(Path.cwd() / "autotuning_metric.json"),
        "autotuning_model_info_path": str(Path.cwd() / "autotuning_model_info.json"),
        "curriculum_learning_config": {"enabled": False}, "zenflow_config": None, "get_wall_clock_timers": {},
        "random_ltd_config": {"enabled": False, "layer_token_lr_schedule": {"enabled": False}},
        "torch_autocast_lower_precision_safe_modules": [
            "torch.nn.modules.linear.Linear", *(f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)),
        ],
    }  # fmt: skip
    for name, wanted in answers.items():
        found = getattr(engine, name)()
        assert found == wanted and type(found) is type(wanted), name
    assert "thread_count" not in engine.aio_config()
    engine.destroy()


# -- the launcher


def test_the_launcher_s_command_line():
    args = runner.parse_args(["-H", "hosts", "--num_accelerators", "2", "-i", "a@b:0,2", "train.py", "--x", "1"])
    assert (args.hostfile, args.num_gpus, args.include) == ("hosts", 2, "a@b:0,2")
    assert (args.user_script, args.user_args) == ("train.py", ["--x", "1"])
    plain = runner.parse_args(["train.py"])
    assert (plain.hostfile, plain.num_gpus, plain.num_nodes, plain.master_port) == ("/job/hostfile", -1, -1, 29500)
    assert (plain.launcher, plain.log_level, plain.no_ssh, plain.bind_core_list) == ("pdsh", "info", False, None)
    with pytest.raises(SystemExit):
        runner.parse_args(["--autotuning", "often", "train.py"])


def test_nodes_are_read_one_by_one():
    assert runner.parse_node_config("worker-0:1,2") == ("worker-0", [1, 2])
    assert runner.parse_node_config("worker-0") == ("worker-0", [])
    assert runner.parse_node_config_list("a:1@b:0,2") == {"a": [1], "b": [0, 2]}
    assert runner._parse_hostfile(["a slots=1\n", "b slots=2"]) == {"a": 1, "b": 2}
    assert runner.apply_num_nodes_and_gpus({"a": [0, 1], "b": [0, 1]}, 1, 1) == {"a": [0]}
    assert constants.PDSH_LAUNCHER == "pdsh" and runner.PDSH_MAX_FAN_OUT == 1024
    with pytest.raises(ConfigError):
        runner.parse_node_config("worker-0:x")


# -- communication


def test_who_this_is_by_the_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    told = (comm.get_world_rank_from_launcher, comm.get_world_size_from_launcher, comm.get_local_rank_from_launcher)
    assert [tell() for tell in told] == [0, 1, 0]
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert [tell() for tell in told] == [3, 4, 1]
    assert not (comm.in_aml() or comm.in_aws_sm() or comm.in_dlts())
    assert comm.GLOO_BACKEND == "gloo" and version == deepspeed.__version__


@pytest.mark.usefixtures("alone")
def test_a_config_switches_the_log_of_communication_on(capsys: pytest.CaptureFixture[str]):
    comms_logger.reset_data()
    engine = made(comms_logger={"enabled": True})
    try:
        assert comms_logger.enabled and not comms_logger.verbose
        comm.all_reduce(torch.ones(1024))
        comm.log_summary()
    finally:
        comm.configure(enabled=False)
        comms_logger.reset_data()
        engine.destroy()
    out = capsys.readouterr().out
    assert "all_reduce" in out and "4.0 KB" in out and "Message Size" in out


def test_the_function_behind_checkpoint():
    x, outputs = torch.ones(2, requires_grad=True), []
    (y,) = deepspeed.checkpointing.CheckpointFunction.apply(lambda value: value * 2, outputs, x)
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2] and outputs[0] is y
