# ruff: noqa: E501, a table of expressions
"""Small documented behaviours of DeepSpeed, one expression each, whose values are recorded from the real package.

``record`` evaluates them where DeepSpeed is installed and writes ``tests/golden/deepspeed_behaviours.json``; the tests
evaluate the same expressions on the compatibility layer. ``compare`` prints which differ where it runs::

    /tmp/real/bin/python benchmarks/deepspeed_behaviours.py record
    .venv/bin/python benchmarks/deepspeed_behaviours.py compare
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "deepspeed_behaviours.json"

SETUP = """
import argparse, json, os, tempfile
import torch
from torch import nn
m = importlib.import_module
def rates(kind, n=6, **a):
    o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01, momentum=0.9); s = kind(o, **a); out = []
    for _ in range(n): s.step(); out.append(round(float(o.param_groups[0]["lr"]), 7))
    return out
def written(data):
    w = m("deepspeed.runtime.config").DeepSpeedConfigWriter({"a": 1}); w.add_config("b", data)
    with tempfile.TemporaryDirectory() as d:
        w.write_config(d + "/c.json"); r = m("deepspeed.runtime.config").DeepSpeedConfigWriter(); r.load_config(d + "/c.json")
    return r.data
"""

#: ``{module below deepspeed: expressions, in which d is the module}``
CHECKS: dict[str, str] = {
    "runtime.config": """
d.ADAM_OPTIMIZER, d.ADAMW_OPTIMIZER, d.LAMB_OPTIMIZER, d.LION_OPTIMIZER, d.ADAGRAD_OPTIMIZER, d.MUON_OPTIMIZER
d.MUADAM_OPTIMIZER, d.MUADAMW_OPTIMIZER, d.MUSGD_OPTIMIZER, d.DEEPSPEED_OPTIMIZERS
d.ADAM_W_MODE, d.ADAM_W_MODE_DEFAULT, d.TORCH_ADAM_PARAM, d.TENSOR_CORE_ALIGN_SIZE, d.EXPERT_PARALLEL
written([1, 2])
""",
    "runtime.precision_config": """
d.get_bfloat16_config({}).enabled, d.get_bfloat16_config({"bf16": {"enabled": True}}).enabled
d.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
d.get_float16_config({}).enabled, d.get_float16_config({"fp16": {"enabled": True, "loss_scale": 8}}).loss_scale == 8
d.get_float16_config({}).initial_scale_power, d.get_float16_config({}).hysteresis
d.FP16, d.BFLOAT16, d.BFLOAT16_OLD
""",
    "runtime.zero.leaf_module_config": """
d.DEFAULT_LEAF_MODULE_CLASSES, d.DEFAULT_LEAF_MODULE_NAMES, d.DEFAULT_LEAF_MODULE_NAME_SUFFIXES
(lambda c: (c.classes, c.names, c.name_suffixes))(d.DeepSpeedZeroLeafModuleConfig())
d.DeepSpeedZeroLeafModuleConfig(names="a", name_suffixes=["b", "b"]).names
d.DeepSpeedZeroLeafModuleConfig(name_suffixes=["b", "b", "c"]).name_suffixes
""",
    "git_version_info": "d.version, d.git_hash, d.git_branch, sorted(d.torch_info), d.torch_info['cuda_version']",
    "runtime.pipe.topology": """
