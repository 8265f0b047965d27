"""The dtypes of a table as PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["TORCH_DTYPES"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""By their names in a table."""
