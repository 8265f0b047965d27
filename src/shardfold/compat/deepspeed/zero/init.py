"""``zero.Init``: models that are split while they are built."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardfold.compat.deepspeed import comm
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.compat.deepspeed.zero.attributes import install
from shardfold.errors import ConfigError
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.sharding.sharded_init import shard_module, sharded_init

__all__ = ["Init"]

DEVICES = ("none", "cpu", "nvme")
DTYPES = (torch.half, torch.bfloat16, torch.float)


class Init:
    """Inside, parameters of new modules are split over all ranks as soon as their module is constructed.

    ``torch.distributed`` is initialized unless it is, as ``deepspeed.init_distributed`` does, also for one process that
    no launcher started.

    They keep their shapes; reading or writing one outside of a constructor needs ``GatheredParameters``.
    ``deepspeed.initialize`` takes the model over unit by unit, under any stage. A block inside another joins it.

    A model whose layers ranks share (``tensor_parallel.autotp_size`` of the config) is built whole on each of them, and
    is cut when the engine is made.

    Args:
        module: an existing model, to be split as if it had been built inside; ``Init(module=model)`` is the model, and
            no block.
        data_parallel_group: all ranks.
        mem_efficient_linear: has no effect: linear layers keep no copy of their weights.
        remote_device: where parts rest until an engine takes them: ``"cpu"`` or ``"nvme"`` (in host memory here), or
            the device on which the model is used.
        pin_memory: parts in host memory are pageable whatever this says, which is logged.
        config_dict_or_path: a config, or a ``DeepSpeedConfig``; values may still be ``"auto"``. Its dtype is that of
            floating parameters, and its ``offload_param`` device stands before ``remote_device``.
        config: the older name of that.
        enabled: False: nothing happens.
        dtype: of floating parameters; None: the config's, or, without a config, half precision: ``torch.half`` on a
            GPU, ``torch.bfloat16`` on the CPU.
        mpu: whose data-parallel ranks are all ranks.
        zero_param_parallel_group: None; the config's ``zero_hpz_partition_size`` keeps a second copy.
        zero_quantized_weights, zero_quantized_nontrainable_weights: False; they would change the numbers.
        param_swapper, tensor_overrides: None.
        sequence_data_parallel_group: the older name of ``data_parallel_group``.

    Raises:
        ConfigError: (a ``ValueError``) an argument cannot be honoured.
    """

    def __new__(cls, module: nn.Module | None = None, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        if module is None:
            return made
        made.__init__(module, *args, **kwargs)
        return module

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        if config_dict_or_path is None and config is not None:
            logger.warning("zero.Init: `config` is deprecated, use `config_dict_or_path`.")
            config_dict_or_path = config
        settings = _read(config_dict_or_path) if enabled else None
        whole = settings is not None and settings["tensor_parallel.autotp_size"] > 1
        self.enabled = enabled = enabled and not whole
        self._block: AbstractContextManager[None] | None = None
        if not enabled:
            return
        if sequence_data_parallel_group is not None:
            logger.warning("zero.Init: `sequence_data_parallel_group` is deprecated, use `data_parallel_group`.")
            if data_parallel_group is not None:
                raise ConfigError(
                    "zero.Init was given data_parallel_group and sequence_data_parallel_group: give one of them."
                )
            data_parallel_group = sequence_data_parallel_group
        _check_absent(
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            param_swapper=param_swapper,
            tensor_overrides=tensor_overrides,
        )
        if pin_memory:
            logger.warning("zero.Init: `pin_memory` has no effect, parts in host memory are pageable.")
        found, self._apply, offload = _asked(settings)
        self.dtype = dtype or found
        if self.dtype not in DTYPES:
            raise ConfigError(f"zero.Init(dtype={self.dtype}): it is torch.half, torch.bfloat16 or torch.float.")
        device = offload or getattr(remote_device, "value", remote_device) or "none"
        if device not in DEVICES and not str(device).startswith("cuda"):
            raise ConfigError(f"zero.Init(remote_device={device!r}): it is one of {', '.join(DEVICES)}.")
        if device == "nvme" and offload != "nvme":
            raise ConfigError("zero.Init(remote_device='nvme') needs offload_param with an nvme_path in its config.")
        comm.init_distributed()
        _check_ranks(data_parallel_group, mpu)
        self._shard_device = "cpu" if device in ("cpu", "nvme") else None
        install()
        if module is not None:
            shard_module(module, dtype=self.dtype, shard_device=self._shard_device, hollow=True)

    def __enter__(self) -> Init:
        if self.enabled:
            self._block = sharded_init(
                dtype=self.dtype, shard_device=self._shard_device, apply=self._apply, hollow=True
            )
            self._block.__enter__()
        return self

    def __exit__(self, *exc: Any) -> bool | None:
        block, self._block = self._block, None
        return block.__exit__(*exc) if block is not None else None


ABSENT = {
    "zero_param_parallel_group": "zero_optimization.zero_hpz_partition_size of the config keeps a second copy",
    "zero_quantized_weights": "parameters in INT8 on the wire change the numbers",
    "zero_quantized_nontrainable_weights": "frozen parameters in INT8 change the numbers",
    "param_swapper": "nothing is swapped to NVMe",
    "tensor_overrides": "constructors of tensors are left as they are",
}


def _check_absent(**given: Any) -> None:
    """
    Raises:
        ConfigError: an argument asks for what is not here.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise ConfigError(f"zero.Init({name}=...) is not here: {ABSENT[name]}; leave it out.")


def _check_ranks(group: Any, mpu: Any) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = dist.get_world_size(group) if group is not None and ranks > 1 else ranks
    if hasattr(mpu, "get_data_parallel_world_size"):
        size = mpu.get_data_parallel_world_size()
    if size != ranks:
        raise ConfigError(
            f"zero.Init was given {size} data-parallel ranks of {ranks}: parameters are split over all ranks; leave "
            "data_parallel_group and mpu out."
        )


def _read(config: Any) -> Any:
    """The settings of a config, which may still have values to be filled in; None without one."""
    if config is None:
        return None
    from shardfold.compat.deepspeed.config import DeepSpeedConfig, read

    return config.settings if isinstance(config, DeepSpeedConfig) else read(config, early=True)


def _asked(settings: Any) -> tuple[torch.dtype, bool, str | None]:
    """The dtype of parameters, whether ``Module.apply`` gathers, and the device of ``offload_param``."""
    if settings is None:
        return torch.half if torch.cuda.is_available() else torch.bfloat16, True, None
    zero: Any = settings.raw.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    offload = zero.get("offload_param")
    device = offload.get("device") if isinstance(offload, Mapping) else None
    precise = TORCH_DTYPES[settings.precision.compute]
    return precise, bool(zero.get("override_module_apply", True)), None if device in (None, "none") else device