(lambda t: [t.get_rank(x=i, y=j) for i in range(2) for j in range(3)])(d.ProcessTopology(axes=["x", "y"], dims=[2, 3]))
(lambda t: (t.world_size(), t.get_dim("y"), t.get_dim("z"), list(t.get_axis_names())))(d.ProcessTopology(["x", "y"], [2, 3]))
str(d.ProcessTopology(["x", "y"], [2, 3]).get_coord(4)), str(d.ProcessTopology(["x"], [2]))
d.ProcessTopology(["x", "y"], [2, 3]).get_coord(6)
d.ProcessTopology(["x", "y"], [2, 3]).get_rank(x=0)
d.ProcessTopology(["x", "y"], [2, 3]).get_rank(x=0, y=3)
d.ProcessTopology(["a", "b"], [2, 2]).get_rank_repr(3), d.ProcessTopology(["a", "b"], [2, 2]).get_rank_repr(3, omit_axes=["a"])
d.PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(5), d.ProcessTopology(["a", "b"], [2, 2]).get_rank_repr(1, [], "=", "/")
[d.PipeModelDataParallelTopology(2, 2, 2).get_axis_comm_lists(a) for a in ("pipe", "data", "model", "none")]
d.PipeModelDataParallelTopology(2, 2, 2).filter_match(pipe=0, data=1)
d.ProcessTopology(["x", "y"], [2, 3]).get_axis_list("x", 0), d.ProcessTopology(["x", "y"], [2, 3]).get_axis_list("y", 1)
(lambda t: (t.axes, t.dims, t.get_rank(pipe=1, data=2)))(d.PipeDataParallelTopology(2, 4))
(lambda t: (t.axes, t.dims, t.get_coord(11)._asdict()))(d.PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=2))
len(d.ProcessTopology(["x", "y"], [4, 3]).mapping), d.ProcessTopology(["x"], [3]).ProcessCoord(2).x
""",
    "runtime.pipe": """
repr(d.LayerSpec(nn.Linear, 2, 3)), type(d.LayerSpec(nn.Linear, 2, bias=False, out_features=3).build()).__name__
d.LayerSpec(int)
d.TiedLayerSpec("k", nn.Linear, 2, 3).tied_weight_attr, d.TiedLayerSpec("k", nn.Linear, 2, 3, tied_weight_attr="w").tied_weight_attr
d.TiedLayerSpec("k", nn.Linear, 2, 3, forward_fn=len).forward_fn is len, d.TiedLayerSpec("k", nn.Linear).key
""",
    "launcher.launch": """
(lambda a: (a.node_rank, a.master_port, a.training_script, a.training_script_args))(d.parse_args())
""",
    "ops.op_builder": """
d.CPUAdamBuilder().NAME, d.FusedAdamBuilder().NAME, d.AsyncIOBuilder().NAME, d.UtilsBuilder().NAME
d.CPUAdamBuilder().absolute_name() is not None, d.FusedLambBuilder.BUILD_VAR, d.AsyncIOBuilder.BUILD_VAR
d.InferenceBuilder().NAME, d.QuantizerBuilder().NAME, d.TransformerBuilder().NAME, d.RandomLTDBuilder().NAME
""",
    "runtime.utils": """
d.partition_uniform(10, 3), d.partition_uniform(2, 4), [int(i) for i in d.partition_balanced([1, 1, 4, 1], 2)], [int(i) for i in d.partition_balanced([2, 2, 2, 2], 2)]
d.call_to_str("a", 1, "b", c=2), d.call_to_str("a"), d.get_only_unique_item([2, 2])
d.get_only_unique_item([1, 2])
round(float(d.get_global_norm([3.0, 4.0])), 5), float(d.get_global_norm([float("inf")]))
round(float(d.get_global_norm_of_tensors([torch.tensor([3.0]), torch.tensor([4.0])])), 5)
(lambda t: (d.clip_tensors_by_global_norm(t, 1.0), [round(float(q), 4) for q in t])[1])([torch.tensor([3.0]), torch.tensor([4.0])])
d.move_to_device({"a": [torch.ones(1)]}, "cpu", lambda t: torch.is_tensor(t)), d.copy_to_device([torch.ones(1)], "cpu", torch.is_tensor)
d.noop_decorator(len) is len
(lambda: (d.set_random_seed(3), torch.rand(1).item())[1])()
""",
    "runtime.zero.utils": """
d.is_zero_param(nn.Parameter(torch.ones(1))), d.is_zero_param(torch.ones(1))
issubclass(d.ZeRORuntimeException, Exception)
""",
    "moe.utils": """
