"""``deepspeed.ops.op_builder.all_ops``."""

from shardfold.compat.deepspeed.ops.op_builder.builder import ALL_OPS

__all__ = ["ALL_OPS"]
