"""The commands `shardfold tune`: one for each recipe, with an option for each of its settings."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardfold import launch
from shardfold.errors import ConfigError
from shardfold.tools.cli_options import argument, with_settings
from shardfold.tools.quick_start import QuickStart
from shardfold.tools.recipes.folder import claimed, withdraw
from shardfold.tools.recipes.train_config import read_settings
from shardfold.tools.tune.config import (
    TuneConfig,
    config_class,
    from_options,
    option_fields,
    recipe_names,
    resumed_settings,
)
from shardfold.tools.tune.demo_config import DemoConfig
from shardfold.tools.tune.eval_config import EvalConfig

__all__ = ["register"]

RESOLVED = "SHARDFOLD_TUNE_SETTINGS"
"""Variable by which the command tells its ranks their settings: the path of a JSON file."""

app = typer.Typer(
    help="Fine-tune a model of transformers: whole, its last layers, with LoRA or with a prefix.",
    epilog="For example: shardfold tune sft --model base/ --data chats.jsonl --lora 16",
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PLAN = "plan tune"
"""The command that ``plan tune`` is: its options are others than those of ``plan``."""
NOTHING_FITS = 1
plans = typer.Typer(
    help="Say what a run of `shardfold tune` takes on some devices, before anything runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def common(
    invocation: typer.Context,
    show_data: Annotated[
        Path | None,
        typer.Option(help="Instead: show rows of this file as tokens, what is trained and what was cut."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="With --show-data: the folder with the tokenizer.")] = None,
    from_llamafactory: Annotated[
        Path | None, typer.Option(help="Instead: print a YAML file of LLaMA-Factory's as a config file.")
    ] = None,
) -> None:
    """Fine-tune a model of transformers: whole, its last layers, with LoRA or with a prefix."""
    if from_llamafactory is not None:
        if invocation.invoked_subcommand is not None or show_data is not None:
            raise ConfigError("--from-llamafactory prints a config file for --config: leave the rest out.")
        from shardfold.tools.tune.llamafactory import read_yaml

        print(read_yaml(from_llamafactory).toml(), end="")
        return
    if show_data is None:
        if model is not None:
            raise ConfigError(
                "the recipe comes before its options: shardfold tune sft --model base/ --data rows.jsonl."
            )
        return
    if invocation.invoked_subcommand is not None:
        raise ConfigError("--show-data is instead of a recipe: leave one of them out.")
    if model is None:
        raise ConfigError("--show-data needs a tokenizer: give --model the folder of its model.")
    from shardfold.tools.tune.data.show_data import show_file

    print(show_file(show_data, model, color=sys.stdout.isatty()), end="")


def settings_of(recipe: str, config: Path | None, options: dict[str, Any]) -> TuneConfig:
    """The settings of a run: those of a file, under the options that are given.

    Raises:
        ConfigError: one is unknown or wrong, or the file is of another recipe.
    """
    kind = config_class(recipe)
    given = from_options(kind, _given(options))
    if config is not None:
        read = read_settings(config)
        if (named := read.pop("recipe", recipe)) != recipe:
            raise ConfigError(f"{str(config)!r} is of the recipe {named}: shardfold tune {named} --config {config}.")
        given = merged(kind.checked(read, where=str(config)), given)
    if given.get("resume") is not None:
        given = resumed_settings(kind, Path(given["resume"]), given)
    return kind.load(given, where="the command line")


def merged(first: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Settings over others, section by section; an adapter of another kind is another adapter."""
    found = dict(first)
    for name, value in over.items():
        before = found.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            other = name == "adapter" and value.get("kind", before.get("kind", "lora")) != before.get("kind", "lora")
            value = value if other else {**before, **value}
        found[name] = value
    return found


def command_of(recipe: str) -> Callable[..., None]:
    """The command of a recipe."""

    def command(
        invocation: typer.Context,
        config: Annotated[
            Path | None, typer.Option(help="TOML or JSON file with any of these settings; options given here win.")
        ] = None,
        **options: Any,
    ) -> None:
        if launch.is_rank() and RESOLVED in os.environ:
            given = json.loads(Path(os.environ[RESOLVED]).read_text(encoding="utf-8"))
            settings = config_class(recipe).load(given)
        else:
            settings = settings_of(recipe, config, options)
            check_paths(settings)
        if settings.procs > 1 and not launch.is_rank():
            raise typer.Exit(launch_ranks(recipe, settings, debug=bool(invocation.obj)))
        with QuickStart.uncollected():
            from shardfold.tools.tune.tuned import tune

        raise typer.Exit(tune(settings).exit_status)

    command.__doc__ = config_class(recipe).__doc__
    return with_settings(command, {name: field for name, (_, field) in option_fields(config_class(recipe)).items()})


def check_paths(settings: TuneConfig) -> None:
    """
    Raises:
        ConfigError: there is no file or folder that is named, or the model is none; said before ranks are started.
    """
    from shardfold.tools.tune.models import ModelPlace

    for source in (*settings.data, *settings.eval_data):
        if not source.path.expanduser().exists():
            raise ConfigError(f"there is no file or folder {str(source.path)!r}: give --data the path of some rows.")
    for model in (settings.model, getattr(settings, "teacher", None)):
        if model is not None:
            ModelPlace.find(model)


