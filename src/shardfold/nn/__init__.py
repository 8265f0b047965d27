"""Modules and functions for models that are trained on several ranks."""

from __future__ import annotations

from shardfold.nn.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from shardfold.nn.cross_entropy import chunked_cross_entropy
from shardfold.nn.experts import Experts
from shardfold.nn.moe import MoE
from shardfold.nn.parallel_cross_entropy import parallel_cross_entropy, parallel_margin_loss
from shardfold.nn.router import Router
from shardfold.nn.tiled import tiled

__all__ = [
    "Experts",
    "MoE",
    "Router",
    "SyncBatchNorm",
    "chunked_cross_entropy",
    "convert_sync_batchnorm",
    "parallel_cross_entropy",
    "parallel_margin_loss",
    "tiled",
]
