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
def args(**more):
    base = dict(user_args=["--a", "b c"], user_script="t.py", include="", exclude="", num_nodes=-1, num_gpus=-1, hostfile="h",
        launcher_args="-x y", no_python=False, module=False, no_local_rank=False, save_pid=False, ssh_port=None, venv_script=None,
        enable_each_rank_log=None, master_addr="a", master_port=1, bind_cores_to_rank=False, bind_core_list=None, launcher="l",
        slurm_comment="")
    return argparse.Namespace(**base | more)
def tidy(words): return [w.replace(sys.executable, "PY").replace(os.getcwd(), "HERE") for w in words]
def steps(kind, *a): return [str(s) for s in kind(*a)]
def grads(*values):
    found = []
    for v in values:
        p = nn.Parameter(torch.zeros(len(v))); p.grad = torch.tensor(v); found.append(p)
    return found
def rates(kind, n=6, **a):
    o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01, momentum=0.9); s = kind(o, **a); out = []
    for _ in range(n): s.step(); out.append(round(float(o.param_groups[0]["lr"]), 7))
    return out
def curriculum(n=31, kind="fixed_linear", least=8, most=64, **a):
    d = m("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    s = d.CurriculumScheduler(dict(min_difficulty=least, max_difficulty=most, schedule_type=kind, schedule_config=a))
    return [s.get_difficulty(i) for i in range(n)], [s.update_difficulty(i) for i in range(n)], s.state["current_difficulty"]
def written(data):
    w = m("deepspeed.runtime.config").DeepSpeedConfigWriter({"a": 1}); w.add_config("b", data)
    with tempfile.TemporaryDirectory() as d:
        w.write_config(d + "/c.json"); r = m("deepspeed.runtime.config").DeepSpeedConfigWriter(); r.load_config(d + "/c.json")
    return r.data
"""

#: ``{module below deepspeed: expressions, in which d is the module}``
CHECKS: dict[str, str] = {
    "runtime.config": """
d.get_train_batch_size({"train_batch_size": 8}), d.get_train_batch_size({})
d.get_train_micro_batch_size_per_gpu({}), d.get_train_micro_batch_size_per_gpu({"train_micro_batch_size_per_gpu": 3})
d.get_gradient_accumulation_steps({}), d.get_gradient_accumulation_steps({"gradient_accumulation_steps": 2})
d.get_managed_gradient_accumulation({})
d.get_gradient_clipping({}), d.get_gradient_clipping({"gradient_clipping": 0})
d.get_prescale_gradients({}), d.get_gradient_predivide_factor({})
d.get_steps_per_print({}), d.get_disable_allgather({}), d.get_disable_python_gc({})
d.get_dump_state({}), d.get_wall_clock_breakdown({}), d.get_memory_breakdown({})
d.get_dataloader_drop_last({}), d.get_log_level({})
d.get_zero_allow_untested_optimizer({}), d.get_zero_force_ds_cpu_optimizer({})
d.get_expert_data_topo_config({}), d.get_checkpoint_params({}), d.get_data_types_params({"data_types": {"a": 1}})
d.get_communication_data_type({}), d.get_communication_data_type({"communication_data_type": "FP16"})
d.get_communication_data_type({"communication_data_type": "int8"})
d.get_communication_data_type({}, "seq_parallel_communication_data_type", "fp32")
d.get_gradient_allreduce_op({}), d.get_gradient_allreduce_op({"gradient_allreduce_op": "SUM"})
d.get_gradient_allreduce_op({"gradient_allreduce_op": "max"})
d.get_optimizer_name({}), d.get_optimizer_name({"optimizer": {"type": "Adam"}})
d.get_optimizer_params({"optimizer": {"type": "Adam", "params": {"lr": 1}}}), d.get_optimizer_params({})
d.get_optimizer_gradient_clipping({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 2}}})
d.get_optimizer_legacy_fusion({}), d.get_optimizer_legacy_fusion({"optimizer": {"legacy_fusion": True}})
d.get_scheduler_name({"scheduler": {"type": "WarmupLR"}}), d.get_scheduler_params({"scheduler": {"type": "A", "params": {}}})
d.get_pipeline_config({"pipeline": {"stages": 2}})
d.get_torch_autocast_enabled({}), d.get_torch_autocast_enabled({"torch_autocast": {"enabled": True}})
d.get_torch_autocast_dtype({}), d.get_torch_autocast_dtype({"torch_autocast": {"dtype": "bfloat16"}})
d.get_torch_autocast_dtype({"torch_autocast": {"dtype": "nonsense"}})
d.get_lower_precision_safe_modules({"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear"]}})
d.get_lower_precision_safe_modules({"torch_autocast": {"lower_precision_safe_modules": [1]}})
d.get_checkpoint_tag_validation_mode({}), d.get_checkpoint_tag_validation_mode({"tag_validation": "Fail"})
d.get_checkpoint_tag_validation_mode({"tag_validation": "often"})
d.get_checkpoint_parallel_write_pipeline({"parallel_write": {"pipeline_stage": True}})
d.get_checkpoint_parallel_write_pipeline({"parallel_write": {"pipeline_stage": "x"}})
[d.DtypeEnum(v).name for v in ("half", "fp16", torch.float16, "torch.float32", "float", "bf16", "bfloat16", "int8")]
d.DtypeEnum("double")
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
    "utils.torch": """
d.required_torch_version(min_version=2.0), d.required_torch_version(min_version="99.1")
d.required_torch_version(max_version=1.0), d.required_torch_version(min_version=1.0, max_version=99)
d.required_torch_version()
d.is_functorch_transforming(), torch.func.grad(lambda x: x * d.is_functorch_transforming())(torch.tensor(1.0)).item()
(lambda p, s: (d.register_grad_hook(p, lambda q: s.append(q.grad.item())), (p * 2).sum().backward(), s)[2])(nn.Parameter(torch.ones(1)), [])
d.jit_script_compat(lambda x: x)(2)
""",
    "utils.numa": """
list(d.parse_range("3")), list(d.parse_range("3-5"))
d.parse_range("5-3")
d.parse_range("1-2-3")
d.parse_range_list("0-2,5"), d.parse_range_list("7")
d.parse_range_list("0-2,1")
d.get_numactl_cmd("0-7", 2, 0)
d.get_numactl_cmd("0-3,8,10-12", 2, 1)
d.get_numactl_cmd("0", 2, 0)
d.get_numa_cores()
""",
    "utils.bwc": """
d.bwc_tensor_model_parallel_rank(), d.bwc_tensor_model_parallel_world_size(), d.bwc_tensor_model_parallel_group()
d.bwc_pipeline_parallel_world_size(), d.bwc_pipeline_parallel_group()
d.bwc_tensor_model_parallel_rank(argparse.Namespace(get_model_parallel_rank=lambda: 3))
d.bwc_tensor_model_parallel_world_size(argparse.Namespace(get_tensor_model_parallel_world_size=lambda: 4))
d.bwc_pipeline_parallel_world_size(argparse.Namespace(get_pipe_parallel_world_size=lambda: 5))
""",
    "utils.module_utils": """
type(d.recursive_getattr(nn.Sequential(nn.Sequential(nn.Tanh())), "0.0")).__name__
(lambda n: (d.recursive_setattr(n, "0.0", nn.ReLU()), type(n[0][0]).__name__)[1])(nn.Sequential(nn.Sequential(nn.Tanh())))
""",
    "utils.exceptions": "issubclass(d.DeprecatedException, Exception)",
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
    "runtime.pipe.schedule": """
steps(d.TrainSchedule, 4, 2, 0)
steps(d.TrainSchedule, 4, 2, 1)
steps(d.TrainSchedule, 3, 4, 2)
steps(d.TrainSchedule, 1, 1, 0)
steps(d.TrainSchedule, 8, 3, 1)
steps(d.InferenceSchedule, 3, 2, 0), steps(d.InferenceSchedule, 3, 2, 1)
steps(d.InferenceSchedule, 4, 3, 1)
steps(d.DataParallelSchedule, 3, 1, 0)
[d.TrainSchedule(m, s, i).num_pipe_buffers() for m, s, i in ((8, 4, 0), (2, 4, 0), (8, 4, 3), (1, 1, 0))]
(lambda s: (s.stage, s.num_stages, s.num_micro_batches, s.is_first_stage, s.is_last_stage))(d.TrainSchedule(8, 4, 3))
repr(d.ForwardPass(3)), d.ForwardPass(3).buffer_id, d.OptimizerStep().name, d.PipeInstruction(a=1).kwargs
d.SendGrad(0).name, d.RecvGrad(0).name, d.SendActivation(1).name, d.RecvActivation(1).name, d.LoadMicroBatch(0).name
d.BackwardPass(1).name, d.ReduceGrads().name, d.ReduceTiedGrads().name, d.CommitP2P().name, d.BufferOpInstruction(2).buffer_id
issubclass(d.TrainSchedule, d.PipeSchedule)
""",
    "runtime.pipe": """
repr(d.LayerSpec(nn.Linear, 2, 3)), type(d.LayerSpec(nn.Linear, 2, bias=False, out_features=3).build()).__name__
d.LayerSpec(int)
d.TiedLayerSpec("k", nn.Linear, 2, 3).tied_weight_attr, d.TiedLayerSpec("k", nn.Linear, 2, 3, tied_weight_attr="w").tied_weight_attr
d.TiedLayerSpec("k", nn.Linear, 2, 3, forward_fn=len).forward_fn is len, d.TiedLayerSpec("k", nn.Linear).key
""",
    "launcher.multinode_runner": """
tidy(d.OpenMPIRunner(args(), "w", {"a": 2, "b": 2}).get_cmd({}, {}))
tidy(d.OpenMPIRunner(args(module=True, launcher_args="--mca btl_tcp_if_include ib0"), "w", {"a": 1}).get_cmd({}, {}))
d.OpenMPIRunner(args(include="a"), "w", {})
d.OpenMPIRunner(args(num_nodes=1), "w", {})
tidy(d.SlurmRunner(args(), "w", {"a": 2}).get_cmd({}, {"a": [0, 1], "b": [0, 1]}))
tidy(d.SlurmRunner(args(include="a", num_nodes=2, num_gpus=2, slurm_comment="c"), "w", {}).get_cmd({}, {"a": [0, 1]}))
d.SlurmRunner(args(), "w", {}).get_cmd({}, {"a": [1]})
d.SlurmRunner(args(), "w", {}).get_cmd({}, {"a": [0], "b": [0, 1]})
(lambda r: (r.add_export("K", " v w "), r.add_export("P", "a/b:c"), r.exports)[2])(d.SlurmRunner(args(), "w", {}))
tidy(d.PDSHRunner(args(), "w").get_cmd({}, {"a": [0], "b": [0]})[0][:7])
tidy(d.PDSHRunner(args(no_python=True, module=True, no_local_rank=True), "w").get_cmd({}, {"a": [0]})[0])[9:]
tidy(d.PDSHRunner(args(), "w").get_cmd({}, {"a": [0]})[1])
d.PDSHRunner(args(), "w").get_cmd({}, {"a": [0]})[2], d.PDSHRunner(args(), "w").user_arguments
tidy(d.IMPIRunner(args(), "w", {"a": 2, "b": 2}).get_cmd({}, {}))
d.IMPIRunner(args(), "w", {"a": 2, "b": 1}).get_cmd({}, {})
d.MPICHRunner(args(), "w", {"a": 2, "b": 1}).get_cmd({}, {})
d.MPICHRunner(args(exclude="a"), "w", {})
[k(args(), "w", {"a": 1}).name for k in (d.OpenMPIRunner, d.MPICHRunner, d.IMPIRunner, d.SlurmRunner, d.MVAPICHRunner)]
d.PDSHRunner(args(), "w").name, d.PDSHRunner(args(), "w").user_script, d.PDSHRunner(args(), "w").world_info_base64
sorted(d.MVAPICHRunner(args(), "w", {"a": 1}).exports.items())
issubclass(d.PDSHRunner, d.MultiNodeRunner)
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
d.get_tensor_bytes([torch.zeros(3), {"a": torch.zeros(2, dtype=torch.half)}, (torch.zeros(1),), "x"])
d.prefix_sum_inc([3, 4, 5]), d.prefix_sum_inc([])
[bool(d.has_inf_or_nan(torch.tensor(v))) for v in ([1.0, 2.0], [float("inf")], [float("nan"), 1.0], [-float("inf")], [])]
[d.is_invalid_grad_norm(v) for v in (1.0, -1.0, float("inf"), float("nan"), torch.tensor(0.5), torch.tensor([1.0, -1.0]))]
[t.numel() for t in d.align_dense_tensors([torch.ones(3), torch.ones(2)], 4)], len(d.align_dense_tensors([torch.ones(4)], 4))
d.get_weight_norm([torch.tensor([3.0]), torch.tensor([4.0])]), d.get_weight_norm(torch.tensor([-3.0, 2.0]), float("inf"))
d.get_weight_norm([torch.tensor([1.0, 2.0])], 1), d.get_weight_norm([torch.tensor([float("inf")])])
d.get_grad_zeros(grads([0.0, 1.0], [0.0, 0.0]))
d.CheckOverflow([grads([1.0])]).check(), d.CheckOverflow([grads([float("nan")])]).check()
d.CheckOverflow().has_overflow_serial(grads([float("inf")])), d.CheckOverflow().check([grads([2.0])])
d.CheckOverflow().check_using_norm([1.0, -1.0], reduce_overflow=False)
d.compare_tensors_in_structures([torch.ones(2), 1], [torch.ones(2), 1]), d.compare_tensors_in_structures({"a": 1}, {"b": 1})
d.compare_tensors_in_structures([1], (1,)), d.compare_tensors_in_structures({"a": torch.ones(1)}, {"a": torch.zeros(1)})
[p.numel() for p in d.filter_empty_parameters([torch.zeros(0), torch.zeros(2)])]
d.filter_empty_parameters([{"params": [torch.zeros(0)], "lr": 1}]), d.filter_empty_parameters([])
d.is_optimized_parameter(nn.Parameter(torch.ones(1))), d.is_optimized_parameter(nn.Parameter(torch.zeros(0)))
d.is_model_parallel_parameter(nn.Parameter(torch.ones(1)))
(lambda t: (d.mask_nan_or_inf_with_val_inplace(t), t.tolist())[1])(torch.tensor([1.0, float("nan"), float("inf")]))
d.maybe_loss_for_backward(torch.ones(1)), d.maybe_loss_for_backward(nn.Parameter(torch.ones(1)) * 2), d.maybe_loss_for_backward(1)
len(d.DummyOptim([1]).param_groups), d.get_inactive_params([nn.Parameter(torch.ones(1))])
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
d.is_builtin_type(1), d.is_builtin_type(torch.ones(1)), d.isinstance_namedtuple((1,)), d.isinstance_namedtuple(torch.ones(2).max(0))
d.apply_to_tensors_only(lambda t: t + 1, [torch.ones(1), {"a": (torch.zeros(1), 2)}])
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
    "runtime.data_pipeline.curriculum_scheduler": """
