"""The contenders: what each makes of the model, as forward and backward and as an optimizer step.

All train the same model with the same optimizer and neither clip nor accumulate. In ``bf16`` a bare loop and DDP run
the forward under ``torch.autocast`` over fp32 parameters; ``fully_shard`` has ``MixedPrecisionPolicy(bfloat16,
reduce_dtype=float32)``; DeepSpeed has its ``bf16`` section; ours has ``precision="bf16"``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.comm.backend import device_backend
from shardfold.tools.bench.contenders import Contender
from shardfold.tools.bench.models import LEARNING_RATE
from shardfold.tools.bench.settings import Settings

__all__ = ["Side", "build", "prepare"]

Batch = tuple[Tensor, ...]

#: What is imported before anything is measured.
LIBRARIES = {
    "bare": (),
    "ddp": ("torch.distributed.optim",),
    "fully_shard": ("torch.distributed.fsdp", "torch.distributed.device_mesh"),
    "deepspeed": ("deepspeed",),
    "engine": ("shardfold.engine.engine",),
}


@dataclass(kw_only=True)
class Side:
    """One contender in this process.

    Attributes:
        compute: forward and backward on a batch; gives the loss.
        update: the optimizer step, and what clears the gradients.
        optimizer: the optimizer that updates, for the record.
        traffic: bytes that were handed to collectives in the last step, where the contender counts them.
    """

    compute: Callable[[Batch], Tensor]
    update: Callable[[], object]
    optimizer: Any
    traffic: Callable[[], int] | None = None


def prepare(contender: Contender, settings: Settings, device: torch.device) -> None:
    """Imports what the contender needs, joins the ranks, and runs a few kernels once."""
    # The first optimizer imports torch._dynamo: a second, and memory that is nobody's in particular.
    for library in ("torch._dynamo", *LIBRARIES[contender.kind]):
        importlib.import_module(library)
    if settings.ranks > 1 or contender.kind not in ("bare", "engine"):
        dist.init_process_group(device_backend(device))
        dist.barrier()
    model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64)).to(device)
    optimizer = optimizer_of(settings)(model.parameters())
    for _ in range(2):
        with _autocast(settings, device):
            loss = model(torch.zeros(4, 8, dtype=torch.long, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(settings: Settings) -> partial[Any]:
    lr = LEARNING_RATE[settings.job]
    if settings.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=lr, fused=True)
    return partial(torch.optim.SGD, lr=lr)  # fully_shard's parameters have no fused SGD


def build(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    """The contender's side for a model that is still on the CPU."""
    return BUILDERS[contender.kind](contender, settings, model, device)


def _autocast(settings: Settings, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if settings.precision == "bf16" else nullcontext()


def _loop(model: nn.Module, optimizer: Any, forward: Callable[[], AbstractContextManager[Any]], **clear: bool) -> Side:
    def compute(batch: Batch) -> Tensor:
        with forward():
            loss = model(*batch)
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(**clear)

    return Side(compute=compute, update=update, optimizer=optimizer)


def bare(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    model.to(device)
    clear = {"set_to_none": False} if contender.option == "zeros" else {}
    return _loop(model, optimizer_of(settings)(model.parameters()), partial(_autocast, settings, device), **clear)


def ddp(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    parallel = nn.parallel.DistributedDataParallel(
        model.to(device), device_ids=[device] if accelerator.has_streams(device) else None
    )
    make = optimizer_of(settings)
    if contender.option == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        cls: Any = make.func
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), cls, **make.keywords)
    else:
        optimizer = make(model.parameters())
    return _loop(parallel, optimizer, partial(_autocast, settings, device))


def fully_shard(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    common: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (settings.ranks,)),
        "mp_policy": narrow if settings.precision == "bf16" else MixedPrecisionPolicy(),
    }
    model.to(device)
    blocks: Any = model.blocks
    for block in blocks:
        shard(block, reshard_after_forward=contender.option != "keep", **common)
    shard(model, **common)
    return _loop(model, optimizer_of(settings)(model.parameters()), nullcontext)


def deepspeed(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    initialize = importlib.import_module("deepspeed").initialize
    narrow = settings.precision == "bf16"
    config = {
        "train_micro_batch_size_per_gpu": settings.rows,
        "gradient_clipping": 0,  # it would clip at 1
        "zero_optimization": {"stage": int(contender.option)},
        "bf16": {"enabled": narrow},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own would be compiled first
    }
    optimizer = optimizer_of(settings)(model.parameters())
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)

    def compute(batch: Batch) -> Tensor:
        if narrow:
            batch = tuple(each.bfloat16() if each.is_floating_point() else each for each in batch)
        loss = engine(*batch)
        engine.backward(loss)
        return loss.detach()

    return Side(compute=compute, update=engine.step, optimizer=optimizer)


def engine(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    from shardfold.engine.engine import Engine

    mesh = {"inter": contender.nodes, "intra": settings.ranks // contender.nodes}
    own = Engine(
        model, optimizer=optimizer_of(settings), layout=contender.option, precision=settings.precision, mesh=mesh,
        device=device,
    )  # fmt: skip

    def compute(batch: Batch) -> Tensor:
        loss = own(*batch)
        own.backward(loss)
        return loss.detach()

    def traffic() -> int:
        report = own.traffic()
        return report.sent + report.control

    return Side(compute=compute, update=own.step, optimizer=own.optimizer, traffic=traffic)


BUILDERS: dict[str, Callable[[Contender, Settings, nn.Module, torch.device], Side]] = {
    "bare": bare,
    "ddp": ddp,
    "fully_shard": fully_shard,
    "deepspeed": deepspeed,
    "engine": engine,
}
