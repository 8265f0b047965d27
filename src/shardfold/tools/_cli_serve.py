"""The command `shardfold serve`: its options are the fields of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardfold import launch
from shardfold.tools.cli_options import argument, with_settings
from shardfold.tools.quick_start import QuickStart
from shardfold.tools.serve.serve_config import ServeConfig, read_keys

__all__ = ["register"]

LISTS = ("adapter", "cors")


def serve_command(
    invocation: typer.Context,
    run: Annotated[
        Path, typer.Argument(help="A run, a folder of transformers, or an adapter of peft.", show_default=False)
    ],
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="An adapter of peft, as NAME=PATH: clients ask for it by model=NAME; may be repeated."),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may ask from browsers, as https://example.org; may be repeated."),
    ] = None,
    **options: Any,
) -> None:
    """Answer over HTTP as OpenAI's API does: chat, completions, streaming; and a page to chat at."""
    given = {name: value for name, value in options.items() if value is not None}
    listed = {"adapter": adapter or [], "cors": cors or []}
    settings = ServeConfig.load({"model": run, **given, **listed}, where="the command line")
    if settings.key_file is not None:
        read_keys(settings.key_file)
    if settings.procs > 1 and not launch.is_rank():
        arguments = [argument(name, value) for name, value in given.items() if name != "procs"]
        arguments += [argument(name, value) for name, values in listed.items() for value in values]
        debug = ["--debug"] if invocation.obj else []
        raise typer.Exit(launch.launch_local(["serve", str(run), *arguments, *debug], settings.procs))
    with QuickStart.uncollected():
        QuickStart.import_torch()
        from shardfold.tools.serve.serve import serve

    serve(settings)


def register(into: typer.Typer) -> None:
    """Add the command to the application."""
    fields = {name: field for name, field in ServeConfig.model_fields.items() if name not in ("model", *LISTS)}
    into.command("serve", epilog="For example: shardfold serve runs/sft --port 8000")(
        with_settings(serve_command, fields)
    )
