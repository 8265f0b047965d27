"""Modules for models that are trained on several ranks."""

from __future__ import annotations

from shardfold.nn.batchnorm import SyncBatchNorm, convert_sync_batchnorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]
