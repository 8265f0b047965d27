"""``deepspeed.initialize``: a model and a config in, an engine out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardfold.compat.deepspeed import comm
from shardfold.compat.deepspeed.config import DeepSpeedConfig, Note, Settings, said
from shardfold.compat.deepspeed.config_parallel import Said
from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.git_version_info import git_branch, git_hash, version
from shardfold.compat.deepspeed.monitor.monitor import MonitorMaster
from shardfold.compat.deepspeed.mpu import told_by
from shardfold.compat.deepspeed.optimizers import check_scheduler, chosen_optimizer, chosen_scheduler
from shardfold.compat.deepspeed.pipeline_module import PipelineModule
from shardfold.compat.deepspeed.ranks import NOW
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.compat.deepspeed.tensor import check_dtype, told_of
from shardfold.compat.deepspeed.together import together
from shardfold.compat.deepspeed.utils.logging import log_dist, set_log_level_from_string
from shardfold.compat.deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
from shardfold.plan.version import __version__

__all__ = ["initialize"]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Makes an engine that trains ``model`` as the config says.

    Args:
        args: whatever a command line gave: ``deepspeed_config`` is the config, ``device_rank`` the GPU.
        model: required; it becomes the engine's.
        optimizer: a ``torch.optim.Optimizer``, or a callable that makes one of ``model_parameters``; in place of the
            config's.
        model_parameters: parameters or groups of them to optimize; None: all of the model's.
        training_data: a dataset, of which the engine makes a loader.
        lr_scheduler: a schedule, or a callable that makes one of the optimizer, in place of the config's.
        distributed_port: of rank 0, where no launcher says it.
        mpu: says how ranks are shared out, in Megatron's words: those of tensor, by layers of the model's own, or of
            sequence.
        dist_init_required: False: ``torch.distributed`` must be initialized already.
        collate_fn: of the loader.
        config: a dict, or the path of a JSON file.
        mesh_param: ``(data-parallel, sequence-parallel)`` sizes.
        config_params: the older name of ``config``.

    Returns:
        The engine, its optimizer, the loader and the schedule; None for what there is not.

    Raises:
        ConfigError: an argument or the config cannot be honoured, on any rank; a sentence says why.
    """
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    _say_version()
    with together("deepspeed.initialize()"):
        if not isinstance(model, nn.Module):
            given = "no model" if model is None else f"a {type(model).__name__}"
            raise WrongArgument(f"initialize(model=...) was given {given}: it requires a torch.nn.Module.")
        view = DeepSpeedConfig(
            _config(args, config, config_params), told=_told(model, mpu, mesh_param), optimizer=optimizer
        )
        settings = view.settings
        comm.configure(view)
        check_dtype(model, settings)
        monitor = MonitorMaster(settings)  # whose packages only rank 0 imports
        basic = chosen_optimizer(optimizer, settings, model, model_parameters)
        if basic is not None:
            check_scheduler(lr_scheduler, settings, basic)
    _enter(view, model, mpu, mesh_param)
    kind = _engine_class(model)
    engine = kind(model, view, basic, args=args, training_data=training_data, collate_fn=collate_fn, mpu=mpu)
    engine.client_optimizer, engine.client_lr_scheduler = optimizer, lr_scheduler
    try:
        with together("the schedule of deepspeed.initialize()"):
            engine.finish(monitor)
            if basic is not None:
                engine.lr_scheduler = chosen_scheduler(lr_scheduler, settings, engine.optimizer)
    except BaseException:
        engine.destroy()
        raise
    if settings.stage == 3:
        from shardfold.compat.deepspeed import zero

        zero.note_parameters(engine)
    if type(model).to is not nn.Module.to:  # parameters are there already: what else a module of the user's has, moves
        model.to(engine.device)
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    _enter_client(engine, trains=basic is not None)
    if notes := [*settings.notes, *_unused_schedule(basic, settings, lr_scheduler)]:
        log_dist(said(notes), ranks=[0], level=logging.WARNING)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _enter_client(engine: DeepSpeedEngine, *, trains: bool) -> None:
    """What a client finds at its model and in its loop, where it is one that is known."""
    _offer_kv_offload(engine.module, engine.device, trains=trains)
    if engine.elastic is not None:
        from shardfold.compat.deepspeed import elastic_lightning, elastic_trainer  # elsewhere nothing of it is needed

        elastic_trainer.enter_trainer(engine)
        elastic_lightning.enter_lightning(engine)


