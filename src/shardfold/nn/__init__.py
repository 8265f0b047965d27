"""Modules and functions for models that are trained on several ranks.

axis_group              the ranks along one axis, as who computes with them asks them
batchnorm               batch normalization over the batches of all ranks together
cross_entropy           the loss of a language model's head without the logits of all rows at once
experts                 feed-forward layers of which each token goes through some
moe                     a mixture of experts: a router, experts, and experts that all tokens go through
parallel_cross_entropy  losses over classes that are split over ranks
router                  which experts each token goes to, and with what weights
stacked                 any module as experts: its parameters stacked, a row for each expert
tiled                   functions of single tokens, computed for some tokens at a time
_grouped                products of rows with one of several matrices each
"""

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
