"""The settings of `shardfold tune demo`. Imports no torch, so that the command line refuses bad values at once."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from shardfold.plan import presets
from shardfold.tools.recipes.train_config import RecipeSettings

__all__ = ["DemoConfig"]


class DemoConfig(RecipeSettings):
    """Field descriptions are the command line's help."""

    procs: int = Field(2, ge=1, le=4096, description="Processes on this machine.")
    layout: str = Field("zero3", description=f"How state is split over ranks: {', '.join(presets.NAMES)}.")
    share: float = Field(
        1.0, gt=0, le=1, description="Part of the steps and rows of the whole demo; 0.02 only shows that all runs."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of text, parameters and answers.")
    out: Path | None = Field(None, description="Run folder, new or empty; without it, runs/<timestamp>.")
