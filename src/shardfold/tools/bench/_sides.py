"""The contenders: what each makes of the model, as forward and backward and as an optimizer step.

All train the same model with the same optimizer, do not accumulate, and clip only where the settings say so. In
``bf16`` a bare loop and DDP run the forward under ``torch.autocast`` over fp32 parameters; ``fully_shard`` has
``MixedPrecisionPolicy(bfloat16, reduce_dtype=float32)``; DeepSpeed has its ``bf16`` section; ours has
``precision="bf16"``. What is compiled is compiled by ``torch.compile`` with its defaults: a bare loop as a whole model,
``fully_shard`` block by block before the blocks are wrapped, as torchtitan does, ours by ``Runtime(compile="blocks")``.
"""

from __future__ import annotations

import importlib
import tempfile
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
from shardfold.comm.dtypes import TORCH_DTYPES
from shardfold.tools.bench.contenders import Contender
from shardfold.tools.bench.jobs import LEARNING_RATE
from shardfold.tools.bench.settings import NODES, Settings

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
        moved: bytes that went between the device and slower tiers in the last step, by the program and counted, where
            the contender counts them.
        master: dtype of what the optimizer updates; None: that of the optimizer's own parameters.
    """

    compute: Callable[[Batch], Tensor]
    update: Callable[[], object]
    optimizer: Any
    traffic: Callable[[], int] | None = None
    moved: Callable[[], tuple[float, float]] | None = None
    master: torch.dtype | None = None


def prepare(contender: Contender, settings: Settings, device: torch.device) -> None:
    """Imports what the contender needs, joins the ranks, and runs a few kernels once."""
    # The first optimizer imports torch._dynamo: a second, and memory that is nobody's in particular.
    for library in ("torch._dynamo", *LIBRARIES[contender.kind]):
        importlib.import_module(library)
    if contender.kind == "deepspeed" and contender.offload:
        _build_operators(contender)
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


def _build_operators(contender: Contender) -> None:
    """Has DeepSpeed compile the operators that its offload needs, or load what it has compiled on this machine before.

    Raises:
        SystemExit: it cannot; the reason is what the rank says last.
    """
    builders = importlib.import_module("deepspeed.ops.op_builder")
    for name in ("CPUAdamBuilder", *(("AsyncIOBuilder",) if contender.offload == "nvme" else ())):
        builder = getattr(builders, name)()
        if not builder.is_compatible(verbose=False):
            raise SystemExit(
                f"DeepSpeed's {builder.name} cannot be built here: 'ds_report' says what it lacks (async_io: the "
                "headers of libaio)."
            )
        builder.load(verbose=False)


def _autocast(settings: Settings, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if settings.precision == "bf16" else nullcontext()


def _loop(
    model: nn.Module,
    optimizer: Any,
    forward: Callable[[], AbstractContextManager[Any]],
    clip_norm: float,
    **clear: bool,
) -> Side:
    def compute(batch: Batch) -> Tensor:
        with forward():
            loss = model(*batch)
        loss.backward()
        return loss.detach()

    def update() -> None:
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(**clear)

    return Side(compute=compute, update=update, optimizer=optimizer)


def bare(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    model.to(device)
    clear = {"set_to_none": False} if contender.option == "zeros" else {}
    optimizer = optimizer_of(settings)(model.parameters())
    run: Any = torch.compile(model) if contender.compiled == "model" else model
    return _loop(run, optimizer, partial(_autocast, settings, device), settings.clip_norm, **clear)


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
    return _loop(parallel, optimizer, partial(_autocast, settings, device), settings.clip_norm)


def fully_shard(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    common: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (settings.ranks,)),
        "mp_policy": narrow if settings.precision == "bf16" else MixedPrecisionPolicy(),
    }
    if contender.offload:
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=accelerator.has_streams(device))
    else:
        model.to(device)
    blocks: Any = model.blocks
    for block in blocks:
        if contender.compiled == "blocks":
            block.compile()
        shard(block, reshard_after_forward=contender.option != "keep", **common)
    shard(model, **common)
    return _loop(model, optimizer_of(settings)(model.parameters()), nullcontext, settings.clip_norm)


def deepspeed(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    initialize = importlib.import_module("deepspeed").initialize
    narrow = settings.precision == "bf16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.rows,
        "gradient_clipping": settings.clip_norm,  # not told, it would clip at 1
        "zero_optimization": {"stage": int(contender.option)},
        "bf16": {"enabled": narrow},
    }
    if contender.offload:  # with its own optimizer of host memory
        config["zero_optimization"]["offload_optimizer"] = _offload_optimizer(contender, device)
        config["optimizer"] = _own_optimizer(settings)
        engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
        optimizer: Any = engine.optimizer.optimizer
    else:
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        optimizer = optimizer_of(settings)(model.parameters())
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config)

    def compute(batch: Batch) -> Tensor:
        if narrow:
            batch = tuple(each.bfloat16() if each.is_floating_point() else each for each in batch)
        loss = engine(*batch)
        engine.backward(loss)
        return loss.detach()

    # Stage 3 keeps nothing in its optimizer's groups between steps.
    master = getattr(engine.optimizer, "master_weights_and_grads_dtype", None)
    return Side(compute=compute, update=engine.step, optimizer=optimizer, master=master)


def _offload_optimizer(contender: Contender, device: torch.device) -> dict[str, Any]:
    own: dict[str, Any] = {"device": contender.offload, "pin_memory": accelerator.has_streams(device)}
    if contender.offload == "nvme":  # as its tutorials have it
        own |= {"nvme_path": tempfile.mkdtemp(), "pipeline_read": True, "pipeline_write": True}
    return own


def _own_optimizer(settings: Settings) -> dict[str, Any]:
    """The ``optimizer`` section that makes it DeepSpeedCPUAdam, with torch's defaults.

    Raises:
        SystemExit: the settings have another optimizer.
    """
    if settings.optimizer != "adamw":
        raise SystemExit(f"DeepSpeed offloads its own Adam, and not {settings.optimizer}: leave out --optimizer.")
    own = {"lr": LEARNING_RATE[settings.job], "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    return {"type": "AdamW", "params": own}


def engine(contender: Contender, settings: Settings, model: nn.Module, device: torch.device) -> Side:
    from shardfold.comm.runtime import Runtime
    from shardfold.engine.engine import Engine
    from shardfold.plan.rewrites import Overlap

    nodes = contender.nodes if settings.link is None else NODES
    mesh = {"inter": nodes, "intra": settings.ranks // nodes}
    where: dict[str, Any] = {"device": device, **({"compile": contender.compiled} if contender.compiled else {})}
    alone = {"bucket": None} if settings.job == "units" else {}  # it is about what a unit takes
    overlap: Any = {**contender.overlap, **alone}
    own = Engine(
        model,
        optimizer=optimizer_of(settings),
        layout=contender.option,
        precision=contender.precision or settings.precision,
        parallel=mesh,
        runtime=Runtime(**where),
        overlap=Overlap(**overlap),
        offload=contender.offload or None,
        clip_norm=settings.clip_norm or None,
    )

    def compute(batch: Batch) -> Tensor:
        loss = own(*batch)
        own.backward(loss)
        return loss.detach()

    def traffic() -> int:
        report = own.traffic()
        return report.sent + report.control

    def moved() -> tuple[float, float]:
        rows = own.traffic().moved
        return sum(row.program for row in rows), sum(row.moved for row in rows)

    return Side(
        compute=compute,
        update=own.step,
        optimizer=own.optimizer,
        traffic=traffic,
        moved=moved,
        master=TORCH_DTYPES[own.layout.master.dtype],
    )


BUILDERS: dict[str, Callable[[Contender, Settings, nn.Module, torch.device], Side]] = {
    "bare": bare,
    "ddp": ddp,
    "fully_shard": fully_shard,
    "deepspeed": deepspeed,
    "engine": engine,
}
