"""Every key that is called honoured changes something when it is changed, beside the answer to the question for it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shardfold.compat import deepspeed
from shardfold.compat.deepspeed import comm
from shardfold.compat.deepspeed.config import read
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_keys import HONOURED, KEYS
from shardfold.compat.deepspeed.utils import get_z3_leaf_modules, logger
from tests.support.deepspeed_training import adamw, batch, build, config, loss_of

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True}}
BF16_STATES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
FLOPS = {"flops_profiler": {"enabled": True, "profile_step": 1}}
ELASTIC = {"enabled": True, "max_train_batch_size": 33, "micro_batch_sizes": [5, 2]}
ELASTIC |= {"ignore_non_elastic_batch_info": True}
WATCHED = {"steps_per_print": 1}

# Two values of each key and what else the config has. ``None`` leaves the key out.
BOTH: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "train_batch_size": (8, 16, {"train_micro_batch_size_per_gpu": 4}),
    "train_micro_batch_size_per_gpu": (2, 4, {}),
    "gradient_accumulation_steps": (1, 2, {}),
    "managed_gradient_accumulation": (True, False, {"gradient_accumulation_steps": 2}),
    "gradient_clipping": (0.5, 0, {}),
    "elasticity.enabled": (False, True, {"elasticity": ELASTIC}),
    "elasticity.max_train_batch_size": (33, 70, {"elasticity": ELASTIC}),
    "elasticity.micro_batch_sizes": ([2], [5], {"elasticity": ELASTIC}),
    "elasticity.min_gpus": (1, 9, {"elasticity": ELASTIC}),
    "elasticity.max_gpus": (2, None, {"elasticity": {**ELASTIC, "prefer_larger_batch": False}}),
    "elasticity.prefer_larger_batch": (True, False, {"elasticity": {**ELASTIC, "max_gpus": 2}}),
    "elasticity.version": (0.1, 0.2, {"elasticity": {**ELASTIC, "num_gpus_per_node": 2}}),
    "elasticity.num_gpus_per_node": (1, 2, {"elasticity": ELASTIC}),
    "dataloader_drop_last": (False, True, {}),
    "optimizer.type": ("Adam", "Lion", {}),
    "optimizer.params": ({"lr": 1}, {"lr": 2}, {"optimizer": {"type": "Adam"}}),
    "scheduler.type": ("WarmupLR", "OneCycle", {}),
    "scheduler.params": ({"warmup_num_steps": 1}, {}, {"scheduler": {"type": "WarmupLR"}}),
    "fp16.enabled": (False, True, {}),
    "fp16.auto_cast": (False, True, FP16),
    "fp16.loss_scale": (0, 8, FP16),
    "fp16.initial_scale_power": (4, 5, FP16),
    "fp16.loss_scale_window": (4, 5, FP16),
    "fp16.hysteresis": (1, 2, FP16),
    "fp16.consecutive_hysteresis": (False, True, FP16),
    "fp16.min_loss_scale": (1, 2, FP16),
    "bf16.enabled": (False, True, {}),
    "bf16.check_grad_overflow": (True, False, BF16),
    "torch_autocast.enabled": (False, True, {}),
    "torch_autocast.dtype": ("bfloat16", "float16", AUTOCAST),
    "data_types.grad_accum_dtype": ("fp32", "bf16", BF16),
    "data_types.buffer_dtype": (None, "bf16", BF16),
    "communication_data_type": ("fp32", "bf16", {**BF16, "zero_optimization": {"stage": 2}}),
    "fp32_allreduce": (False, True, {"zero_optimization": {"stage": 2}, "communication_data_type": "bf16", **BF16}),
    "zero_optimization.stage": (1, 2, {}),
    "zero_optimization.overlap_comm": (True, False, {"zero_optimization": {"stage": 2}}),
    "zero_optimization.stage3_prefetch_bucket_size": (0, 10, {"zero_optimization": {"stage": 3}}),
    "zero_optimization.offload_optimizer.device": ("none", "cpu", {"zero_optimization": {"stage": 1}}),
    "zero_optimization.offload_optimizer.nvme_path": (
        "/one",
        "/other",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    ),
    "zero_optimization.offload_param.device": ("none", "cpu", {"zero_optimization": {"stage": 3}}),
    "zero_optimization.offload_param.nvme_path": (
        "/one",
        "/other",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
    ),
    "zero_optimization.cpu_offload": (False, True, {"zero_optimization": {"stage": 1}}),
    "zero_optimization.cpu_offload_param": (False, True, {"zero_optimization": {"stage": 3}}),
    "zero_optimization.zero_hpz_partition_size": (1, 2, {"zero_optimization": {"stage": 3}}),
    "zero_optimization.zero_quantized_weights": (False, True, {"zero_optimization": {"stage": 3}}),
    "zero_optimization.zero_quantized_gradients": (False, True, {"zero_optimization": {"stage": 3}}),
    "zero_optimization.zeropp_loco_param": (
        None, {"err_beta": 0.8, "reset_T": 1024},
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    ),
    "zero_optimization.mics_shard_size": (-1, 2, {"zero_optimization": {"stage": 3}}),
    "tensor_parallel.autotp_size": (0, 2, {}),
    "sequence_parallel_size": (1, 2, {}),
    "seq_parallel_communication_data_type": (
        "fp32", "bf16", {"sequence_parallel_size": 2, "zero_optimization": {"stage": 2}, **BF16},
    ),
}  # fmt: skip

# Keys whose contrary is refused.
ONE_WAY: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor_parallel.tp.tp_size": (4, {"tensor_parallel": {"autotp_size": 2}}),
    "elasticity.ignore_non_elastic_batch_info": (False, {"elasticity": ELASTIC}),
    "data_parallel_size": (2, {"sequence_parallel_size": 2}),
    "data_types.param_dtype": ("bf16", FP16),
    "bf16.bf16_master_weights_and_grads": (False, {"bf16": BF16_STATES, "zero_optimization": {"stage": 1}}),
    "bf16.bf16_optimizer_states": (False, {"bf16": BF16_STATES, "zero_optimization": {"stage": 1}}),
}


def _with(path: str, value: Any, more: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = deepcopy(more)
    inner = made
    *sections, name = path.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    if value is not None:
        inner[name] = value
    return made


def _engine_takes(given: dict[str, Any]) -> str:
    """What an engine is made of."""
    settings = read({"train_micro_batch_size_per_gpu": 4, **given}, world_size=2)
    made = ("raw", "values", "origins", "notes", "world_size")
    shown = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in made}
    return repr(shown)


@pytest.mark.parametrize("path", [path for path in BOTH if path not in ("managed_gradient_accumulation",
                                                                       "dataloader_drop_last")])  # fmt: skip
def test_the_engine_is_made_of_another_thing(path: str) -> None:
    """Batch, precision, layout, timing, loss scale, optimizer or schedule differ."""
    one, other, more = BOTH[path]
    assert _engine_takes(_with(path, one, more)) != _engine_takes(_with(path, other, more))


@pytest.mark.parametrize("path", ONE_WAY)
def test_a_contradiction_is_refused(path: str) -> None:
    """Keys that must agree with others."""
    value, more = ONE_WAY[path]
    assert _engine_takes(more)
    with pytest.raises(DeepSpeedConfigError, match=path.rpartition(".")[2]):
        _engine_takes(_with(path, value, more))


# -- what an engine shows


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, whose process group ends with the test."""
    ends = [logger, *logger.handlers]  # the level of a config is that of both
    levels = [one.level for one in ends]
    for one in logger.handlers:
        one.setLevel(logging.NOTSET)
    yield
    comm.destroy_process_group()
    for one, level in zip(ends, levels, strict=True):
        one.setLevel(level)


