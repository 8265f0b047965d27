"""Optimizers on flat shards, and learning-rate schedules."""

from shardfold.optim.schedules import warmup_cosine

__all__ = ["warmup_cosine"]
