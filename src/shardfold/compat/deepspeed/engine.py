"""``DeepSpeedEngine``: DeepSpeed's words for what :class:`shardfold.Engine` does.

DeepSpeed divides each loss by the number of micro-batches and sums their gradients; the engine underneath divides
gradients as they arrive. ``backward()`` here divides the loss, so that fp16 sees the very numbers that it sees under
DeepSpeed, and tells the engine not to divide. A ``loss.backward()`` of the user's is divided by the engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardfold.comm.runtime import Runtime
from shardfold.compat.deepspeed.batches import Batches
from shardfold.compat.deepspeed.config import DeepSpeedConfig
from shardfold.compat.deepspeed.config_files import check_files
from shardfold.compat.deepspeed.elastic_core import ElasticCore, refuse_axes
from shardfold.compat.deepspeed.monitor.monitor import MonitorMaster
from shardfold.compat.deepspeed.observers import Observers
from shardfold.compat.deepspeed.optimizer import EngineOptimizer, optimizer_class
from shardfold.compat.deepspeed.parts import Parts
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.compat.deepspeed.sharing import Sharing, with_experts
from shardfold.compat.deepspeed.takeover import made_here, take_over
from shardfold.compat.deepspeed.together import together
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.compat.deepspeed.zero.offload import DeepSpeedZeRoOffload
from shardfold.compat.finder import is_elastic
from shardfold.engine.engine import Engine
from shardfold.parallel.parallel import Parallel
from shardfold.sharding.init import Init

__all__ = ["DeepSpeedEngine"]


def _saving():
    from shardfold.compat.deepspeed import saving  # when it is needed: most of what importing this layer would take

    return saving


class DeepSpeedEngine(Sharing, Parts, Batches, nn.Module):
    """What ``deepspeed.initialize`` returns first; it makes them.

    Attributes that the engine does not have are the model's.

    Args:
        model: as it came; ``engine.module`` is that object.
        config: as it was read.
        optimizer: of the model's parameters, or None: the engine only runs forward.
        args: its ``device_rank`` is the GPU to use, if it has one.
        training_data: a dataset, or None.
        collate_fn: of its loader.
        mpu: says how ranks are shared out; layers of tensor that a model has by itself have their marks from it.
        monitor: the config's monitors, made already; None: they are made.

    Attributes:
        module: the model.
        optimizer: an :class:`EngineOptimizer`; without one None, or at stage 3 what clients take hooks off with.
        lr_scheduler: is stepped after each update, unless it is None.
        training_dataloader: of ``training_data``, or None.
        config: the dict that was given.
        global_steps: accumulations that ``step()`` ended, skipped ones too.
        global_samples: samples of these on all ranks.
        micro_steps: calls of ``step()``.
        skipped_steps: updates that were left out as gradients were inf or NaN.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DeepSpeedConfig,
        optimizer: Optimizer | None = None,
        *,
        args: Any = None,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        mpu: Any = None,
    ) -> None:
        super().__init__()
        self.module = model
        self._config, settings = config, config.settings
        self.config, self._settings = settings.raw, settings
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._begun = self._lost = 0  # of micro_steps, since the last update; how often its gradients were lost
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self.training_data, self.collate_fn, self.mpu = training_data, collate_fn, mpu
        self.enable_backward_allreduce = True
        self.inside_no_sync_ctxt = False
        self._boundary: bool | None = None  # as the user set it
        self._stepping = self._step_applied = self._compiled = self._destroyed = False
        self._messages = 0  # of ranks to each other, of the compatibility layer
        self._norm: Any = None  # of the last step's gradients
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.dist_backend = dist.get_backend() if dist.is_initialized() else None
        self._share_out()
        self._add_parts()
        with together("deepspeed.initialize()"):
            check_files(settings, optimizer, self.local_rank)
            self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None
        limit = settings.clip_norm or (math.inf if self.zero_compute_grad_norm() else None)  # pyright: ignore
        take_over(model)
        tensor = self._tensor_plan(model)

        mesh = with_experts(settings.mesh, model)

        def build() -> Engine:
            return Engine(
                model,
                optimizer=optimizer,
                layout=settings.table,
                precision=settings.precision,
                activations=self._activations(model),
                accumulate=settings.accumulate,
                clip_norm=limit,
                loss_scale=settings.loss_scale if optimizer is not None else None,
                parallel=Parallel(mesh=mesh, tensor=tensor, stages=self._stages(model)),
                overlap=settings.overlap,
                init=Init(units=self._units(model)),
                runtime=Runtime(device=_device(args), survive="rank" if is_elastic() else None),
            )

        self.elastic: ElasticCore | None = None
        if is_elastic() and optimizer is not None:
            refuse_axes(mesh)
            self.elastic = ElasticCore(model, optimizer, build)
        self._core = build() if self.elastic is None else self.elastic.run.engine
        self._cross(model)
        self.device = self._core.device
        self.basic_optimizer = optimizer
        self._begin_core()

    def _begin_core(self) -> None:
        """The engine underneath is new."""
        self._core._runner.visible.hints = False  # what reads .grad finds None there, as DeepSpeed leaves it
        made_here(self._core)
        self._divide_by(self._settings.accumulate)

    def _follow_elastic(self, *, taken: bool) -> None:
        """Ranks are fewer, and the engine underneath is another one.

        Args:
            taken: the step under way was taken by all ranks, and this one has not counted it.
        """
        assert self.elastic is not None
        self._core = core = self.elastic.run.engine
        self._begin_core()
        self.optimizer.follow(core)
        self.observers.follow(core)
        if self._settings.stage == 3:
            from shardfold.compat.deepspeed import zero

            zero.note_parameters(self)
        self._begun, self._lost = 0, core._runner.losses
        self.global_rank, self.world_size = core.rank, core.world_size
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.inside_no_sync_ctxt = False
        if taken:
            self.micro_steps += 1
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self._count_applied({})
        self._tell_boundary()

    def _stages(self, model: nn.Module) -> Sequence[str] | None:
        """Where stages of the model begin; None: there are none."""
        return None

    def _units(self, model: nn.Module) -> Sequence[str] | None:
        """Which modules are units; None: the engine finds them."""
        return None

    def _activations(self, model: nn.Module) -> Any:
        """What the engine does with activations."""
        return self._settings.activations

    def finish(self, monitor: MonitorMaster | None) -> None:
        """Adds what stands around the engine underneath; nothing is sent."""
        settings, model, optimizer = self._settings, self.module, self.basic_optimizer
        self.optimizer: Any = DeepSpeedZeRoOffload(model) if settings.stage == 3 else None
        if optimizer is not None:
            self.optimizer = optimizer_class(settings, optimizer)(self._core)
        self.lr_scheduler: Any = None
        self.observers = Observers(settings, self._core, self, monitor)
        self.monitor, self.flops_profiler = self.observers.monitor, self.observers.flops_profiler
        self.param_names = {parameter: name for name, parameter in model.named_parameters()}
        self._tell_boundary()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, nor has its module"
            ) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._core.__reduce_ex__(protocol)  # refuses

    # -- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model's forward; the first time, ranks that share layers compare what they read.

        Raises:
            WrongCall: on all of these: they read other things.
        """
        self._begin_anew()
        self._compare_batch(inputs, kwargs)
        if self.module.training:
            self.tput_timer.start()
        with self.observers.phase("forward"):
            return self.module(*inputs, **kwargs)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Sets the model's training mode."""
        super().train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Sets the model's evaluation mode."""
        return self.train(False)

    # -- backward

    def _begin_anew(self) -> None:
        """Counts the micro-batches of an update from the first where an exception has lost what had come of it."""
        lost, self._lost = self._lost, self._core._runner.losses
        if lost != self._lost:
            logger.warning(
                "an exception in forward or backward has lost the gradients that had come since the last update, which "
                "begins anew: %d micro-batches of it did not count.",
                self._begun,
            )
            self.micro_steps -= self._begun
            self._begun = 0
            self._tell_boundary()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs backward of a loss that is first divided by the number of micro-batches per step.

        Args:
            loss: a scalar.
            retain_graph: as in PyTorch.
            scale_wrt_gas: False: the loss is divided already.

        Returns:
            The loss as it was divided.

        Raises:
            WrongCall: the engine has no optimizer, or it is no loss.
        """
        self._need_optimizer("backward()")
        self._begin_anew()
        _check_loss(loss, "backward()", self.module)
        core, accumulate = self._core, self._core.accumulate
        self.observers.note_loss(loss if scale_wrt_gas else loss.detach() * accumulate)
        if scale_wrt_gas and accumulate > 1:
            loss = loss / accumulate
        if self.elastic is not None:
            loss = self.elastic.take(loss, last=self.is_gradient_accumulation_boundary())
        if accumulate > 1:
            self._divide_by(1)
        try:
            with self.observers.phase("backward"):
                core.backward(loss, retain_graph=retain_graph)
        finally:
            if accumulate > 1:
                self._divide_by(accumulate)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times fp16's loss scale, for ``engine.scale(loss).backward()``.

        Raises:
            WrongCall: the engine has no optimizer, or it is no loss.
        """
        self._need_optimizer("scale()")
        _check_loss(loss, "scale()", self.module)
        return self._core.scale(loss)

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Nothing: the backward before a step has reduced them."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside send nothing.

        Raises:
            WrongCall: the stage splits gradients, or this is inside another ``no_sync()``.
        """
        if self.zero_optimization_partition_gradients():
            raise WrongCall(
                "engine.no_sync() is incompatible with gradient partitioning, and so with ZeRO "
                f"stage {self.zero_optimization_stage()}: use stage 0 or 1, or engine.coalesce_grad_reduction()."
            )
        with self._unsent("no_sync()"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """The backwards inside are those of one step, and are reduced together.

        Raises:
            NotImplementedError: at stage 0.
            WrongCall: this is inside another such context, or with ``managed_gradient_accumulation`` false.
        """
        if not self.managed_gradient_accumulation():
            raise WrongCall(
                "engine.coalesce_grad_reduction() is not supported with managed_gradient_accumulation=false: each "
                "engine.step() is the boundary there; leave the context out."
            )
        if not self.zero_optimization():
            raise NotImplementedError("engine.coalesce_grad_reduction() requires ZeRO stage 1, 2 or 3, got stage 0.")
        with self._unsent("coalesce_grad_reduction()"):
            yield

    @contextmanager
    def _unsent(self, call: str) -> Iterator[None]:
        if self.inside_no_sync_ctxt:
            raise WrongCall(
                f"engine.{call} cannot be nested inside another no_sync() or coalesce_grad_reduction(): reentry is "
                "unsupported, leave that one first."
            )
        self.inside_no_sync_ctxt = True
        try:
            with self._core.no_sync():
                yield
        finally:
            self.inside_no_sync_ctxt = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients since the last step."""
        if self._core.micro_batch:
            self._core.zero_grad()

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; inf if that was skipped, and None before the
        first, or where ``zero_optimization.compute_grad_norm`` is false and nothing is clipped."""
        return None if self._norm is None else float(self._norm)

    # -- the step

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last before an update."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return self._stepping
        return self._begun + 1 >= self._core.accumulate

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on this says whether a micro-batch is the last before an update, and not their count.

        Raises:
            WrongCall: with ``managed_gradient_accumulation`` false ``step()`` says it.
        """
        if not self.managed_gradient_accumulation():
            raise WrongCall(
                "engine.set_gradient_accumulation_boundary() is not supported with "
                "managed_gradient_accumulation=false: each engine.step() is the boundary there; leave the call out."
            )
        self._boundary = is_boundary
        self._tell_boundary()

    def _tell_boundary(self) -> None:
        self._core.last_micro_batch = bool(self.is_gradient_accumulation_boundary())

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the end of an accumulation updates the weights and steps the schedule; before it only counts.

        Args:
            lr_kwargs: arguments of the schedule's ``step()``.

        Raises:
            WrongCall: the engine has no optimizer, or this is inside ``no_sync()``.
            NonFiniteError: gradients overflow although the loss scale is at its least.
        """
        if self.inside_no_sync_ctxt:
            raise WrongCall("It is illegal to call engine.step() inside no_sync(): call it behind the context.")
        self._need_optimizer("step()")
        self._step_applied = False
        self._stepping = True
        boundary = self.is_gradient_accumulation_boundary()
        try:
            if boundary:
                self._take_model_step(lr_kwargs or {})
        finally:
            self._stepping = False
        self.tput_timer.stop(global_step=boundary)
        self.micro_steps += 1
        self._begun = 0 if boundary else self._begun + 1
        self._tell_boundary()

    def _take_model_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer: EngineOptimizer = self.optimizer
        self._core.last_micro_batch = True
        samples = self.train_batch_size()
        if not self.managed_gradient_accumulation():
            samples = samples // self._core.accumulate * self._core.micro_batch
        with self.observers.phase("step"):
            optimizer.step()
        report = optimizer.report
        assert report is not None
        if report.skipped:
            self.skipped_steps += 1
            self._norm = math.inf
        else:
            self._norm = report.norm
            self._count_applied(lr_kwargs)
        self.global_steps += 1
        self.global_samples += samples
        self.observers.after_step(
            report, step=self.global_steps, samples=self.global_samples, rates=self.get_lr(), momenta=self.get_mom()
        )

    def _count_applied(self, lr_kwargs: dict[str, Any]) -> None:
        """The weights are updated."""
        self._step_applied = True
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the weights."""
        return self._step_applied

    def _need_optimizer(self, call: str) -> None:
        if self.basic_optimizer is None:
            raise WrongCall(
                f"engine.{call} without an optimizer: you must provide optimizer during init, as "
                "initialize(optimizer=...) or in the config."
            )

    # -- numbers

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1.0 without fp16."""
        return self.optimizer.loss_scale if self.basic_optimizer is not None else 1.0

    def get_lr(self) -> list[float]:
        """Learning rates by group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Momenta by group: ``betas``, or ``momentum`` of SGD and RMSprop."""
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def get_type(self) -> list[Any]:
        """The groups' own ``type``, 0.0 where they have none."""
        return self._of_groups("type")

    def _of_groups(self, name: str) -> list[Any]:
        groups = self.optimizer.param_groups if self.basic_optimizer is not None else []
        return [group.get(name, 0.0) for group in groups]

    def optimizer_name(self) -> str | None:
        """The class of an optimizer that was given, or the config's type."""
        if self._settings.optimizer is not None or self.basic_optimizer is None:
            return self._config.optimizer_name
        return type(self.basic_optimizer).__name__

    # -- saving

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: dict[str, Any] = {},  # noqa: B006  # DeepSpeed's signature, which clients inspect
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See :func:`shardfold.compat.deepspeed.saving.save_checkpoint`."""
        return _saving().save_checkpoint(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See :func:`shardfold.compat.deepspeed.saving.load_checkpoint`."""
        return _saving().load_checkpoint(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
        )

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """See :func:`shardfold.compat.deepspeed.saving.save_16bit_model`."""
        return _saving().save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: Any, save_filename: str = "pytorch_model.bin") -> bool:
        """The older name of :meth:`save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict; at stage 3 whole values on the CPU, which every rank takes part in making."""
        return _saving().module_state_dict(self, destination, prefix, keep_vars, exclude_frozen_parameters)

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Takes the model's values from ``checkpoint["module"]``, which every rank has.

        Args:
            checkpoint: with the values under ``"module"``.
            strict: missing and unexpected names are errors.
            custom_load_fn: called with ``src=`` the values and ``dst=`` the model, whose parameters are whole.
            fetch_z3_params, z3_params_to_fetch: of stage 3 every parameter is loaded, whatever these say.
            allowed_missing_keys: names that may be missing although ``strict``.
        """
        _saving().load_module_state_dict(self, checkpoint["module"], strict, custom_load_fn, allowed_missing_keys)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole values in the compute dtype on the CPU of rank 0, None on others; every rank calls it."""
        if not self.zero_optimization_partition_weights() and self._ways.tensor == 1:
            raise WrongArgument("_zero3_consolidated_16bit_state_dict() needs ZeRO stage 3: use module_state_dict().")
        return _saving().consolidated(self, exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # -- the end

    def destroy(self) -> None:
        """Takes the hooks off the model, which stays usable: at stage 3 its parameters stay split, as under
        ``zero.Init``, and another engine takes them over. Every rank calls it; again it does nothing."""
        if not self._destroyed:
            self._destroyed = True
            self._uncross()
            _saving().give_back(self)


def _check_loss(loss: Any, call: str, module: nn.Module) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        if isinstance(loss, Tensor) and loss.numel() == 1:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                raise WrongCall(
                    f"engine.{call}: all of the model's parameters are frozen (requires_grad=False), so nothing "
                    "trains: unfreeze what is to be trained, or leave the backward out."
                )
            what = "a tensor that no parameter leads to"
        raise WrongCall(
            f"engine.{call} was given {what}: it takes a scalar loss; for gradients of outputs call their backward()."
        )


def _device(args: Any) -> torch.device | None:
    number = getattr(args, "device_rank", None)
    return torch.device("cuda", number) if number is not None and torch.cuda.is_available() else None