def _shown(given: dict[str, Any], folder: Path) -> str:
    """All that an engine of the config prints, writes and answers in two steps, without what differs by the clock."""
    out = io.StringIO()
    with redirect_stdout(out):
        if "log_level" not in given:
            logger.setLevel(logging.INFO)
        engine = deepspeed.initialize(
            model=build(),
            training_data=TensorDataset(torch.ones(4, 4)),
            config={**config(2), "optimizer": adamw(), **given},
        )[0]
        for step in range(2):
            engine.backward(loss_of(engine, batch(step, 0, 0)))
            engine.step()
        saved = folder / "model"
        tokens = {
            "level": logger.level,
            "timed": bool(engine.tput_timer.global_step_count),
            "batches": len(engine.training_dataloader),
            "steps": int(engine.was_step_applied()),
            "norm": engine.get_global_grad_norm() is None,
            "flagged": [type(m).__name__ for m in get_z3_leaf_modules(engine.module)],
            "scale": engine._core._runner.handlers.scale,
            "written": engine.save_16bit_model(saved),
        }
        engine.destroy()
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return f"{tokens}\n{files}\n{out.getvalue()}"


def _csv(name: str, value: Any, folder: Path) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), **({name: value} if name else {})}}


Z3 = {"zero_optimization": {"stage": 3}}

