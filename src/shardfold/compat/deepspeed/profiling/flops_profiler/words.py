"""Large numbers, as people read them: ``1.5 G``."""

from __future__ import annotations

__all__ = ["duration_to_string", "flops_to_string", "macs_to_string", "number_to_string", "params_to_string"]

UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """With a metric prefix: ``units``, or the largest that leaves at least 1."""
    if units is None:
        units = next((unit for unit, size in UNITS.items() if num >= size), "u") if num else ""
    return f"{round(num / UNITS.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-accumulate operations."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Floating-point operations per second."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Counts of parameters, whose thousand millions are ``B``."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds."""
    return f"{number_to_string(duration, units, precision)}s"
