"""How a model is opened, as settings. Imports no torch, so that the command line refuses bad values at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from shardfold.plan import presets
from shardfold.tools.recipes.train_config import RecipeSettings

__all__ = ["OpenConfig"]


class OpenConfig(RecipeSettings):
    """What every command asks that opens a model to use it. Field descriptions are the command line's help."""

    model: Path = Field(
        description="A run of shardfold tune or shardfold train, a folder of transformers, or an adapter of peft."
    )
    procs: int = Field(1, ge=1, le=4096, description="Processes on this machine; torchrun's own count wins.")
    layout: str = Field("ddp", description=f"How parameters are split over ranks: {', '.join(presets.NAMES)}.")
    tensor: int = Field(1, ge=1, le=4096, description="Ranks that share each layer: heads, columns and words.")
    precision: Literal["fp32", "bf16", "fp16", "bf16-pure", "bf16-autocast", "fp16-autocast"] = Field(
        "fp32", description="Arithmetic of the model: fp32, bf16, fp16, bf16-autocast, fp16-autocast."
    )
    length: int | None = Field(
        None, ge=2, le=2**30, description="Tokens that the model reads at most; without it, as many as its config says."
    )
    bits: Literal[2, 4, 8] | None = Field(None, description="Bits of a weight while it rests: 2, 4 or 8.")
    weights: Literal["memory", "host", "disk"] = Field(
        "memory", description="Where weights rest: memory (the device's), host or disk, from where they are streamed."
    )