def _offer_kv_offload(model: nn.Module, device: torch.device, *, trains: bool) -> None:
    """Gives a model of transformers that is only asked the method of the fork that ZeRO-Inference's programs need: keys
    and values of its ``generate()`` rest in host memory, by transformers' own cache of that kind."""
    config: Any = getattr(model, "generation_config", None)
    if trains or config is None or hasattr(model, "set_kv_cache_offload"):
        return

    def set_kv_cache_offload(
        enabled: bool, gen_len: int | None = None, pin: bool = False, overlapped: bool = False
    ) -> None:
        del gen_len, overlapped  # the cache grows as it is needed, and its copies run beside the layers
        if device.type != "cpu":  # there keys and values are in host memory already
            config.cache_implementation = "offloaded" if enabled else None
            if enabled and pin:
                why = "keys and values are not pinned: transformers' cache in host memory has no such choice"
                log_dist(said([Note("set_kv_cache_offload(pin)", True, why)]), ranks=[0], level=logging.WARNING)

    model.set_kv_cache_offload = set_kv_cache_offload  # pyright: ignore[reportArgumentType]


def _say_version() -> None:
    """In DeepSpeed's words, for which the tests of its clients look."""
    log_dist(
        f"DeepSpeed info: version={version}, git-hash={git_hash}, git-branch={git_branch} (DeepSpeed's interface, of "
        f"Shardfold {__version__})",
        ranks=[0],
    )


def _enter(view: DeepSpeedConfig, model: nn.Module, mpu: Any, mesh_param: Any) -> None:
    """What the interface's global calls answer from now on."""
    settings = view.settings
    if settings["log_level"] is not None:
        set_log_level_from_string(settings["log_level"])
    apply_zero_leaf_module_config(model, view.zero_config.leaf_module)
    NOW.enter(settings.sizes.tensor, settings.sizes.sequence, settings.sizes.pipeline)
    NOW.mpu, NOW.mesh_device = mpu, None
    if mesh_param is not None and settings.sizes.tensor == 1:
        NOW.mesh_device = comm.initialize_mesh_device(tuple(mesh_param), ("data_parallel", "sequence_parallel"))


def _engine_class(model: nn.Module) -> type[DeepSpeedEngine]:
    if not isinstance(model, PipelineModule):
        return DeepSpeedEngine
    from shardfold.compat.deepspeed.pipeline_engine import PipelineEngine

    return PipelineEngine


def _config(args: Any, config: Any, config_params: Any) -> Any:
    """The one config that was given."""
    given = {
        "config=": config,
        "config_params=": config_params if config is None else None,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        raise WrongArgument(
            f"initialize() was given {' and '.join(found) or 'no config'}: it requires one config, as config= or as "
            "args.deepspeed_config."
        )
    return next(iter(found.values()))


def _unused_schedule(optimizer: Any, settings: Settings, lr_scheduler: Any) -> list[Note]:
    """The config's schedule where another was given; and one that has nothing to schedule: DeepSpeed makes none, and an
    engine may only evaluate."""
    if optimizer is not None:
        why = "it is not used: initialize(lr_scheduler=...) was given one, which is; leave one of them out"
        both = lr_scheduler is not None and settings.scheduler is not None
        return [Note("scheduler.type", settings.scheduler[0], why)] if both else []  # pyright: ignore
    why = "it is not used: there is no optimizer, in the config or as initialize(optimizer=...)"
    if lr_scheduler is not None:
        return [Note("initialize(lr_scheduler=...)", type(lr_scheduler).__name__, why)]
    return [Note("scheduler.type", settings.scheduler[0], why)] if settings.scheduler is not None else []


def _told(model: nn.Module, mpu: Any, mesh_param: Any) -> dict[str, list[Said]]:
    """How many ranks of tensor and of sequence there are, as far as it is said beside the config.

    Raises:
        WrongArgument: ``mesh_param`` is no mesh of all ranks, or ``mpu`` is not one that is here.
    """
    told: dict[str, list[Said]] = {"autotp": told_of(model), "tensor": [], "sequence": []}
    if isinstance(model, PipelineModule):
        if mpu is not None:
            raise WrongArgument(
                "initialize(mpu=...) is not for a PipelineModule, whose topology= says how ranks are shared."
            )
        told["pipeline"] = [Said(model.num_stages, "PipelineModule(num_stages=...)")]
        slices = model.topology().get_dim("model")
        told["tensor"] += [Said(slices, "PipelineModule(topology=...)")] if slices > 1 else []
    for axis, sizes in told_by(mpu).items():
        told[axis] += sizes
    if mesh_param is not None:
        ranks = comm.get_world_size()
        if len(mesh_param) != 2 or mesh_param[0] * mesh_param[1] != ranks:
            raise WrongArgument(
                f"initialize(mesh_param={mesh_param!r}): it is (data-parallel, sequence-parallel) sizes, which "
                f"multiply up to the {ranks} rank{'s' if ranks > 1 else ''} there are."
            )
        told["sequence"].append(Said(mesh_param[1], "initialize(mesh_param=...)"))
    if NOW.sharing > 1:
        told["sequence"].append(Said(NOW.sharing, "initialize_sequence_parallel()"))
    return told
