"""The commands `shardfold ckpt`: look into checkpoints, check them, carry them out and in.

Nothing here imports torch before a command needs it; errors are told by ``cli.main``.
"""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Look into, check and convert checkpoints.",
    epilog="For example: shardfold ckpt export runs/a/step-100 exported/ --to hf",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """Look into, check and convert checkpoints."""
