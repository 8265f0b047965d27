"""How a model is opened, as settings. Imports no torch, so that the command line refuses bad values at once."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from shardfold.errors import ConfigError
from shardfold.plan import presets
from shardfold.plan.checks import parse_bytes
from shardfold.plan.layout import Layout
from shardfold.plan.offload import offloaded
from shardfold.tools.effects import Effect
from shardfold.tools.recipes.train_config import RecipeSettings

__all__ = ["OpenConfig", "table_of_weights"]


BASES = {2: "int2/32", 4: "nf4/64", 8: "int8/64"}
"""What a weight of so many bits rests as."""
STREAMED = ("weights rest in memory", "give --weights disk or --weights host")
FILED = ("no weights rest on disk", "give --weights disk")


class OpenConfig(RecipeSettings):
    """What every command asks that opens a model to use it. Field descriptions are the command line's help."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect("memory", lambda given: given.weights != "memory", *STREAMED),
        Effect(
            "weights_folder", lambda given: given.weights == "disk", "no weights rest on disk", "give --weights disk"
        ),
    )

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
    bits: int | None = Field(None, description="Bits of a weight while it rests: 2, 4 or 8.")
    weights: Literal["memory", "host", "disk"] = Field(
        "memory", description="Where weights rest: memory (the device's), host or disk, from where they are streamed."
    )
    memory: str | None = Field(
        None, description="Bytes of weights that stay in memory on each rank, as 2GiB: only the others are streamed."
    )
    weights_folder: str | None = Field(
        None, description="A folder on a fast drive for weights on disk; without it, the system's for temporary files."
    )

    @model_validator(mode="after")
    def _check_weights(self) -> OpenConfig:
        if self.memory is not None and parse_bytes(self.memory) is None:
            raise ConfigError(f"memory: {self.memory!r} names no bytes: write it as 2GiB or 500MB.")
        if self.bits not in (None, *BASES):
            raise ConfigError(f"bits is {self.bits}: weights rest in 2, 4 or 8.")
        return self

    def table(self, share: float = 1.0) -> Layout:
        """The layout, with weights as codes and where they rest; ``share``: the part of them that is streamed."""
        return table_of_weights(self.layout, self.bits, self.weights, share, self.weights_folder)


def table_of_weights(
    layout: str, bits: int | None, weights: str, share: float = 1.0, folder: str | None = None
) -> Layout:
    """A table for a model that is not trained.

    Args:
        layout: a preset.
        bits: of a weight of a linear layer; None: those of its dtype.
        weights: memory, host or disk.
        share: the part of them that rests there, at least.
        folder: of those on disk.
    """
    table = presets.named(layout)
    if bits is not None:
        table = table.replace(base=BASES[bits])
    if weights == "memory" or not share:
        return table
    part = weights if share == 1 else f"{weights}:{share!r}"
    offload = {"params": part, "optimizer": "host", "grads": "host"}  # of which there are none
    if folder is not None:
        offload["folder"] = folder
    return offloaded(table, offload)
