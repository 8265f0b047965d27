"""Optimizers on flat shards, and learning-rate schedules."""

from shardfold.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, warmup_cosine

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "warmup_cosine"]