# What the two outputs of a run must not share: a text in the second that is not in the first.
SHOWS: dict[str, tuple[Callable[[Path], dict[str, Any]], Callable[[Path], dict[str, Any]], str]] = {
    "managed_gradient_accumulation": (
        lambda f: {"gradient_accumulation_steps": 4},
        lambda f: {"gradient_accumulation_steps": 4, "managed_gradient_accumulation": False}, "'steps': 1",
    ),
    "dataloader_drop_last": (lambda f: {}, lambda f: {"dataloader_drop_last": True}, "'batches': 1"),
    "zero_optimization.compute_grad_norm": (
        lambda f: {"gradient_clipping": 0},
        lambda f: {"gradient_clipping": 0, "zero_optimization": {"stage": 2, "compute_grad_norm": False}},
        "'norm': True",
    ),
    "zero_optimization.leaf_module.classes": (
        lambda f: {}, lambda f: _with("zero_optimization.leaf_module.classes", ["Tanh"], {}), "['Tanh', 'Tanh']",
    ),
    "zero_optimization.leaf_module.names": (
        lambda f: {}, lambda f: _with("zero_optimization.leaf_module.names", ["0"], {}), "['Linear']",
    ),
    "zero_optimization.leaf_module.name_suffixes": (
        lambda f: {}, lambda f: _with("zero_optimization.leaf_module.name_suffixes", ["1"], {}), "['Tanh']",
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        lambda f: Z3, lambda f: _with("zero_optimization.stage3_gather_16bit_weights_on_model_save", True, Z3),
        "'written': True",
    ),
    "steps_per_print": (lambda f: {}, lambda f: WATCHED, "step=1, skipped=0"),
    "wall_clock_breakdown": (lambda f: WATCHED, lambda f: {**WATCHED, "wall_clock_breakdown": True}, "time (ms)"),
    "memory_breakdown": (lambda f: WATCHED, lambda f: {**WATCHED, "memory_breakdown": True}, "bytes held"),
    "dump_state": (lambda f: {}, lambda f: {"dump_state": True}, "zero_optimization.stage"),
    "flops_profiler.enabled": (lambda f: {}, lambda f: FLOPS, "rofil"),
    "flops_profiler.profile_step": (lambda f: _with("flops_profiler.profile_step", 7, FLOPS), lambda f: FLOPS, "rofil"),
    "flops_profiler.output_file": (
        lambda f: FLOPS, lambda f: _with("flops_profiler.output_file", str(f / "profile.txt"), FLOPS), "profile.txt",
    ),
    "flops_profiler.detailed": (
        lambda f: _with("flops_profiler.detailed", False, FLOPS), lambda f: FLOPS, "Detailed Profile",
    ),
    "timers.throughput.enabled": (
        lambda f: {"timers": {"throughput": {"enabled": False}}}, lambda f: {}, "'timed': True",
    ),
    "log_level": (lambda f: {"log_level": "error"}, lambda f: {"log_level": "debug"}, "'level': 10"),
    "csv_monitor.enabled": (lambda f: {}, lambda f: _csv("", None, f), "Train_Samples_train_loss.csv"),
    "csv_monitor.output_path": (
        lambda f: _csv("", None, f), lambda f: _csv("output_path", str(f / "there"), f), "there/",
    ),
    "csv_monitor.job_name": (lambda f: _csv("", None, f), lambda f: _csv("job_name", "mine", f), "mine/"),
}  # fmt: skip
ELSEWHERE: dict[str, str] = {
    "tensor_parallel.partition_config": "test_tensor.py::test_other_ways_to_ask_for_it",
    "tensor_parallel.vocab_parallel_lm_head": "test_tensor.py::test_the_head_may_stay_whole",
    "pipeline.activation_checkpoint_interval": "test_pipeline.py::test_trains",
    "zero_optimization.stage3_param_persistence_threshold": "test_zero.py::test_small_parameters_are_read_outside",
    "gradient_allreduce_op": "test_documented.py::test_gradients_are_summed_if_asked",
    "zero_optimization.offload_optimizer.ratio": "test_offload.py::test_a_part_of_the_optimizer_stays_on_the_device",
    "weight_quantization": "test_inference.py::test_configs_of_zero_inference_generate",
    "checkpoint.use_node_local_storage": "test_saving.py::test_nodes_keep_their_own_parts",
    "checkpoint.tag_validation": "test_saving.py::test_tags_that_differ_between_ranks",
    **{
        f"activation_checkpointing.{name}": "test_modules.py::test_checkpointed_arguments_are_divided"
        for name in (
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "number_checkpoints",
        )
    },
    **{
        f"activation_checkpointing.{name}": "test_modules.py::test_checkpointed_gradients_are_the_plain_ones"
        for name in ("synchronize_checkpoint_boundary", "profile")
    },
    **{
        f"comms_logger.{name}": "test_observers.py::test_everything_that_can_be_observed"
        for name in ("enabled", "verbose", "prof_all", "prof_ops")
    },
    **{
        f"flops_profiler.{name}": "test_observers.py::test_a_profile_is_printed_or_written"
        for name in ("recompute_fwd_factor", "module_depth", "top_modules")
    },
    **{
        path: "test_observers.py::test_a_monitor_without_its_package_is_one_sentence"
        for path in KEYS
        if path.split(".")[0] in ("tensorboard", "wandb", "comet")
    },
}
"""Keys that take several ranks or a package: the test that has them."""


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("path", SHOWS)
def test_a_run_shows_it(path: str, tmp_path: Path) -> None:
    """What a run of two steps prints, writes or answers differs, in the way that the key is for."""
    one, other, text = SHOWS[path]
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    without, with_it = _shown(one(folders[0]), folders[0]), _shown(other(folders[1]), folders[1])
    assert text in with_it and text not in without


def test_every_honoured_key_is_here() -> None:
    """A new one needs an effect that a test sees."""
    honoured = {path for path, key in KEYS.items() if key.kind == HONOURED}
    assert honoured == {*BOTH, *ONE_WAY, *SHOWS, *ELSEWHERE}
    for place in set(ELSEWHERE.values()):
        file, _, name = place.partition("::")
        assert f"def {name}" in (Path(__file__).parent / file).read_text(encoding="utf-8"), place
