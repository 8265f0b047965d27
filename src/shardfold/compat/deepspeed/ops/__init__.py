"""Optimizers by the names of DeepSpeed's kernels; nothing is compiled."""

from shardfold.compat.deepspeed.lazy import attach
from shardfold.compat.deepspeed.ops.op_builder.builder import ALL_OPS

__compatible_ops__: dict[str, bool] = dict.fromkeys(ALL_OPS, False)  # nothing is compiled

__getattr__, __dir__ = attach(__name__, modules=("adagrad", "adam", "lamb", "lion", "op_builder"))
