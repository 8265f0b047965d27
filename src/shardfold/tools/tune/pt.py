"""More pre-training: supervised fine-tuning in which every token of every text is a target."""

from __future__ import annotations

from shardfold.tools.tune.sft import SFT

__all__ = ["RECIPE"]

RECIPE = SFT
