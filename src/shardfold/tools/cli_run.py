"""The command `shardfold run`: its options are those of :class:`shardfold.launch.options.Options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from shardfold.errors import ConfigError
from shardfold.launch.options import REFUSED, Options, option_fields
from shardfold.launch.run_script import run as run_script

__all__ = ["register"]

EXAMPLES = (
    "For example: shardfold run --nproc-per-node 4 train.py --lr 3e-4",
    "On two hosts: shardfold run --hostfile hosts --include worker-0@worker-1:0,2 train.py",
    "In a Slurm job: srun --ntasks-per-node=1 shardfold run train.py",
)


def run(script: str, arguments: list[str] | None = None, **given: Any) -> None:
    """Run your script as several processes, on this machine or on many.

    Takes the options of torchrun and of DeepSpeed's launcher, written with - or _. What stands after SCRIPT is
    the script's.
    """
    options = {name: value for name, value in given.items() if name.replace("_", "-") not in REFUSED}
    if options["launcher"] is not None:
        options["launcher"] = options["launcher"].lower()
    raise typer.Exit(run_script(Options(**options), script, arguments or []))


def register(app: typer.Typer) -> None:
    """Add the command to the application, with one option per field of Options."""
    parameters: list[inspect.Parameter] = []
    for each in option_fields():
        flag = isinstance(each.default, bool)
        names = ["--" + each.name.replace("_", "-"), *each.metadata["names"].split()]
        kind = bool if flag else type_of(str(each.type))
        option = typer.Option(
            *names,
            help=each.metadata["help"],
            metavar=None if flag else each.metadata["metavar"],
            envvar=f"PET_{each.metadata['env']}" if each.metadata["env"] else None,
            show_envvar=False,
            show_default=each.default not in (None, "", False),
            rich_help_panel=each.metadata["panel"],
        )
        annotation = Annotated[kind | None if each.default is None else kind, option]
        kind_of = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(each.name, kind_of, default=each.default, annotation=annotation))
    for name, (flag, instead) in REFUSED.items():
        option = typer.Option(f"--{name}", hidden=True, callback=refusal(name, instead))
        annotation = Annotated[bool if flag else str | None, option]
        default = False if flag else None
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name.replace("-", "_"), keyword, default=default, annotation=annotation))
    script = typer.Argument(
        help="Your script; a module with -m, a program with --no-python.", metavar="SCRIPT", show_default=False
    )
    rest = typer.Argument(help="Its own arguments.", metavar="[ARGUMENTS]", show_default=False)
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [
        inspect.Parameter("script", positional, annotation=Annotated[str, script]),
        inspect.Parameter("arguments", positional, default=None, annotation=Annotated[list[str] | None, rest]),
    ]
    command: Any = run
    command.__signature__ = inspect.Signature([*first, *parameters])
    command.__annotations__ = {each.name: each.annotation for each in (*first, *parameters)}
    app.command(
        epilog="\n\n".join(EXAMPLES),
        context_settings={
            "allow_interspersed_args": False,  # what follows the script is the script's
            "token_normalize_func": lambda name: name.replace("_", "-"),
            "help_option_names": ["-h", "--help"],
        },
    )(command)


def refusal(name: str, instead: str) -> Callable[[Any], Any]:
    def refuse(value: Any) -> Any:
        if value:
            raise ConfigError(f"--{name} is not supported: {instead}")
        return value

    return refuse


def type_of(annotation: str) -> type:
    return next((kind for kind in (int, float) if annotation.startswith(kind.__name__)), str)