curriculum(total_curriculum_step=20, difficulty_step=8)
curriculum(most=70, total_curriculum_step=13, difficulty_step=16)
curriculum(kind="fixed_root", least=3, most=50, total_curriculum_step=17, difficulty_step=1, root_degree=2)
curriculum(kind="fixed_root", most=100, total_curriculum_step=25, difficulty_step=8, root_degree=3)
curriculum(kind="fixed_root", least=10, most=2049, total_curriculum_step=30, difficulty_step=16, root_degree=1.5)
curriculum(least=0.5, most=7.25, total_curriculum_step=9, difficulty_step=0.25)
curriculum(least=9, most=12, total_curriculum_step=4, difficulty_step=8)
curriculum(kind="fixed_discrete", least=1, most=3, difficulty=[1, 2, 3], max_step=[5, 10])
curriculum(kind="fixed_discrete", least=1, most=5, difficulty=[5, 2, 4], max_step=[3, 3])
(lambda s: (s.set_custom_get_difficulty(lambda n: 3 * n), [s.get_difficulty(2), s.update_difficulty(1), s.update_difficulty(4), s.update_difficulty(2)])[1])(d.CurriculumScheduler(dict(min_difficulty=1, max_difficulty=9, schedule_type="custom")))
sorted(d.CurriculumScheduler(dict(min_difficulty=1, max_difficulty=9, schedule_type="custom")).state.items())
d.CurriculumScheduler({}), d.CurriculumScheduler(dict(min_difficulty=1, max_difficulty=9))
d.CurriculumScheduler(dict(min_difficulty=1, max_difficulty=9, schedule_type="fixed"))
curriculum(difficulty_step=8)
curriculum(total_curriculum_step=4)
curriculum(kind="fixed_root", total_curriculum_step=4, difficulty_step=8)
curriculum(kind="fixed_discrete", difficulty=[1, 2], max_step=[1, 2])
curriculum(kind="fixed_discrete", difficulty=[1], max_step=[])
""",
    "runtime.config_utils": """
d.get_scalar_param({"a": 1}, "a", 2), d.get_scalar_param({}, "a", 2), d.get_list_param({}, "a", []), d.get_dict_param({"a": {}}, "a", 1)
d.dict_raise_error_on_duplicate_keys([("a", 1), ("b", 2)])
d.dict_raise_error_on_duplicate_keys([("a", 1), ("a", 2)])
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
    'tidy(d.PDSHRunner(args(), "w").get_cmd({}, {"a": [0]})[1])': "DeepSpeed cuts the last letter off the name to end",
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
