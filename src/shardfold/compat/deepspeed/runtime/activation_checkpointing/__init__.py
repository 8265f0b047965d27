"""Activation checkpointing."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, {}, ("checkpointing", "config"))
