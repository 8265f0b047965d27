"""DeepSpeed's small modules do what their names say: compared with PyTorch, with formulas, and on real ranks."""

from __future__ import annotations

import argparse
import base64
import inspect
import io
import json
import logging
import math
import os
import warnings
from collections import OrderedDict
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.compat.deepspeed import accelerator, comm
from shardfold.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shardfold.compat.deepspeed.arguments import add_config_arguments
from shardfold.compat.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from shardfold.compat.deepspeed.comm.discovery import discover
from shardfold.compat.deepspeed.launcher import runner
from shardfold.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from shardfold.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shardfold.compat.deepspeed.ops.lamb import DeepSpeedCPULamb, FusedLamb
from shardfold.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from shardfold.compat.deepspeed.runtime import lr_schedules
from shardfold.compat.deepspeed.runtime import utils as runtime_utils
from shardfold.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from shardfold.compat.deepspeed.utils import logging as ds_logging
from shardfold.compat.deepspeed.utils.comms_logging import comms_logger
from shardfold.compat.deepspeed.utils.init_on_device import OnDevice
from shardfold.compat.deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer
from shardfold.errors import ConfigError, UsageError
from shardfold.testing import Ranks, same_training
from tests.support.deepspeed_training import keeping_checkpointing

# -- schedules


def adam(lr: float = 0.01, groups: int = 1) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))], "lr": lr * (i + 1)} for i in range(groups)])


def rates(schedule: Any, steps: int) -> list[float]:
    """The rate before the first step, and after each."""
    found = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        found.append(schedule.optimizer.param_groups[0]["lr"])
    return found


# As DeepSpeed 0.19.8 gives them.
CURVES = {
    "WarmupLR": (dict(warmup_max_lr=1.0, warmup_num_steps=4), [0, 0, math.log(2) / math.log(4), 0.792481, 1, 1]),
    "WarmupDecayLR": (
        dict(total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear"),
        [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0],
    ),
    "WarmupCosineLR": (
        dict(total_num_steps=4, warmup_num_steps=2, warmup_type="linear", warmup_min_ratio=0.5, cos_min_ratio=0.0),
        [0, 0.005, 0.0075, 0.005, 0, 0],
    ),
    "LRRangeTest": (dict(lr_range_test_min_lr=1.0, lr_range_test_step_size=2), [1, 1.5, 2, 2.5]),
    "OneCycle": (
        dict(cycle_min_lr=1.0, cycle_max_lr=3.0, cycle_first_step_size=2, decay_step_size=1, decay_lr_rate=1.0),
        [1, 2, 3, 2, 1, 0.5],
    ),
}


@pytest.mark.parametrize("name", lr_schedules.VALID_LR_SCHEDULES)
def test_schedules_have_deepspeed_s_curves_and_methods(name: str):
    """Rates, `step(n)`, `get_last_lr`, and a state that is the number of the last batch."""
    make = partial(getattr(lr_schedules, name), **CURVES[name][0])
    schedule = make(adam())
    assert schedule.last_batch_iteration == -1
    with warnings.catch_warnings(action="error"):  # it may be stepped without the optimizer
        assert rates(schedule, len(CURVES[name][1]) - 1) == pytest.approx(CURVES[name][1], abs=1e-6)
    last = schedule.last_batch_iteration
    assert schedule.state_dict() == {"last_batch_iteration": last} and last == len(CURVES[name][1]) - 2
    assert schedule.get_last_lr() == schedule.get_lr() == [schedule.optimizer.param_groups[0]["lr"]]
    again = make(adam())
    again.load_state_dict(schedule.state_dict())
    assert again.get_last_lr() == schedule.get_last_lr()
    again.step(1)
    assert again.get_last_lr() == pytest.approx([CURVES[name][1][2]], abs=1e-6)
    going_on = make(adam(), last_batch_iteration=1)
    going_on.step()
    assert going_on.get_last_lr() == pytest.approx([CURVES[name][1][3]], abs=1e-6)


def test_schedules_take_what_wraps_an_optimizer():
    """Anything with a torch optimizer as `.optimizer`; a torch optimizer is asked for otherwise."""
    inner = adam()
    wrapper = argparse.Namespace(optimizer=inner)
    assert lr_schedules.WarmupLR(wrapper).optimizer is inner
    with pytest.raises(ConfigError, match=r"not a torch\.optim\.Optimizer"):
        lr_schedules.WarmupLR(argparse.Namespace())


def test_schedules_say_what_they_take():
    """The arguments of each are those of DeepSpeed, the last is where a run goes on, and a list has one for a group."""
    assert list(inspect.signature(lr_schedules.WarmupLR).parameters) == [
        *("optimizer", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
    ]
    schedule = lr_schedules.WarmupLR(adam(groups=2), warmup_max_lr=[1.0, 2.0], warmup_num_steps=1)
    schedule.step(10)
    assert schedule.get_last_lr() == [1.0, 2.0]
    with pytest.raises(ValueError, match="warmup_num_steps"):
        lr_schedules.WarmupLR(adam(), warmup_num_steps=0)


def test_one_cycle_cycles_the_betas_of_adam():
    """From `cycle_min_mom` before the first step, then down and up again; an optimizer without betas keeps its own."""
    arguments = dict(cycle_min_lr=1.0, cycle_max_lr=3.0, cycle_first_step_size=2)
    schedule, seen = lr_schedules.OneCycle(adam(), **arguments), []
    for _ in range(5):
        seen.append(schedule.optimizer.param_groups[0]["betas"][0])
        schedule.step()
    assert seen == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.5)
    lr_schedules.OneCycle(sgd, **arguments).step()
    assert sgd.param_groups[0]["momentum"] == 0.5


def test_schedules_on_a_command_line():
    """Options become a `scheduler` section, and a section says which rate it is built around."""
    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    given = parser.parse_args(["--lr_schedule", "WarmupLR", "--warmup_max_lr", "0.5", "--warmup_num_steps", "7"])
    config, why = lr_schedules.get_config_from_args(given)
    params = {"warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 7, "warmup_type": "log"}
    assert config == {"type": "WarmupLR", "params": params} and why is None
    assert lr_schedules.get_lr_from_config(config) == (0.5, "")
    assert lr_schedules.get_config_from_args(parser.parse_args([]))[0] is None
    assert lr_schedules.get_config_from_args(parser.parse_args(["--lr_schedule", "Nope"]))[0] is None
    assert lr_schedules.get_lr_from_config({"type": "WarmupLR"})[0] is None


# -- optimizers


def stepped(optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    """A parameter after each step on the same gradients."""
    parameter, seen = optimizer.param_groups[0]["params"][0], []
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
        seen.append(parameter.detach().clone())
    return seen


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))]


