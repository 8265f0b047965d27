"""``deepspeed.ops.aio``: reading and writing NVMe, which is not here."""

from shardfold.compat.deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