def launch_ranks(recipe: str, settings: TuneConfig, *, debug: bool) -> int:
    """Start the processes of a run here; all read the settings as they are now, whatever file they came from."""
    with claimed(settings.out) as folder, tempfile.TemporaryDirectory() as place:
        path = Path(place, "settings.json")
        plain = {**settings.plain(given=True), "out": str(folder)}
        plain.pop("recipe")
        path.write_text(json.dumps(plain), encoding="utf-8")
        before = os.environ.get(RESOLVED)
        os.environ[RESOLVED] = str(path)
        try:
            status = launch.launch_local(
                ["tune", recipe, *["--debug"] * debug],
                settings.procs,
                elastic=settings.is_elastic,
                spares=getattr(settings, "spares", 0),
            )
            if status == launch.SAID:
                withdraw(folder)
            return status
        finally:
            if before is None:
                os.environ.pop(RESOLVED, None)


def plan_command_of(recipe: str) -> Callable[..., None]:
    """The command that plans a recipe: with its options, and devices."""

    def command(
        gpus: Annotated[
            str, typer.Option(help="How many of which device, nodes first: 8xA100-40G, 4x8xH100.")
        ] = "1xH100",
        config: Annotated[Path | None, typer.Option(help="TOML or JSON file with any of these settings.")] = None,
        **options: Any,
    ) -> None:
        settings = settings_of(recipe, config, {"data": "rows.jsonl", "precision": "bf16", **_given(options)})
        from shardfold.planner.division import Division
        from shardfold.tools.planning.command import print_plan
        from shardfold.tools.tune.tuning_plan import planned_tuning

        division = Division(
            tensor=settings.tensor,
            sequence_parallel=settings.sequence_parallel,
            sequence=settings.sequence,
            attention=None if settings.attention == "auto" else settings.attention,
        )
        fits = print_plan(
            lambda how: planned_tuning(settings, how),
            gpus,
            memory=settings.memory,
            precision=settings.precision,
            micro_batch=settings.micro_batch or "max",
            accumulate=settings.accumulate,
            length=None,
            tables={settings.layout: settings.table()},
            modes=[settings.activations],
            divisions=[division],
        )
        if not fits:
            raise typer.Exit(NOTHING_FITS)

    command.__doc__ = f"Say what a run of {recipe} takes on some devices, before anything runs."
    return with_settings(command, {name: field for name, (_, field) in option_fields(config_class(recipe)).items()})


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def evaluate_command(
    invocation: typer.Context,
    run: Annotated[
        Path, typer.Argument(help="A run, a folder of transformers, or an adapter of peft.", show_default=False)
    ],
    **options: Any,
) -> None:
    """Measure a model on rows: loss, bits per byte, right choices, answers that end, answers that are right."""
    given = {name: value for name, value in options.items() if value is not None}
    settings = EvalConfig.load({"model": run, **given}, where="the command line")
    for source in settings.data:
        if not source.path.expanduser().exists():
            raise ConfigError(f"there is no file or folder {str(source.path)!r}: give --data the path of some rows.")
    if settings.procs > 1 and not launch.is_rank():
        arguments = [argument(name, value) for name, value in given.items() if name != "procs"]
        debug = ["--debug"] if invocation.obj else []
        raise typer.Exit(launch.launch_local(["eval", str(run), *arguments, *debug], settings.procs))
    from shardfold.tools.tune.evaluate import evaluate

    evaluate(settings)


def demo_command(invocation: typer.Context, **options: Any) -> None:
    """Train and tune a small model here, by one recipe after the other, in some minutes: a page shows what each did."""
    given = {name: value for name, value in options.items() if value is not None}
    settings = DemoConfig.load(given, where="the command line")
    from shardfold.tools.tune.tune_demo import prepare, run_demo

    if launch.is_rank():
        run_demo(settings.model_copy(update={"procs": int(os.environ["WORLD_SIZE"])}))
        return
    with claimed(settings.out) as folder:
        settings = settings.model_copy(update={"out": folder})
        prepare(settings)
        if settings.procs == 1:
            run_demo(settings)
            return
        resolved = settings.model_dump(exclude={"procs"})
        arguments = [argument(name, value) for name, value in resolved.items()]
        debug = ["--debug"] if invocation.obj else []
        raise typer.Exit(launch.launch_local(["tune", "demo", *arguments, *debug], settings.procs))


def register(into: typer.Typer) -> None:
    """Add the commands to the application."""
    into.command("eval", epilog="For example: shardfold eval runs/sft --data held-out.jsonl --pack")(
        with_settings(
            evaluate_command, {name: field for name, field in EvalConfig.model_fields.items() if name != "model"}
        )
    )
    app.command("demo", epilog="For example: shardfold tune demo")(with_settings(demo_command, DemoConfig.model_fields))
    for recipe in recipe_names():
        example = f"For example: shardfold tune {recipe} --model base/ --data rows.jsonl --lora 16 --layout zero3"
        app.command(recipe, epilog=example)(command_of(recipe))
        example = f"For example: shardfold plan tune {recipe} --model base/ --lora 16 --gpus 2x4090"
        plans.command(recipe, epilog=example)(plan_command_of(recipe))
    into.add_typer(app, name="tune")
    into.add_typer(plans, name=PLAN, hidden=True)