def adam_rule(x, g, s, t, *, lr=1e-3, decay=0.0, l2=0.0):
    """arXiv 1412.6980, algorithm 1; ``decay`` as in arXiv 1711.05101, ``l2`` as part of the gradient."""
    g = g + l2 * x
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.999 * s.get("v", 0) + 0.001 * g * g
    return lr * (s["m"] / (1 - 0.9**t) / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-8) + decay * x)


def adagrad_rule(x, g, s, t):
    """JMLR 12, figure 1: each element by the root of the sum of its squares."""
    s["sum"] = s.get("sum", 0) + g * g
    return 0.01 * g / (s["sum"].sqrt() + 1e-10)


def lion_rule(x, g, s, t, *, decay=0.0):
    """arXiv 2302.06675, algorithm 2, with DeepSpeed's betas."""
    update = (0.9 * s.get("m", 0) + 0.1 * g).sign()
    s["m"] = 0.999 * s.get("m", 0) + 0.001 * g
    return 1e-3 * (update + decay * x)


def lamb_rule(x, g, s, t, *, decay=0.0, least=0.01, most=10.0):
    """arXiv 1904.00962, algorithm 2, the trust ratio between two bounds."""
    update = adam_rule(x, g, s, t, lr=1.0) + decay * x
    return 1e-3 * min(max((x.norm() / update.norm()).item(), least), most) * update


