"""Optimizers by the names of DeepSpeed's kernels; nothing is compiled."""

from shardfold.compat.deepspeed.lazy import attach

__compatible_ops__: dict[str, bool] = {}  # nothing is compiled

__getattr__, __dir__ = attach(__name__, modules=("adagrad", "adam", "lamb", "lion"))
