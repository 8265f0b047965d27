"""The settings of `shardfold board`. Imports no torch, as nothing does that a board imports."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, model_validator

from shardfold.errors import ConfigError
from shardfold.tools.recipes.train_config import RecipeSettings
from shardfold.tools.serve.serve_config import is_loopback

__all__ = ["BoardConfig", "machine_profile"]


class BoardConfig(RecipeSettings):
    """Which runs are shown, and to whom. Field descriptions are the command line's help."""

    folders: tuple[Path, ...] = Field((Path("runs"),), description="Runs, or folders that have some; else runs/.")
    host: str = Field("127.0.0.1", description="Address to listen at: one of this machine's own.")
    port: int = Field(8765, ge=0, le=65535, description="Port to listen at; 0: one that is free.")
    token_file: Path | None = Field(
        None, description="File with the token that the page needs, made if it is not there; without it, a new one."
    )
    read_only: bool = Field(False, description="Show runs, but start, stop and change none.")
    gpus: str | None = Field(
        None,
        description="What plans are made for: a device that shardfold plan knows, or the file that doctor --measure "
        "wrote; without it this machine, which is measured at the first plan, in some minutes.",
    )
    root_path: str = Field("", description="Path under which a proxy has the page, as /board.")

    @property
    def measures(self) -> bool:
        """Whether the next plan measures this machine first."""
        return self.gpus is None and not machine_profile().is_file()

    @model_validator(mode="after")
    def _check(self) -> BoardConfig:
        if not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} is an address that other machines reach, and who has the board starts processes "
                "here: leave it out, and reach the board by ssh -L 8765:localhost:8765 from elsewhere."
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path {self.root_path!r}: it begins with a / and ends without one, as /board.")
        return self


def machine_profile() -> Path:
    """Where the profile of this machine is once it was measured for a plan."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardfold" / "board-machine.json"