RULES = {
    "FusedAdam": (partial(FusedAdam, weight_decay=0.1), partial(adam_rule, decay=0.1)),
    "FusedAdam L2": (partial(FusedAdam, adam_w_mode=False, weight_decay=0.1), partial(adam_rule, l2=0.1)),
    "CPUAdam": (DeepSpeedCPUAdam, adam_rule),
    "CPUAdam L2": (partial(DeepSpeedCPUAdam, adamw_mode=False, weight_decay=0.1), partial(adam_rule, l2=0.1)),
    "Adagrad": (DeepSpeedCPUAdagrad, adagrad_rule),
    "Lion": (FusedLion, lion_rule),
    "CPULion": (partial(DeepSpeedCPULion, weight_decay=0.1), partial(lion_rule, decay=0.1)),
    "Lamb": (FusedLamb, lamb_rule),
    "Lamb below": (partial(FusedLamb, min_coeff=5.0), partial(lamb_rule, least=5.0)),
    "CPULamb above": (
        partial(DeepSpeedCPULamb, max_coeff=0.3, weight_decay=0.1), partial(lamb_rule, most=0.3, decay=0.1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_optimizers_have_the_update_of_their_formula(name: str):
    """With DeepSpeed's defaults for whatever is not given, in fp64 from the papers."""
    make, rule = RULES[name]
    x, state, draw = weights()[0].detach().double(), {}, torch.Generator().manual_seed(1)
    start = x.clone()
    for step, ours in enumerate(stepped(make(weights())), 1):
        x = x - rule(x, torch.randn(x.shape, generator=draw).double(), state, step)
        torch.testing.assert_close(ours.double() - start, x - start, rtol=1e-4, atol=2e-7)  # roundings of values near 1


IN_FP32 = {
    "Adam": (partial(DeepSpeedCPUAdam, lr=0.1, weight_decay=0.1), partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)),
    "Adagrad": (partial(DeepSpeedCPUAdagrad, lr=0.1), partial(torch.optim.Adagrad, lr=0.1)),
    "Lion": (partial(DeepSpeedCPULion, lr=0.1), partial(sf.optim.Lion, lr=0.1, betas=(0.9, 0.999))),
}


@pytest.mark.parametrize("fp32_states", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IN_FP32)
def test_16_bit_parameters_are_updated_in_fp32_and_states_are_what_is_asked_for(
    name: str, dtype: torch.dtype, fp32_states: bool
) -> None:
    """As the plain class on fp32 copies, whose values are rounded behind each step, and whose states are if asked."""
    make, plain = IN_FP32[name]
    mine, wide = [nn.Parameter(w.detach().to(dtype)) for w in weights()], weights()
    ours, theirs = make(mine, fp32_optimizer_states=fp32_states), plain(wide)
    wide[0].data.copy_(mine[0])
    draw = torch.Generator().manual_seed(3)
    for _ in range(4):
        mine[0].grad = torch.randn(3, 4, generator=draw).to(dtype)
        wide[0].grad = mine[0].grad.float()
        ours.step()
        theirs.step()
        wide[0].data.copy_(wide[0].detach().to(dtype))
        for key, value in theirs.state[wide[0]].items():
            if key != "step" and not fp32_states:
                value.copy_(value.to(dtype))
        assert torch.equal(mine[0].detach().float(), wide[0].detach())
    for key, value in theirs.state[wide[0]].items():
        if key != "step":
            state = ours.state[mine[0]][key]
            assert state.dtype is (torch.float32 if fp32_states else dtype) and torch.equal(state.float(), value), key
    assert ours.param_groups[0]["params"][0] is mine[0] and len(ours.state) == 1


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction(decoupled: bool):
    """`x -= lr * m / (sqrt(v) + eps)`, in one group beside another that corrects."""
    one, other = weights(), weights()
    groups = [{"params": one, "bias_correction": False}, {"params": other}]
    optimizer = FusedAdam(groups, lr=0.1, weight_decay=0.1, adam_w_mode=decoupled)
    reference = torch.optim.Adam(weights(), lr=0.1, weight_decay=0.1, decoupled_weight_decay=decoupled)
    x, m, v = one[0].detach().clone(), 0, 0
    draw = torch.Generator().manual_seed(2)
    for _ in range(3):
        grad = torch.randn(3, 4, generator=draw)
        for parameter in (*one, *other, *reference.param_groups[0]["params"]):
            parameter.grad = grad.clone()
        optimizer.step()
        reference.step()
        x, g = (x * (1 - 0.1 * 0.1), grad) if decoupled else (x, grad + 0.1 * x)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x - 0.1 * m / (v.sqrt() + 1e-8)
    torch.testing.assert_close(one[0].detach(), x)
    torch.testing.assert_close(other[0], reference.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    "make",
    [
        partial(FusedAdam, amsgrad=True),
        partial(DeepSpeedCPUAdam, amsgrad=True),
        partial(FusedLamb, amsgrad=True),
        partial(FusedLamb, eps_inside_sqrt=True),
        partial(FusedLamb, max_grad_norm=1.0),
        partial(DeepSpeedCPUAdagrad, amsgrad=True),
    ],
)
def test_optimizers_refuse_what_they_do_not_do(make: Any):
    """With the kind of error that DeepSpeed raises."""
    with pytest.raises(RuntimeError, match=r"not support"):
        make(weights())


class Net(nn.Module):
    """Gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion, DeepSpeedCPUAdagrad])
def test_the_engine_takes_them(kind: Any, ranks: Ranks):
    """Sharded training with them is plain training with them."""
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 5, generator=draw),) for _ in range(3)]
    make = partial(kind, lr=1e-2)
    same_training(Net, batches, layout="zero3", world_size=2, optimizer=make, steps=6, ranks=ranks, tol=1e-5)


def test_the_engine_takes_instances_that_have_not_stepped():
    """Adagrad makes its state with its groups."""
    model = Net()
    engine = sf.Engine(model, optimizer=DeepSpeedCPUAdagrad(model.parameters()))
    engine.backward(engine(torch.ones(2, 5)))
    assert engine.step().updated
    engine.close()
    fused = FusedAdam(model.parameters())
    assert (
        fused.same_as is torch.optim.Adam and FusedAdam(model.parameters(), bias_correction=False).same_as is FusedAdam
    )
    with pytest.raises(ConfigError, match="already stepped"):
        stepped(fused, 1)
        sf.Engine(model, optimizer=fused)


# -- comm


def everything_by_comm() -> dict[str, Any]:
    """What a rank has after each operation."""
    rank, own = comm.get_rank(), torch.arange(2.0) + 10 * comm.get_rank()
    found: dict[str, Any] = {
        "who": (rank, comm.get_world_size(), comm.get_local_rank(), comm.get_all_ranks_from_group()),
        "adopted": (comm.is_initialized(), comm.init_distributed()),
    }

    def take(name: str, tensor: Any) -> None:
        found[name] = [each.tolist() for each in tensor] if isinstance(tensor, list) else tensor.tolist()

    total = own.clone()
    comm.all_reduce(total, op=comm.ReduceOp.MAX)
    take("all_reduce", total)
    comm.all_reduce_coalesced(both := [own.clone(), own.clone() + 1])
    take("all_reduce_coalesced", both)
    comm.broadcast(sent := own.clone(), src=1)
    take("broadcast", sent)
    comm.all_gather(gathered := [torch.empty(2), torch.empty(2)], own)
    take("all_gather", gathered)
    comm.all_gather_into_tensor(flat := torch.empty(4), own)
    take("all_gather_into_tensor", flat)
    work = comm.all_gather_coalesced([late := torch.empty(4)], [own], async_op=True)
    work.wait()
    take("all_gather_coalesced", late)
    comm.reduce_scatter_tensor(part := torch.empty(1), own.clone())
    take("reduce_scatter_tensor", part)
    comm.all_to_all_single(mixed := torch.empty(2), own)
    take("all_to_all_single", mixed)
    comm.reduce(reduced := own.clone(), dst=0)
    found["reduce"] = reduced.tolist() if rank == 0 else None
    comm.all_gather_object(objects := [None, None], {"rank": rank})
    found["all_gather_object"] = objects
    comm.broadcast_object_list(said := [rank], src=1)
    found["broadcast_object_list"] = said
    if rank == 0:
        comm.send(own, dst=1)
    else:
        comm.recv(came := torch.empty(2), src=0)
        take("recv", came)
    there = torch.empty(2)
    pairs = [comm.P2POp(comm.isend, own, 1 - rank), comm.P2POp(comm.irecv, there, 1 - rank)]
    for work in comm.batch_isend_irecv(pairs):
        work.wait()
    take("batch_isend_irecv", there)
    group = comm.new_group([1])
    found["group"] = comm.get_world_size(group) if rank == 1 else None
    comm.monitored_barrier(timeout=timedelta(seconds=30))
    comm.barrier()
    return found


def test_comm_is_torch_distributed(ranks: Ranks):
    """Each operation on two ranks, in a group that is there already."""
    zero, one = ranks.run(everything_by_comm, world_size=2)
    assert zero["who"] == (0, 2, 0, [0, 1]) and one["who"] == (1, 2, 1, [0, 1])
    for found in (zero, one):
        assert found["adopted"] == (True, None)
        assert found["all_reduce"] == found["broadcast"] == [10.0, 11.0]
        assert found["all_reduce_coalesced"] == [[10.0, 12.0], [12.0, 14.0]]
        assert found["all_gather"] == [[0.0, 1.0], [10.0, 11.0]]
        assert found["all_gather_into_tensor"] == found["all_gather_coalesced"] == [0.0, 1.0, 10.0, 11.0]
        assert found["all_gather_object"] == [{"rank": 0}, {"rank": 1}]
        assert found["broadcast_object_list"] == [1]
    assert (zero["reduce_scatter_tensor"], one["reduce_scatter_tensor"]) == ([10.0], [12.0])
    assert (zero["all_to_all_single"], one["all_to_all_single"]) == ([0.0, 10.0], [1.0, 11.0])
    assert zero["reduce"] == [10.0, 12.0] and one["recv"] == [0.0, 1.0] and one["group"] == 1
    assert (zero["batch_isend_irecv"], one["batch_isend_irecv"]) == ([10.0, 11.0], [0.0, 1.0])


def logged_by_comm() -> Any:
    comm.configure(enabled=True, prof_all=False, prof_ops=["mine"])
    comm.all_reduce(torch.ones(256))
    comm.all_reduce(torch.ones(256), log_name="mine")
    comm.broadcast(torch.ones(4), 0, prof=True)
    with redirect_stdout(io.StringIO()) as out:
        said = comm.log_summary(show_straggler=True, return_dict=True)
    counts = comm.get_comm_operation_count(), comm.get_logged_comm_ops(), comm.has_comm_data()
    comm.reset_log()
    return said, out.getvalue(), counts, comm.has_comm_data()


def test_comm_logs_what_it_is_told_to(ranks: Ranks):
    """Operations that are named, or called with `prof`; printed by rank 0, given as data by each."""
    (said, printed, counts, left), (_, silent, _, _) = ranks.run(logged_by_comm, world_size=2)
    assert counts == (2, ["mine", "broadcast"], True) and not left
    entry = said["summary"]["mine"][1024]
    assert entry["count"] == 1 and entry["msg_size_str"] == "1.0 KB" and entry["avg_latency_ms"] > 0
    assert said["straggler_analysis"]["mine"][1024]["total_straggler_ms"] >= 0
    assert said["metadata"]["world_size"] == 2
    assert "Comm. Op" in printed and "Straggler Effect" in printed and not silent


def test_one_process_alone_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch):
    """No launcher is needed, neither before `init_distributed` nor for it, and it does not change the environment."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (0, 1, False)
    comm.barrier()
    before = dict(os.environ)
    try:
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=True, timeout=timedelta(minutes=1))
        assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (0, 1, True)
        comm.all_reduce(one := torch.ones(1))
        assert one == 1 and not set(names) & os.environ.keys()
        assert before.items() <= os.environ.items()  # PyTorch adds folders of its own when its compiler is imported
        comm.init_distributed(dist_init_required=True)
    finally:
        comm.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="dist_init_required is False"):
        comm.init_distributed(dist_init_required=False)
    with pytest.raises(ConfigError, match="timedelta"):
        comm.init_distributed(timeout=3)  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"call deepspeed\.init_distributed"):
        comm.get_rank()
    with pytest.raises(UsageError, match="RANK, MASTER_ADDR, MASTER_PORT are not set"):
        comm.init_distributed()


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
TWO_NODES = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[02-03]",
    "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1", "SLURM_JOB_ID": "9",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "port", "found"),
    [
        ({}, 29500, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n1"}, 29500, None),  # a batch script
        (SLURM, 4000, ("5", "8", "1", "n02", "4000")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 29500, ("3", "4", "1", "127.0.0.1", "29500")),
        ({**TWO_NODES, "MASTER_ADDR": "h", "MASTER_PORT": "7"}, 29500, ("3", "4", "1", "h", "7")),
        ({**TWO_NODES, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 29500, ("3", "4", "1", "10.0.0.4", "6000")),
    ],
)
def test_other_launchers_environments(environment: dict[str, str], port: int, found: tuple[str, ...] | None):
    """Slurm's step and MPI's variables, in PyTorch's words; a batch script alone is no launcher."""
    said = discover(environment, port)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert (tuple(said[name] for name in names) if said else None) == found


def test_several_machines_need_an_address():
    """One sentence says what to set."""
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        discover(TWO_NODES, 29500)


def test_the_launcher_s_functions(tmp_path: Path):
    """Host files and filters, in DeepSpeed's forms."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("a slots=2\nb slots=4\n")
    pool = runner.fetch_hostfile(str(hosts))
    assert pool == {"a": 2, "b": 4} and runner.fetch_hostfile(str(tmp_path / "none")) is None
    active = runner.parse_inclusion_exclusion(pool, "b:0,2", "")
    assert active == {"b": [0, 2]} and runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert json.loads(base64.urlsafe_b64decode(runner.encode_world_info(active))) == active


# -- checkpointing


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, scale: float, *, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with checkpointing.get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(self.inner(x), 0.5)
        return y * scale + shift, nn.functional.dropout(y, 0.5)


@pytest.mark.parametrize("options", [{}, {"checkpoint_in_cpu": True}, {"synchronize": True, "profile": True}])
def test_checkpointed_gradients_are_the_plain_ones(options: dict[str, Any]):
    """With dropout from the device's generator and from a tracked one, arguments of all kinds, and several outputs."""
    assert not checkpointing.is_configured()
    model, x, shift = Dropping(), torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)

    def gradients(call: Any) -> list[torch.Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(5)
        for _ in range(2):  # the tracked generator goes on
            first, second = call(model, x, 2.0, shift=shift)
        return list(torch.autograd.grad((first * second).sum(), [x, shift, *model.parameters()]))

    with keeping_checkpointing():
        checkpointing.configure(None, **options)
        assert checkpointing.is_configured()
        with torch.random.fork_rng(), redirect_stdout(io.StringIO()) as out:
            plain = gradients(lambda module, *args, **kwargs: module(*args, **kwargs))
            again = gradients(checkpointing.checkpoint)
        assert bool(options.get("profile")) == ("time (ms) | forward" in out.getvalue())
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_checkpointing_reads_a_configuration(tmp_path: Path):
    """A section's keys, and arguments that come before them; what does not go together is refused."""
    path = tmp_path / "ds.json"
    path.write_text('{"activation_checkpointing": {"cpu_checkpointing": true, "number_checkpoints": 3}}')
    with keeping_checkpointing():
        checkpointing.configure(None, deepspeed_config=str(path), num_checkpoints=4)
        settings = checkpointing._State.settings
        assert settings.checkpoint_in_cpu and settings.num_checkpoints == 4 and not settings.profile
        with pytest.raises(ConfigError, match="contiguous_checkpointing needs"):
            checkpointing.configure(None, contiguous_checkpointing=True)


class _Shares:
    """An ``mpu``: all ranks share layers."""

    def get_tensor_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD


def _partitioned(options: dict[str, Any]) -> tuple[bool, int, int, str]:
    """Whether gradients are the plain ones; bytes of one argument, and of what is kept of it; what is refused."""
    torch.manual_seed(3)
    model, x, shift = Dropping(), torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    kept: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def gradients(call: Any) -> list[torch.Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(5)
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                first, second = call(model, x, 2.0, shift=shift)
            found = torch.autograd.grad((first * second).sum(), [x, shift, *model.parameters()])
        return list(found)

    with keeping_checkpointing():
        plain = gradients(lambda module, *args, **kwargs: module(*args, **kwargs))
        kept.clear()
        checkpointing.configure(_Shares(), deepspeed_config={"activation_checkpointing": options})
        again = gradients(checkpointing.checkpoint)
        largest = max(tensor.untyped_storage().nbytes() for tensor in kept)
        said = ""
        try:
            for _ in range(2):
                y = x.detach() + torch.distributed.get_rank() if not options.get("number_checkpoints") else x + 0.0
                kept += checkpointing.checkpoint(model, y, 2.0, shift=shift)
                checkpointing._State.compared.clear()
        except UsageError as error:
            said = str(error)
    return all(map(torch.equal, plain, again)), x.nbytes, largest, said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition_activations": True}, "Dropping, is called with other tensors on each of the 2 ranks"),
        ({"partition_activations": True, "cpu_checkpointing": True}, "is called with other tensors"),
        (
            {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 1},
            "for the inputs of 1 checkpoints, and one more",
        ),
    ],
)
def test_checkpointed_arguments_are_divided(ranks: Ranks, options: dict[str, Any], said: str) -> None:
    """Each rank that shares layers keeps half of an argument, and gradients are the plain ones, with tracked
    generators; arguments that differ on these ranks are refused, and more checkpoints than contiguous memory is for."""
    for same, whole, kept, refused in ranks.run(_partitioned, options, world_size=2):
        assert same and kept == whole // 2 and said in refused


