"""Layers and activations that are split over the ranks of an axis."""

from __future__ import annotations

from shardfold.parallel.attention import Attention
from shardfold.parallel.head import MarginHead
from shardfold.parallel.plan import Traced

__all__ = ["Attention", "MarginHead", "Traced"]
