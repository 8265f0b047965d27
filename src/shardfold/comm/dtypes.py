"""The dtypes of a table as PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardfold.plan.formats import ITEMSIZE, torch_dtype

__all__ = ["TORCH_DTYPES"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: torch_dtype(name) for name in ITEMSIZE}
"""By their names in a table."""