def test_tracked_generators_refuse_what_would_be_the_same():
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(UsageError, match="seed 1 already"):
        tracker.add("b", 1)
    with pytest.raises(UsageError, match="state a already"):
        tracker.add("a", 2)
    with pytest.raises(UsageError, match="c is not added"), tracker.fork("c"):
        pass


# -- the rest


def test_the_accelerator():
    """The CPU here; another can be set, and what is none is refused."""
    here = accelerator.get_accelerator()
    assert here is accelerator.get_accelerator() and accelerator.is_current_accelerator_supported()
    if not torch.cuda.is_available():
        assert (here.device_name(), here.current_device_name(), here.communication_backend_name()) == (
            "cpu",
            "cpu",
            "gloo",
        )
    assert here.memory_allocated() > 0 and here.total_memory() >= here.available_memory() > 0
    assert here.on_accelerator(torch.ones(1, device=here.current_device_name()))
    assert torch.float32 in here.supported_dtypes()
    environment: dict[str, str] = {}
    here.set_visible_devices_envs(environment, [0, 2])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert isinstance(here, DeepSpeedAccelerator)
    with pytest.raises(ConfigError, match="not an accelerator"):
        accelerator.set_accelerator(object())
    builder = here.create_op_builder("CPUAdamBuilder")
    assert builder.NAME == "cpu_adam" and builder.is_compatible() is False and here.get_op_builder("Nothing") is None
    with pytest.raises(UsageError, match="nothing is compiled here"):
        builder.load()


