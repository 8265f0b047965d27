"""The commands `shardfold generate` and `shardfold chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardfold import launch
from shardfold.errors import ConfigError
from shardfold.tools.answering.answer_config import ChatConfig, GenerateConfig
from shardfold.tools.cli_options import argument, with_settings
from shardfold.tools.quick_start import QuickStart

__all__ = ["register"]

RunArgument = Annotated[
    Path, typer.Argument(help="A run, a folder of transformers, or an adapter of peft.", show_default=False)
]
ONE_PROCESS = ("procs", "tensor")


def generate_command(invocation: typer.Context, run: RunArgument, **options: Any) -> None:
    """Answer every prompt of a file, many at once, each as alone: one line of JSON for each answer, as it ends."""
    given = {name: value for name, value in options.items() if value is not None}
    settings = GenerateConfig.load({"model": run, **given}, where="the command line")
    if not settings.prompts.expanduser().is_file():
        raise ConfigError(f"there is no file {str(settings.prompts)!r}: give --prompts lines of JSON.")
    if settings.procs > 1 and not launch.is_rank():
        arguments = [argument(name, value) for name, value in given.items() if name != "procs"]
        debug = ["--debug"] if invocation.obj else []
        raise typer.Exit(launch.launch_local(["generate", str(run), *arguments, *debug], settings.procs))
    with QuickStart.uncollected():
        QuickStart.import_torch()
        from shardfold.tools.answering.batch_answers import answer_prompts

    answer_prompts(settings)


def chat_command(run: RunArgument, **options: Any) -> None:
    """Talk with a model: its answers appear as they come. Ctrl-C stops one, Ctrl-D ends."""
    given = {name: value for name, value in options.items() if value is not None}
    settings = ChatConfig.load({"model": run, **given}, where="the command line")
    with QuickStart.uncollected():
        QuickStart.import_torch()
        from shardfold.tools.answering._chat_session import chat

    chat(settings)


def register(into: typer.Typer) -> None:
    """Add the commands to the application."""
    asked = {name: field for name, field in GenerateConfig.model_fields.items() if name != "model"}
    into.command("generate", epilog="For example: shardfold generate runs/sft --prompts p.jsonl --out answers.jsonl")(
        with_settings(generate_command, asked)
    )
    said = {name: field for name, field in ChatConfig.model_fields.items() if name not in ("model", *ONE_PROCESS)}
    into.command("chat", epilog="For example: shardfold chat runs/sft --temperature 0.8")(
        with_settings(chat_command, said)
    )