d.has_moe_layers(nn.Linear(1, 1)), d.is_moe_param(nn.Parameter(torch.ones(1))), d.is_moe_param(argparse.Namespace(allreduce=False))
d.is_moe_param_group({}), d.is_moe_param_group({"moe": True})
[len(x) for x in d.split_params_into_shared_and_expert_params([argparse.Namespace(), argparse.Namespace(allreduce=False)])]
""",
    "runtime.lr_schedules": """
rates(d.WarmupLR, warmup_max_lr=0.1, warmup_num_steps=4), rates(d.WarmupLR, warmup_num_steps=3, warmup_max_lr=1.0, warmup_type="linear")
rates(d.WarmupDecayLR, total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2), rates(d.WarmupCosineLR, total_num_steps=6, warmup_num_steps=2)
rates(d.LRRangeTest, lr_range_test_min_lr=0.1, lr_range_test_step_size=2), rates(d.LRRangeTest, lr_range_test_step_size=2, lr_range_test_staircase=True)
rates(d.OneCycle, cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=2, decay_step_size=1, decay_lr_rate=0.5, n=8)
d.VALID_LR_SCHEDULES, d.LR_SCHEDULE, d.LR_RANGE_TEST, d.ONE_CYCLE, d.WARMUP_LR, d.WARMUP_DECAY_LR, d.WARMUP_COSINE_LR
d.get_lr_from_config({"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}), d.get_lr_from_config({"type": "OneCycle", "params": {"cycle_max_lr": 2}})
d.get_lr_from_config({})[0], d.get_lr_from_config({"type": "x", "params": {}})[0]
d.get_config_from_args(argparse.Namespace(lr_schedule=None))[0]
""",
    "runtime.dataloader": """
[next(r) for r in [iter(d.RepeatingLoader([1, 2]))] for _ in range(5)]
""",
    "runtime.fp16.loss_scaler": """
d.LossScaler(4.0).loss_scale, d.CreateLossScaler(torch.half, 1.0, True, dict(init_scale=16, scale_window=1, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)).cur_scale == 16
d.CreateLossScaler(torch.half, 8.0, False, None).loss_scale, d.CreateLossScaler(torch.float, 8.0, False, None).loss_scale
d.INITIAL_LOSS_SCALE, d.SCALE_WINDOW, d.DELAYED_SHIFT, d.CONSECUTIVE_HYSTERESIS, d.MIN_LOSS_SCALE
""",
    "launcher.runner": """
d.parse_args(["t.py"]).launcher, d.parse_args(["--num_gpus", "2", "t.py", "--x"]).user_args, d.parse_args(["t.py"]).master_port
d.parse_resource_filter({"a": [0, 1], "b": [0, 1]}, include_str="a:1"), d.parse_resource_filter({"a": [0, 1]}, exclude_str="a:0")
d.parse_resource_filter({"a": [0]}, include_str="a", exclude_str="a")
d.parse_inclusion_exclusion({"a": 2, "b": 1}, "", "b"), d.encode_world_info({"a": [0, 1]})
d.fetch_hostfile("/nowhere/at/all"), d.parse_node_config("w:0,1"), d.parse_node_config_list("a:1@b:0,2")
d.DLTS_HOSTFILE, d.EXPORT_ENVS, d.PDSH_MAX_FAN_OUT, d.DEEPSPEED_ENVIRONMENT_NAME
""",
    "checkpoint.utils": """
d.get_model_ckpt_name_for_rank("b", "00"), d.get_zero_ckpt_name_for_rank("b", 1, 2), d.get_layer_ckpt_name_for_rank("b", "layer_03", 1)
d.clone_tensors_for_torch_save({"a": [torch.ones(4)[:2]]})["a"][0].untyped_storage().nbytes()
""",
    "utils.groups": "d.mpu",
    "utils.timer": """
d.FORWARD_GLOBAL_TIMER, d.BACKWARD_INNER_GLOBAL_TIMER, d.BACKWARD_REDUCE_MICRO_TIMER, d.STEP_MICRO_TIMER, d.TIME_EPSILON
float(d.trim_mean([1.0, 2.0, 3.0, 100.0], 0.25)), d.NoopTimer()("x").start()
""",
    "comm": """
d.ReduceOp.SUM.name, d.is_initialized(), d.get_world_rank_from_launcher(), d.get_world_size_from_launcher()
""",
    "runtime.zero.partition_parameters": """
[s.name for s in d.ZeroParamStatus], [s.value for s in d.ZeroParamType]
""",
    "runtime.zero.config": """
d.DeepSpeedZeroConfig().stage, d.DeepSpeedZeroConfig(stage=3).overlap_comm, d.DeepSpeedZeroConfig(stage=1).overlap_comm
d.DeepSpeedZeroConfig().reduce_bucket_size, d.DeepSpeedZeroConfig().allgather_bucket_size, d.DeepSpeedZeroConfig().sub_group_size
d.DeepSpeedZeroConfig(stage=9)
d.DeepSpeedZeroConfig(stage3_max_live_parameters=5).max_live_parameters, d.DeepSpeedZeroConfig().param_persistence_threshold
d.ZERO_OPTIMIZATION, d.DeepSpeedZeroConfig(offload_param={"device": "cpu"}).offload_param.device == "cpu"
d.ZeroStageEnum.weights.value, d.ZeroStageEnum.max_stage.value
""",
    "utils": """
d.logger.name != "", d.RepeatingLoader([1]).loader, d.OnDevice.__name__
""",
    "profiling.flops_profiler": """
d.get_model_profile(nn.Linear(4, 8), input_shape=(2, 4), print_profile=False, as_string=False)[1:]
d.number_to_string(1234567, precision=2), d.flops_to_string(2.5e9), d.params_to_string(1500), d.macs_to_string(3e6), d.duration_to_string(0.5)
""",
    "": """
d.__version__, d.__version_major__, d.version, d.HAS_TRITON in (True, False)
sorted(vars(d.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"])).items())
""",
}  # fmt: skip

#: ``{beginning of an expression: why its value is another here}``
KNOWN = {
    "d.CPUAdamBuilder().NAME": "DeepSpeed on a CPU has a stand-in for the builders of GPUs; here each has its own name",
    "d.CPUAdamBuilder().absolute_name()": "as above",
    "d.InferenceBuilder().NAME": "as above",
}


def expressions() -> list[tuple[str, str]]:
    """``(module, expression)`` of each behaviour."""
    return [(path, line) for path, lines in CHECKS.items() for line in lines.strip().splitlines()]


def value(path: str, expression: str, package: str = "deepspeed") -> str:
    """The text of an expression's value, or of the kinds of exception that it raises."""
    space: dict[str, Any] = {"importlib": importlib, "sys": sys}
    exec(SETUP.replace('"deepspeed.', f'"{package}.'), space)
    argv, sys.argv = sys.argv, ["launch", "--world_info=e30=", "--node_rank=1", "t.py", "--x", "1"]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            space["d"] = importlib.import_module(f"{package}.{path}".rstrip("."))
            return _text(eval(expression, space))
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return f"raises {kinds[0] if kinds else 'Exception'} of {', '.join(kinds)}"
    finally:
        sys.argv = argv


def _text(found: Any) -> str:
    if isinstance(found, ModuleType):
        return f"module {found.__name__.rpartition('.')[2]}"
    return repr(found).replace("shardfold.compat.deepspeed", "deepspeed")


def agree(wanted: str, found: str) -> bool:
    """Whether a value is the one recorded; an exception may be of further kinds."""
    if wanted.startswith("raises "):
        return found.startswith("raises ") and wanted.split()[1] in found.partition(" of ")[2].split(", ")
    return wanted == found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"))
    if parser.parse_args().what == "record":
        import deepspeed  # noqa: F401

        golden = {f"{path}: {line}": value(path, line) for path, line in expressions()}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    else:
        golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
        package = "shardfold.compat.deepspeed"
        differ = [(p, e) for p, e in expressions() if not agree(golden[f"{p}: {e}"], value(p, e, package))]
        for p, e in differ:
            print(f"{p}: {e}\n   there {golden[f'{p}: {e}'][:300]}\n   here  {value(p, e, package)[:300]}")
        print(f"{len(golden) - len(differ)} of {len(golden)} agree")