def test_logging_by_rank(capsys: pytest.CaptureFixture[str]):
    """Without a group all is said; levels are set by name; once is once."""
    ds_logging.log_dist("unheard", ranks=[0])
    try:
        ds_logging.set_log_level_from_string("info")
        assert ds_logging.get_current_level() == logging.INFO and ds_logging.should_log_le("info")
        ds_logging.log_dist("heard", ranks=[7])
        for _ in range(2):
            ds_logging.warning_once("one")
    finally:
        ds_logging.set_log_level_from_string("warning")
    said = capsys.readouterr().out
    assert "[Rank -1] heard" in said and "unheard" not in said and said.count("one") == 1
    with pytest.raises(ValueError, match="'loud' is not a level"):
        ds_logging.get_log_level_from_string("loud")


def logged_by_rank() -> str:
    with redirect_stdout(io.StringIO()) as out:
        for ranks in (None, [], [1], [-1], [0, 1]):
            ds_logging.print_dist(f"to {ranks}", ranks)
    return out.getvalue()


def test_logging_among_ranks(ranks: Ranks):
    """Those that are listed say it; -1 is all of them; nobody without a list, as in DeepSpeed."""
    zero, one = ranks.run(logged_by_rank, world_size=2)
    assert zero.splitlines() == ["[Rank 0] to [-1]", "[Rank 0] to [0, 1]"]
    assert one.splitlines() == ["[Rank 1] to [1]", "[Rank 1] to [-1]", "[Rank 1] to [0, 1]"]


