"""Which accelerator this process has."""

from __future__ import annotations

import os

import torch

from shardfold.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shardfold.errors import ConfigError, did_you_mean

__all__ = ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
_chosen: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """The one that was set, else the one that ``DS_ACCELERATOR`` names, else CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: ``DS_ACCELERATOR`` names none that is supported.
    """
    if not _chosen:
        name = os.environ.get("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        if name not in SUPPORTED_ACCELERATOR_LIST:
            raise ConfigError(
                f"DS_ACCELERATOR={name} is not supported.{did_you_mean(name, SUPPORTED_ACCELERATOR_LIST)}"
            )
        if name == "cuda":
            from shardfold.compat.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
        else:
            from shardfold.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
        _chosen.append(Accelerator())
    return _chosen[0]


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Makes it the one that :func:`get_accelerator` gives.

    Raises:
        ConfigError: it is no ``DeepSpeedAccelerator``.
    """
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise ConfigError(f"{type(accel_obj).__name__} is not an accelerator: derive it from DeepSpeedAccelerator.")
    _chosen[:] = [accel_obj]


def is_current_accelerator_supported() -> bool:
    """Whether it is one of ``SUPPORTED_ACCELERATOR_LIST``."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
