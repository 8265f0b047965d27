"""``DeepSpeedConfig``: a config under the attribute names that DeepSpeed's has, as a thin view over Settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardfold.compat.deepspeed.config_check import BY_NAME, SECTIONS
from shardfold.compat.deepspeed.config_keys import KEYS
from shardfold.compat.deepspeed.config_parallel import Said
from shardfold.compat.deepspeed.config_read import Settings, read
from shardfold.compat.deepspeed.config_text import effective
from shardfold.errors import did_you_mean

__all__ = ["MONITORS", "CommsConfig", "DeepSpeedConfig", "MonitorConfig", "Section"]

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
NONE_UNLESS_GIVEN = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")


class Section:
    """A section's effective values as attributes, under every name they have."""

    def __init__(self, settings: Settings, path: str) -> None:
        self._settings, self._path = settings, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self._path}.{name}"
        if path in SECTIONS:
            given = any(self._settings.origins[key] == "given" for key in _inside(path))
            return Section(self._settings, path) if given or path not in NONE_UNLESS_GIVEN else None
        if path in BY_NAME:
            return self._settings.values[BY_NAME[path].path]
        names = [key.removeprefix(f"{self._path}.") for key in _inside(self._path)]
        raise AttributeError(f"{self._path} has no key {name!r}.{did_you_mean(name, names)}")

    def __repr__(self) -> str:
        return f"Section({self._path}: {self.model_dump()})"

    def model_dump(self) -> dict[str, Any]:
        """The values by name."""
        start = len(self._path) + 1
        return {key[start:]: self._settings.values[key] for key in _inside(self._path)}


def _inside(path: str) -> Iterator[str]:
    return (key for key in KEYS if key.startswith(f"{path}."))


class MonitorConfig:
    """The sections of all monitors; ``enabled``: at least one is."""

    def __init__(self, settings: Settings) -> None:
        self.tensorboard, self.wandb, self.csv_monitor, self.comet = (Section(settings, name) for name in MONITORS)

    @property
    def enabled(self) -> bool:
        return any(getattr(self, name).enabled for name in MONITORS)


class CommsConfig:
    """The section ``comms_logger``, and whether it is there."""

    def __init__(self, settings: Settings) -> None:
        self.comms_logger = Section(settings, "comms_logger")
        self.comms_logger_enabled = "comms_logger" in settings.raw


class DeepSpeedConfig:
    """A config, read and checked, under DeepSpeed's attribute names.

    Args:
        config: a dict, the path of a JSON file, or a file's content in urlsafe base64.
        mpu: tells the number of data-parallel ranks, or of those that share sequences, if given.
        mesh_device: likewise, a device mesh with dims ``"data_parallel"`` and ``"sequence_parallel"``.
        told: as of ``config_read.read``.
        optimizer: one that is used in place of the config's, if given.

    Raises:
        DeepSpeedConfigError: it cannot be honoured; one sentence says what, where and how to mend it.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        told: Mapping[str, Sequence[Said]] | None = None,
        optimizer: Any = None,
    ) -> None:
        ranks: int | None = None
        if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
            ranks = int(mpu.get_data_parallel_world_size())
        elif mpu is not None and hasattr(mpu, "get_sequence_parallel_world_size"):
            told = told or {"sequence": [Said(int(mpu.get_sequence_parallel_world_size()), "mpu=")]}
        elif mesh_device is not None:
            ranks = int(mesh_device.get_group(mesh_dim="data_parallel").size())
        self.settings = read(config, data_ranks=ranks, told=told, optimizer_given=optimizer is not None)
        settings = self.settings
        self._param_dict = settings.raw
        self.world_size, self.global_rank = settings.world_size, _rank()
        self.train_batch_size, self.train_micro_batch_size_per_gpu = settings.train_batch_size, settings.micro_batch
        self.gradient_accumulation_steps = settings.accumulate
        self.zero_optimization_stage, self.zero_enabled = settings.stage, settings.stage > 0
        self.zero_config = Section(settings, "zero_optimization")
        self.float16_config, self.bfloat16_config = Section(settings, "fp16"), Section(settings, "bf16")
        self.fp16_enabled, self.bfloat16_enabled = self.float16_config.enabled, self.bfloat16_config.enabled
        self.loss_scale, self.dynamic_loss_scale_args = self.float16_config.loss_scale, settings.scaling
        self.initial_dynamic_scale = 2**self.float16_config.initial_scale_power
        self.torch_autocast_enabled = settings["torch_autocast.enabled"]
        self.torch_autocast_dtype = settings["torch_autocast.dtype"] if self.torch_autocast_enabled else None
        self.optimizer_name, self.optimizer_params = _own_name(settings.optimizer)
        self.scheduler_name, self.scheduler_params = settings.scheduler or (None, None)
        self.grad_accum_dtype = _given(settings, "data_types.grad_accum_dtype")
        self.communication_data_type = _given(settings, "communication_data_type")
        self.activation_checkpointing_config = Section(settings, "activation_checkpointing")
        self.flops_profiler_config = Section(settings, "flops_profiler")
        self.autotuning_config, self.compile_config = Section(settings, "autotuning"), Section(settings, "compile")
        self.comms_config = CommsConfig(settings)
        self.monitor_config = MonitorConfig(settings)
        self.checkpoint_config, self.aio_config = Section(settings, "checkpoint"), Section(settings, "aio").model_dump()
        self.checkpoint_tag_validation_enabled = settings.tag_validation != "ignore"
        self.checkpoint_tag_validation_fail = settings.tag_validation == "fail"
        self.load_universal_checkpoint = settings["checkpoint.load_universal"]
        self.use_node_local_storage = settings["checkpoint.use_node_local_storage"]
        self.sparse_gradients_enabled = False
        self.optimizer_legacy_fusion = settings["optimizer.legacy_fusion"]

    def __getattr__(self, name: str) -> Any:
        """Top-level keys, such as ``gradient_clipping``, ``steps_per_print`` or ``dump_state``."""
        if name in KEYS and "settings" in self.__dict__:
            return self.settings.values[name]
        raise AttributeError(f"a config has no attribute {name!r}: its keys are in docs/from-deepspeed.md")

    def print_user_config(self) -> None:
        """Prints what was given."""
        print(json.dumps(self._param_dict, indent=4, sort_keys=True, default=str))

    def print(self, name: str) -> None:
        """Prints every effective value with its origin under a heading, then what was given."""
        print(f"{name}:\n{effective(self.settings)}")
        self.print_user_config()


def _own_name(optimizer: tuple[str, dict[str, Any]] | None) -> tuple[str | None, dict[str, Any] | None]:
    """DeepSpeed says the names of its own types in small letters."""
    if optimizer is None:
        return None, None
    own = ("adagrad", "adam", "adamw", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
    return (optimizer[0].lower() if optimizer[0].lower() in own else optimizer[0]), optimizer[1]


def _given(settings: Settings, path: str) -> Any:
    return settings[path] if settings.origins[path] == "given" else None


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist is not None and dist.is_available() and dist.is_initialized() else 0
