"""Modules and functions for models that are trained on several ranks."""

from __future__ import annotations

from shardfold.nn.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from shardfold.nn.cross_entropy import chunked_cross_entropy

__all__ = ["SyncBatchNorm", "chunked_cross_entropy", "convert_sync_batchnorm"]
