"""What else an engine of DeepSpeed's has: timers, states that may be moved, names of features that are not here."""

from __future__ import annotations

import gc
import logging
from collections.abc import Container
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.nn.utils import clip_grad_norm_

from shardfold.compat.deepspeed.accessors import ConfigAccessors
from shardfold.compat.deepspeed.observers import Observers
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from shardfold.compat.deepspeed.utils.logging import log_dist
from shardfold.compat.deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer
from shardfold.torch_internals import flatten_dense, unflatten_dense

if TYPE_CHECKING:
    from torch import nn

    from shardfold.engine.engine import Engine

__all__ = ["Parts"]

MOVED = {
    OffloadStateTypeEnum.optim_states: "moments",
    OffloadStateTypeEnum.hp_params: "master",
    OffloadStateTypeEnum.lp_params: "params",
    OffloadStateTypeEnum.lp_grads: "grads",
}
"""The state that each word means; of buffers that gradients are sent from, nothing is kept between steps."""
TIMERS = {"forward": "fwd", "backward": "bwd", "step": "step"}


class Parts(ConfigAccessors):
    """The part of a ``DeepSpeedEngine`` that trains nothing.

    Attributes:
        timers: for the user's own intervals.
        tput_timer: of the steps.
        client_optimizer, client_lr_scheduler: as they were given to ``initialize``.
        gradient_average: whether gradients are the mean of the ranks', not their sum.
    """

    observers: Observers
    module: nn.Module
    _compiled: bool
    _core: Engine
    basic_optimizer: Any
    client_optimizer: Any = None
    client_lr_scheduler: Any = None
    dont_change_device = use_ds_comm = pipeline_parallelism = has_moe_layers = False
    warn_unscaled_loss = True
    losses = checkpoint_engine = all_to_all_group = local_all_to_all_group = None
    flatten, unflatten = staticmethod(flatten_dense), staticmethod(unflatten_dense)

    def _add_parts(self) -> None:
        self.timers = SynchronizedWallClockTimer()
        timed = SimpleNamespace(enabled=self._setting("timers.throughput.enabled"), synchronized=False)
        self.tput_timer = ThroughputTimer(timed, self._setting("train_batch_size"))
        self.gradient_average = self._setting("gradient_allreduce_op") == "mean"
        self.num_experts: list[int] = []
        self.gate_modules: list[Any] = []
        self.moe_layers: list[Any] = []
        self.expert_parallel_group: dict[str, Any] = {}
        self.expert_data_parallel_group: dict[str, Any] = {}

    @property
    def leaving(self) -> bool:
        """Whether the run shall end soon: see :attr:`shardfold.Engine.leaving`. DeepSpeed has nothing like it."""
        return self._core.leaving

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of ``fwd``, ``bwd`` and ``step`` since the last line of progress; empty before any, and unless
        ``wall_clock_breakdown`` is on."""
        if not self._setting("wall_clock_breakdown") or not any(self.observers.seconds.values()):
            return {}
        return {TIMERS[name]: 1e3 * seconds for name, seconds in self.observers.seconds.items()}

    @property
    def engine_timers_cache(self) -> dict[str, float]:
        """As :meth:`get_wall_clock_timers`."""
        return self.get_wall_clock_timers()

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """States move to host memory until :meth:`reload_states`, or until what needs them runs: a forward brings
        parameters back, a backward or a step all of them.

        What is whole on this rank, as with one rank parameters and gradients are, stays, and so does what rests in host
        memory anyway.

        Args:
            include: which states; None: all of them.
            device: ``cpu``; ``none`` asks for nothing.
            pin_memory: host memory that a GPU copies to is always pinned.
            non_blocking: the states are there when this returns in any case.

        Raises:
            WrongArgument: a ``ValueError``: the device is ``nvme``, or one of ``include`` is no state.
            WrongCall: the engine has no optimizer, ``offload_param`` is on, or the stage is 0.
        """
        self._check_movable("offload_states()")
        for state in include or ():  # pyright: ignore[reportGeneralTypeIssues]
            if state not in list(OffloadStateTypeEnum):
                known = ", ".join(each.value for each in OffloadStateTypeEnum)
                raise WrongArgument(
                    f"engine.offload_states(include=[{state!r}]): it is not a state; these are {known}."
                )
        if device == OffloadDeviceEnum.nvme:
            raise WrongArgument("engine.offload_states(device='nvme'): the only device to move states to is 'cpu'.")
        if device == OffloadDeviceEnum.none:
            log_dist("engine.offload_states(device='none') moves nothing.", ranks=[0], level=logging.WARNING)
            return
        if self.zero_offload_param() is not None and "params" in self._settings.offload:
            raise WrongCall(
                "engine.offload_states(): moving states across devices is not supported for offloaded parameters, "
                "beside which all states rest in host memory anyway: leave the call out."
            )
        states = [name for state, name in MOVED.items() if include is None or state in include]
        self._core._away.leave(states)

    def reload_states(self, non_blocking: bool = False) -> None:
        """States are where they were before :meth:`offload_states`.

        Raises:
            WrongCall: the engine has no optimizer, or the stage is 0.
        """
        self._check_movable("reload_states()")
        self._core._away.come_back()

    def _check_movable(self, call: str) -> None:
        if self.basic_optimizer is None:
            raise WrongCall(f"engine.{call}: moving states across devices is not supported without an optimizer.")
        if not self.zero_optimization():
            raise WrongCall(f"engine.{call} is for ZeRO stages 1, 2 and 3, and this is stage 0: leave it out.")

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] = {},  # noqa: B006  # DeepSpeed's signature
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model, in place.

        Raises:
            WrongArgument: ``schedule`` or ``compiled_autograd_enabled`` is given.
        """
        if schedule is not None or compiled_autograd_enabled:
            name = "schedule=..." if schedule is not None else "compiled_autograd_enabled=True"
            raise WrongArgument(
                f"engine.compile({name}): passes of DeepCompile and compiled autograd are not here; leave it out."
            )
        if not self._compiled:
            self.module.compile(**{**compile_kwargs, "backend": backend})
            self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compiled

    def empty_partition_cache(self) -> None:
        """Nothing: what a pass gathered is given back as it goes."""

    def collect_python_gc(self) -> int:
        """Collects garbage; the number of objects found."""
        return gc.collect()

    def clip_fp32_gradients(self) -> None:
        """Clips the gradients that the parameters have to ``gradient_clipping``; ``step()`` does so by itself.

        Raises:
            WrongCall: from stage 1 on, where gradients are not the parameters'.
        """
        if self.zero_optimization():
            raise WrongCall(
                "engine.clip_fp32_gradients() is for ZeRO stage 0: from stage 1 on engine.step() clips to "
                "gradient_clipping by itself; leave the call out."
            )
        clip_grad_norm_(self.module.parameters(), self._setting("gradient_clipping"))