def test_on_device():
    """Tensors and modules are made on a device in a dtype; integers keep theirs; disabled it does nothing."""
    with OnDevice(dtype=torch.float16, device="meta"):
        model, numbers = nn.Linear(4, 4), torch.arange(3)
    assert model.weight.is_meta and model.weight.dtype == torch.float16 and numbers.dtype == torch.int64
    with OnDevice(dtype=torch.bfloat16, device="cpu"):
        made = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4))
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16} and not made[0].weight.is_meta
    with OnDevice(dtype=torch.float16, device="meta", enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    assert torch.zeros(1).dtype == torch.float32


def test_clones_have_their_own_storage():
    """On the CPU, in containers of the same kinds."""
    base = torch.arange(10.0, requires_grad=True)
    item = OrderedDict(a=base[2:4], b=[(base, 1)], c="x")
    clone = clone_tensors_for_torch_save(item)
    assert type(clone) is OrderedDict and type(clone["b"]) is list and type(clone["b"][0]) is tuple
    assert clone["a"].untyped_storage().nbytes() == 8 and not clone["a"].requires_grad and clone["c"] == "x"
    assert torch.equal(clone["b"][0][0], base) and clone["b"][0][0].data_ptr() != base.data_ptr()


def test_arguments_of_a_script():
    """`--deepspeed`, `--deepspeed_config` and their older names, beside the script's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--own")
    assert add_config_arguments(parser) is parser
    given = parser.parse_args(["--own", "1", "--deepspeed", "--deepspeed_config", "ds.json"])
    assert (given.deepspeed, given.deepspeed_config, given.own, given.deepscale) == (True, "ds.json", "1", False)


def test_helpers_of_the_runtime(capsys: pytest.CaptureFixture[str]):
    """Norms, clipping, parts, memory."""
    assert runtime_utils.get_global_norm([3.0, 4.0]) == 5.0
    assert runtime_utils.get_global_norm([3.0, -1.0]) == runtime_utils.get_global_norm([math.nan]) == math.inf
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert runtime_utils.clip_grad_norm_([parameter], 1.0) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert runtime_utils.clip_tensors_by_global_norm(tensors, max_norm=2.5) == 5.0
    torch.testing.assert_close(torch.cat(tensors), torch.tensor([1.5, 2.0]))
    assert runtime_utils.partition_uniform(10, 3) == [0, 4, 7, 10]
    assert runtime_utils.partition_balanced([1, 1, 1, 9, 1], 3) == [0, 3, 4, 5]
    assert runtime_utils.call_to_str("f", 1, b="x") == "f(1, b='x')"
    runtime_utils.see_memory_usage("quiet")
    runtime_utils.see_memory_usage("here", force=True)
    said = capsys.readouterr().out
    assert said.startswith("here\nMA ") and "CPU Virtual Memory:  used = " in said


def test_timers(capsys: pytest.CaptureFixture[str]):
    """Milliseconds between start and stop, by name; samples per second from the third step on."""
    timers = SynchronizedWallClockTimer()
    timers("a").start()
    with pytest.raises(UsageError, match="already been started"):
        timers("a").start()
    timers("a").stop()
    assert timers("a").elapsed(reset=False) > 0 and set(timers.get_mean(["a", "b"])) == {"a"}
    timers.log(["a"])
    assert "time (ms) | a: " in capsys.readouterr().out and timers("a").elapsed() == 0
    lines: list[str] = []
    config = argparse.Namespace(enabled=True, synchronized=False)
    throughput = ThroughputTimer(config, batch_size=4, steps_per_output=4, logging_fn=lines.append)
    for _ in range(4):
        throughput.start()
        throughput.stop(global_step=True)
    assert len(lines) == 1 and "global_step=4, RunningAvgSamplesPerSec=" in lines[0]
    assert throughput.avg_samples_per_sec() > 0


def test_the_log_is_off_by_default():
    """Nothing is timed unless asked for."""
    assert not comms_logger.enabled and not comms_logger.wants("all_reduce", prof=True)
