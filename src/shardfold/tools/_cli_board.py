"""The command `shardfold board`: its options are the fields of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardfold.errors import ConfigError
from shardfold.tools.board.board_config import BoardConfig
from shardfold.tools.cli_options import with_settings

__all__ = ["register"]


def board_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders that have some; else runs/.", show_default=False)
    ] = None,
    **options: Any,
) -> None:
    """Show runs on a page, as they go: compare, start, stop and go on with them. The runs do not need it."""
    given = {name: value for name, value in options.items() if value is not None}
    for folder in folders or ():
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {str(folder)!r}: give the folder of a run, or one that has runs.")
    settings = BoardConfig.load({**({"folders": folders} if folders else {}), **given}, where="the command line")
    from shardfold.tools.board.board import board

    board(settings)


def register(into: typer.Typer) -> None:
    """Add the command to the application."""
    fields = {name: field for name, field in BoardConfig.model_fields.items() if name != "folders"}
    into.command("board", epilog="For example: shardfold board runs/ --port 8765")(with_settings(board_command, fields))
