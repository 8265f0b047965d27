"""``deepspeed.runtime.precision_config``: the sections ``bf16`` and ``fp16``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfold.compat.deepspeed.config_models import DeepSpeedBF16Config, DeepSpeedFP16Config
from shardfold.compat.deepspeed.runtime.constants import BFLOAT16, BFLOAT16_OLD, FP16

__all__ = [
    "BFLOAT16",
    "BFLOAT16_OLD",
    "FP16",
    "DeepSpeedBF16Config",
    "DeepSpeedFP16Config",
    "get_bfloat16_config",
    "get_float16_config",
]


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` of a config, or by its older name ``bfloat16``, or its defaults."""
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section ``fp16`` of a config, or its defaults."""
    return DeepSpeedFP16Config(**param_dict.get(FP16, {}))
