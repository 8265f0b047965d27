"""``deepspeed.checkpointing``: functions whose activations are made again for backward, by ``torch.utils.checkpoint``.

Random numbers are the same again, also those of the generators that :class:`CudaRNGStatesTracker` keeps. What is kept
of arguments is a slice on each of the ranks that share layers (``partition_activations``), and waits in host memory
(``checkpoint_in_cpu``), where that is configured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardfold.activations.partitioned_inputs import SliceBuffer, Sliced, Slicer
from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shardfold.compat.deepspeed.checkpointed import CheckpointedCall, GroupRanks, is_cut
from shardfold.compat.deepspeed.config import DeepSpeedConfig
from shardfold.compat.deepspeed.utils import groups
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.compat.deepspeed.utils.timer import SynchronizedWallClockTimer
from shardfold.errors import ConfigError, UsageError
from shardfold.sharding.autograd import inside_checkpoint

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_OFFSET = 2718  # DeepSpeed's, so that seeds give the same numbers


@dataclass(frozen=True)
class Settings:
    """What :func:`configure` sets; ``num_checkpoints`` is a configuration's ``number_checkpoints``."""

    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False
    mpu: Any = None


class _State:
    """Of this module."""

    settings = Settings()
    configured = False
    room: SliceBuffer | None = None
    slicers: ClassVar[dict[Any, Slicer]] = {}  # by group
    compared: ClassVar[set[Any]] = set()  # functions whose arguments ranks have compared
    timers = SynchronizedWallClockTimer()


IN_CONFIG = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets what :func:`checkpoint` does.

    Args:
        mpu_: says this rank's place among model-parallel ranks; None: there are none.
        deepspeed_config: a configuration (a dict, the path of a JSON file, or a ``DeepSpeedConfig``), whose
            ``activation_checkpointing`` section holds where no argument says otherwise.
        partition_activations: of the arguments of checkpointed functions each of the ranks that share layers (those of
            ``mpu_``, else of the engine that was made last) keeps a slice; gathers bring them back. They are the same
            on these ranks, which is compared as a function first runs.
        contiguous_checkpointing: slices of ``num_checkpoints`` calls lie one behind the other, in memory that stays;
            nothing where they wait in host memory. ``partition_activations`` and ``num_checkpoints`` go with it.
        num_checkpoints: calls in a step, before their backward.
        checkpoint_in_cpu: arguments of checkpointed functions wait for backward in host memory.
        synchronize: waits for the device before and after each checkpointed function.
        profile: prints the time of each.

    Raises:
        ConfigError: ``contiguous_checkpointing`` is set without what goes with it.
    """
    section = _section(deepspeed_config)
    said = {ours: section[theirs] for theirs, ours in IN_CONFIG.items() if theirs in section}
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    said |= {name: value for name, value in given.items() if value is not None}
    settings = Settings(**said, mpu=mpu_ if mpu_ is not None else _State.settings.mpu)
    if settings.contiguous_checkpointing and (not settings.partition_activations or settings.num_checkpoints is None):
        raise ConfigError(
            "contiguous_checkpointing needs partition_activations and num_checkpoints: set both, or leave it out."
        )
    _State.settings, _State.configured = settings, True
    reset()
    logger.info("activation checkpointing: %s", settings)


def _section(config: Any) -> Mapping[str, Any]:
    if isinstance(config, DeepSpeedConfig):
        config = config.settings.raw
    if isinstance(config, (str, Path)):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    return config.get("activation_checkpointing", {}) if isinstance(config, Mapping) else {}


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _State.configured


def reset() -> None:
    """Gives back the memory of ``contiguous_checkpointing``, and forgets what ranks have compared."""
    _State.room = None
    _State.slicers.clear()
    _State.compared.clear()


def set_num_layers(nlayers: int) -> None:
    """Sets ``num_checkpoints``."""
    _State.settings, _State.room = replace(_State.settings, num_checkpoints=nlayers), None


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Sets ``partition_activations``."""
    _State.settings = replace(_State.settings, partition_activations=partition_activation)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which no activation is kept: backward calls it again.

    Several outputs are given as a tuple.

    Raises:
        UsageError: arguments differ between ranks that keep a slice of them each, or there is no room for one more.
    """
    tracked = _TRACKER.get_states()
    keeps = torch.is_grad_enabled()
    sliced = _sliced(function, [*args, *kwargs.values()]) if keeps else None
    call = CheckpointedCall(function, args, kwargs, sliced, keeps and _State.settings.checkpoint_in_cpu)

    def run(*values: Any) -> Any:
        with _measured("forward"):
            return call(*values)

    outputs = torch_checkpoint(
        run, *call.kept, use_reentrant=False, context_fn=lambda: (nullcontext(), _with_states(tracked))
    )
    if isinstance(outputs, Tensor) or not isinstance(outputs, (list, tuple)):
        return outputs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _sliced(function: Callable[..., Any], values: list[Any]) -> tuple[list[Any], Sliced] | None:
    """Arguments with this rank's slices in their places, and what makes them whole; None: it keeps them whole."""
    settings = _State.settings
    group = _tensor_group() if settings.partition_activations and not inside_checkpoint() else None
    if group is None or dist.get_world_size(group) == 1:
        return None
    if settings.contiguous_checkpointing and not settings.checkpoint_in_cpu and _State.room is None:
        _State.room = SliceBuffer(settings.num_checkpoints or 0)
    device = torch.device(get_accelerator().current_device_name())
    if group not in _State.slicers:
        _State.slicers[group] = Slicer(GroupRanks(group), is_cut, device)
    who = getattr(function, "__qualname__", type(function).__qualname__)
    known = getattr(function, "__code__", type(function))  # others of the same code are called with the like
    sliced = _State.slicers[group].cut(
        values,
        dist.get_world_size(group),
        f"what is checkpointed, {who},",
        compare=known not in _State.compared,
        room=_State.room,
    )
    _State.compared.add(known)
    return sliced


