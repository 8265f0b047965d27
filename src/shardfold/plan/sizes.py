"""Numbers of bytes, as people write and read them."""

from __future__ import annotations

import re

__all__ = ["human", "parse_bytes"]

DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {**DECIMAL, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int | None:
    """The number of bytes that ``"500MB"``, ``"1.5GiB"`` or ``"4096"`` names; None if it names none above 0, or names
    bits, as ``"12Gib"`` does."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS or (match[2].endswith("b") and not match[2].islower()):
        return None
    return int(float(match[1]) * UNITS[match[2].upper()]) or None


def human(num_bytes: float) -> str:
    """``num_bytes`` in binary units, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    raise AssertionError
