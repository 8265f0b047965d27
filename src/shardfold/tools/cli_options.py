"""Options of commands that are made of settings, and settings as options again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

__all__ = ["argument", "off_name", "offer_own_name", "option_name", "with_settings"]

METAVARS = {"int": "INTEGER", "float": "NUMBER", "Path": "PATH", "str": "TEXT", "Literal": "TEXT"}

ELSEWHERE = {
    "--batch-size": "--micro-batch",
    "--gradient-accumulation-steps": "--accumulate",
    "--learning-rate": "--lr",
    "--lr-scheduler-type": "--schedule",
    "--max-grad-norm": "--clip-norm",
    "--max-length": "--length",
    "--max-seq-length": "--length",
    "--max-steps": "--steps",
    "--model-name-or-path": "--model",
    "--num-train-epochs": "--epochs",
    "--output-dir": "--out",
    "--per-device-train-batch-size": "--micro-batch",
    "--report-to": "--track",
    "--resume-from-checkpoint": "--resume",
    "--save-steps": "--save-every",
    "--save-total-limit": "--keep",
    "--warmup-steps": "--warmup",
}
"""Options of the Transformers Trainer and TRL, and what is their like here."""


def option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def argument(field: str, value: Any) -> str:
    """Return the option that sets a field."""
    if isinstance(value, bool):
        return option_name(field) if value else off_name(field)
    return f"{option_name(field)}={value}"


def off_name(field: str) -> str:
    return "--no-" + field.replace("_", "-")


def with_settings(command: Any, fields: Mapping[str, Any]) -> Any:
    """Give the command one option per field of the settings, so that each is written down once, beside its meaning."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    for name, field in fields.items():
        if field.annotation is bool:
            flag = typer.Option(f"{option_name(name)}/{off_name(name)}", help=field.description, show_default=False)
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, keyword, default=None, annotation=Annotated[bool | None, flag]))
            continue
        required = field.is_required() or field.default in (None, "", ())
        default = "" if required else f" (default {field.default})"
        words = [word for kind, word in METAVARS.items() if kind in str(field.annotation)]
        # Values stay text: the settings judge them, in the same words as those of a config file.
        option = typer.Option(option_name(name), help=f"{field.description}{default}", metavar=(words or ["TEXT"])[0])
        annotation = Annotated[str | None, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def offer_own_name(error: Any) -> None:
    """Let the parser's error of an option that other libraries have offer the command's name for it, if it has one."""
    ours = ELSEWHERE.get(getattr(error, "option_name", "").replace("_", "-"))
    command = getattr(getattr(error, "ctx", None), "command", None)
    if ours in [name for each in getattr(command, "params", ()) for name in each.opts]:
        error.possibilities = [ours]
