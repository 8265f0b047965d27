"""Checkpoints' helpers."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, modules=("constants", "ds_to_universal", "utils"))
