"""ZeRO++ of DeepSpeed's JSON: formats of what is gathered and reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardfold.compat.deepspeed.config_check import Note

__all__ = ["wires_of"]

ZERO = "zero_optimization."


def wires_of(get: Callable[[str], Any], stage: int, notes: list[Note]) -> dict[str, str]:
    """By transfer of the table (``gather``, ``reduce``) its format; those that stay as they are, are left out."""
    weights, gradients = (get(f"{ZERO}zero_quantized_{what}") for what in ("weights", "gradients"))
    loco = get(ZERO + "zeropp_loco_param")
    asked = {"zero_quantized_weights": weights, "zero_quantized_gradients": gradients, "zeropp_loco_param": loco}
    if stage != 3:
        notes += [
            Note(ZERO + name, value, f"it is for stage 3, and the stage is {stage}")
            for name, value in asked.items()
            if value
        ]
        return {}
    if loco and not gradients:
        notes.append(Note(ZERO + "zeropp_loco_param", loco, "it is for zero_quantized_gradients, which is not set"))
    elif loco:
        notes.append(
            Note(
                ZERO + "zeropp_loco_param",
                loco,
                "all that a reduction loses is added to the next one: nothing of it "
                "is averaged away (err_beta) or forgotten from time to time (reset_T)",
            )
        )
    found = {"gather": "int8x2"} if weights else {}
    return found | ({"reduce": "int4x2+error" if loco else "int4x2"} if gradients else {})
