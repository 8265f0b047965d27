"""``deepspeed.ops.op_builder``: builders of compiled operators answer, and build nothing."""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.ops.op_builder.builder import ALL_OPS, CLASSES, CUDAOpBuilder, OpBuilder

__all__ = ["ALL_OPS", "CUDAOpBuilder", "OpBuilder"]


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *CLASSES})
