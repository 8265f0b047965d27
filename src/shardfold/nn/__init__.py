"""Modules and functions for models that are trained on several ranks."""

from __future__ import annotations

from shardfold.nn.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from shardfold.nn.cross_entropy import chunked_cross_entropy
from shardfold.nn.parallel_cross_entropy import parallel_cross_entropy, parallel_margin_loss
from shardfold.nn.tiled import tiled

__all__ = [
    "SyncBatchNorm",
    "chunked_cross_entropy",
    "convert_sync_batchnorm",
    "parallel_cross_entropy",
    "parallel_margin_loss",
    "tiled",
]