def _tensor_group() -> Any:
    """Of the ranks that share layers with this one; None: there are no others."""
    mpu = _State.settings.mpu
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return groups.get_tensor_model_parallel_group()


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """What :func:`checkpoint` calls, as DeepSpeed's autograd function is called."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> tuple[Any, ...]:
        """``run_function(*args)`` under :func:`checkpoint`: its outputs as a tuple, and added to ``all_outputs``."""
        outputs = checkpoint(run_function, *args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        all_outputs += outputs
        return outputs


@contextmanager
def _measured(name: str) -> Iterator[None]:
    settings = _State.settings
    if settings.synchronize:
        get_accelerator().synchronize()
    if settings.profile:
        _State.timers(name).start()
    try:
        yield
    finally:
        if settings.profile:
            _State.timers(name).stop()
            _State.timers.log([name])
        if settings.synchronize:
            get_accelerator().synchronize()


@contextmanager
def _with_states(states: dict[str, Tensor]) -> Iterator[None]:
    """The tracker's generators as they were in forward; afterwards as they are now."""
    now = _TRACKER.get_states()
    _TRACKER.set_states(dict(states))
    try:
        yield
    finally:
        _TRACKER.set_states(now)


class CudaRNGStatesTracker:
    """States of the device's generator by name, for parts of a model that draw numbers of their own."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all of them."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """``{name: state}``, a new dict."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Takes what :meth:`get_states` gave."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A generator seeded with ``seed``; the device's own stays as it is.

        Raises:
            UsageError: the name or the seed is there already.
        """
        if seed in self.seeds_:
            raise UsageError(f"seed {seed} already exists: give each generator a seed of its own.")
        if name in self.states_:
            raise UsageError(f"cuda rng state {name} already exists: give each generator a name of its own.")
        device = get_accelerator()
        self.seeds_.add(seed)
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Inside of it the device draws from that generator.

        Raises:
            UsageError: it was not added.
        """
        if name not in self.states_:
            raise UsageError(f"cuda rng state {name} is not added: call add({name!r}, seed) first.")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker that :func:`checkpoint` looks after."""
    return _TRACKER


def _tensor_rank() -> int:
    mpu = _State.settings.mpu
    for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return 0


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the device's generator, and the tracker's one that differs between model-parallel ranks."""
    _TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _OFFSET + _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds the tracker's one again."""
    with _TRACKER.fork():
        get_accelerator().manual_seed(seed + _OFFSET + _tensor_rank())
