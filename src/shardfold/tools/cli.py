"""The command `shardfold`.

Bad input ends in one sentence on standard error and status 2; a traceback comes with --debug only. Nothing here imports
torch before a command truly needs it, so that help and refusals are immediate.
"""

from __future__ import annotations

import copy
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import shardfold
from shardfold import launch
from shardfold.errors import ConfigError, ShardfoldError, did_you_mean
from shardfold.plan import presets
from shardfold.plan.offload import offloaded
from shardfold.tools import _cli_board, _cli_serve, cli_ckpt, cli_plan, cli_run, cli_tune, extras
from shardfold.tools.answering.commands import register as register_answers
from shardfold.tools.cli_options import argument, offer_own_name, with_settings
from shardfold.tools.interruption import INTERRUPTION
from shardfold.tools.observe.printable import printable
from shardfold.tools.quick_start import QuickStart
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.folder import claimed
from shardfold.tools.recipes.train_config import TrainConfig, read_settings, resumed_settings

__all__ = ["app", "main"]

FAILED = 1
MOST_PARAMS = 1e18
MOST_BLOCKS = 2**12
RECIPES = ("lm", "face")
FACE = "train face"
"""The command that ``train face`` is: its options are others than the language model's."""

app = typer.Typer(
    name="shardfold",
    help="Train PyTorch models that do not fit on one GPU.",
    epilog="For example: shardfold train --layout zero3 --procs 2",
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    if asked:
        print(f"shardfold {shardfold.__version__}")
        raise typer.Exit


NEXT = """\
shardfold demo                      train a small language model here, on two local processes, in a few minutes
shardfold train --help              the same with your text, size, layout and number of processes
shardfold tune sft --help           fine-tune a model of transformers, whole or with an adapter
shardfold chat runs/sft             talk with what was trained; shardfold generate answers a file of prompts
shardfold serve runs/sft            answer over HTTP as OpenAI's API does, with a page to chat at
shardfold explain zero3 --ranks 8   what a layout keeps on each GPU, what it sends, and the program that it runs
shardfold runs                      which runs there are and what each is at, also those that died
shardfold board                     a page on which runs are watched, compared, started, stopped and gone on with
shardfold run train.py              your own script, on GPUs, hosts, Slurm or MPI
shardfold doctor                    what is wrong with this installation, what costs speed, what this machine can do
shardfold plan --gpus 8xA100-40G    what fits on GPUs that you need not have, and what would be fastest there
shardfold bench                     step time and memory of layouts beside DDP, FSDP2 and DeepSpeed, on this machine
shardfold --help                    all commands"""


@app.callback()
def common(
    invocation: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; allowed anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models that do not fit on one GPU."""
    if invocation.invoked_subcommand is None:
        print(f"shardfold {shardfold.__version__}: train PyTorch models that do not fit on one GPU.\n\n{NEXT}")


@app.command(epilog="For example: shardfold demo")
def demo(invocation: typer.Context) -> None:
    """Train a small language model on Python's own sources, on two local processes, in a few minutes."""
    train(invocation, optimizer="muon", eval_every=200)


@app.command(epilog="For example: shardfold report runs/20261125-101500")
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
) -> None:
    """Write the page of a run, report.html, into its folder: also of one that is under way, or ended early."""
    from shardfold.tools.observe.run_page import write_page

    print(f"Written: {write_page(run)}")


@app.command(epilog="For example: shardfold runs --json")
def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders that have some; else runs/.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per run and line.")] = False,
) -> None:
    """List runs and what each is at: also those whose processes are gone, stopped, or wait in vain."""
    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.observe.run_status import RunStatus, runs_in
    from shardfold.tools.observe.tables import print_whole, runs_table

    roots = folders or [Path("runs")]
    for root in roots:
        if folders and not root.is_dir():
            raise ConfigError(f"there is no folder {str(root)!r}: give the folder of a run, or one that has runs.")
    found = [RunStatus.of(folder) for folder in runs_in(roots)]
    if as_json:
        for each in found:
            print(each.to_json())
    elif found:
        print_whole(lenient_console(), runs_table(found))
    else:
        print(f"There are no runs in {', '.join(map(str, roots))}.")


@app.command(epilog="For example: shardfold doctor --measure my-machine.json")
def doctor(
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure this machine, in some minutes, and write its profile here, for shardfold plan --gpus."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Look for what is wrong with this installation, and for what costs speed."""
    from shardfold.tools.doctor import doctor as checked

    raise typer.Exit(FAILED if checked.doctor(measure, as_json=json) else 0)


def train(
    invocation: typer.Context,
    recipe: Annotated[str, typer.Argument(help=f"What to train: {', '.join(RECIPES)}.")] = "lm",
    config: Annotated[
        Path | None, typer.Option(help="TOML or JSON file with any of these settings; options given here win.")
    ] = None,
    **options: Any,
) -> None:
    """Train a built-in recipe and report what it held, sent and learned.

    With no arguments: a byte-level GPT on the Python standard library's sources, on 2 local processes.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}.{did_you_mean(recipe, RECIPES)}")
    if recipe != "lm":
        raise ConfigError(f"the recipe comes before its options: shardfold train {recipe} --steps 100.")
    given = {name: value for name, value in options.items() if value is not None}
    if config is not None:
        given = TrainConfig.load(read_settings(config), where=str(config)).model_dump(exclude_unset=True) | given
    if "resume" in given:
        given = resumed_settings(Path(given["resume"]), given)
    settings = TrainConfig.load(given, where="the command line")
    settings.check_start()
    if settings.procs > 1 and not launch.is_rank():
        with claimed(settings.out) as folder:
            # Resolved once, here: every rank then reads the same settings, whatever file or clock they came from.
            resolved = {**given, "out": folder}
            arguments = [argument(name, value) for name, value in resolved.items() if name != "procs"]
            debug = ["--debug"] if invocation.obj else []
            argv = ["train", recipe, *arguments, *debug]
            status = launch.launch_local(argv, settings.procs, elastic=settings.elastic, spares=settings.spares)
            raise typer.Exit(status)
    with QuickStart.uncollected():
        from shardfold.tools.recipes import lm

    raise typer.Exit(lm.train(settings).exit_status)


app.command(epilog="For example: shardfold train lm --layout zero2 --steps 200 --data my-texts/")(
    with_settings(train, TrainConfig.model_fields)
)


def train_face(
    invocation: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="TOML or JSON file with any of these settings; options given here win.")
    ] = None,
    study: Annotated[
        bool,
        typer.Option(
            "--study",
            help="Instead: every layout with the largest batch that fits, under two memory budgets, and a page of it.",
        ),
    ] = False,
    **options: Any,
) -> None:
    """Train a face-recognition model: a ViT and a head of identities with a margin, split over the ranks.

    With no options: drawn faces, on 2 local processes.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if config is not None:
        given = FaceConfig.load(read_settings(config), where=str(config)).model_dump(exclude_unset=True) | given
    settings = FaceConfig.load(given, where="the command line")
    if not launch.is_rank():  # whose number of processes is the launcher's
        settings.check_start(study=study)
    if settings.procs > 1 and not launch.is_rank():
        with claimed(settings.out) as folder:
            resolved = {**given, "out": folder}
            arguments = [argument(name, value) for name, value in resolved.items() if name != "procs"]
            flags = ["--study"] * study + (["--debug"] if invocation.obj else [])
            argv = ["train", "face", *arguments, *flags]
            raise typer.Exit(
                launch.launch_local(argv, settings.procs, elastic=settings.elastic, spares=settings.spares)
            )
    if study:
        from shardfold.tools.recipes.face.study import study as run_study

        raise typer.Exit(run_study(settings))
    from shardfold.tools.recipes.face.train import train as train_faces

    raise typer.Exit(train_faces(settings).exit_status)


app.command(FACE, hidden=True, epilog="For example: shardfold train face --layout zero2 --steps 200 --size 48")(
    with_settings(train_face, FaceConfig.model_fields)
)


@app.command(
    epilog="For example: shardfold explain zero3 --ranks 64 --nodes 8 --precision bf16 --params 7e9; or: "
    "shardfold explain --config ds_config.json --ranks 16"
)
def explain(
    layout: Annotated[
        str | None, typer.Argument(help=f"A layout's name (default zero3): {', '.join(presets.NAMES)}.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks in all.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="Machines that the ranks are spread over evenly.")] = 1,
    precision: Annotated[str | None, typer.Option(help="Precision policy (default bf16).")] = None,
    params: Annotated[float, typer.Option(help="Number of parameters.")] = 1e9,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_BLOCKS,
            help="Blocks that the model is made of (default: as many as decoders of that size have).",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            help="Slower tier of gradients and optimizer states: host or disk; or of each state, as in train."
        ),
    ] = None,
    survive: Annotated[
        str | None, typer.Option(help="Who holds a copy of each rank's optimizer states: another rank, or a host.")
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Sums in the order of ranks, whose bits do not depend on how many these are."),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="A DeepSpeed JSON: what it becomes, instead of a layout and a precision.")
    ] = None,
) -> None:
    """Show a layout's table and program, and what they cost; or every value that a DeepSpeed config sets."""
    name = "zero3" if layout is None else layout
    table = offloaded(presets.named(name), offload)
    if survive is not None:
        table = table.replace(copies=survive)
    if exact:
        table = table.replace(reduce=f"{table.reduce}+ordered")
    if config is not None:
        said = (
            ("--offload", offload),
            ("--survive", survive),
            ("--exact", exact or None),
            ("--precision", precision),
            (f"the layout {name}", layout),
        )
        for option, given in said:
            if given is not None:
                raise ConfigError(f"a DeepSpeed config says itself what {option} would: leave that out, or --config.")
    if not 1 <= params <= MOST_PARAMS:
        raise ConfigError(f"--params {params:g}: it is a number of parameters, from 1 to {MOST_PARAMS:g}.")
    if ranks % nodes:
        raise ConfigError(f"{ranks} ranks do not spread evenly over {nodes} nodes: choose --ranks as a multiple.")
    mesh = {"inter": nodes, "intra": ranks // nodes}
    if config is not None:
        from shardfold.tools._explained import explain_config

        print(explain_config(config, mesh=mesh, params=int(params), blocks=blocks))
        return
    from shardfold.plan.explain import explain_preset

    which = table if offload is not None or survive is not None or exact else name
    print(explain_preset(which, mesh=mesh, precision=precision or "bf16", params=int(params), blocks=blocks))


@app.command(epilog="For example: shardfold bench gpt --params 46e6 --only torch-ddp,'zero*' --rounds 5")
def bench(
    job: Annotated[
        str,
        typer.Argument(
            help="gpt, tensors (2,000 small ones), units (64 almost empty ones) or offload (gpt in slower tiers)."
        ),
    ] = "gpt",
    params: Annotated[float, typer.Option(min=1, help="Parameters of the GPT, about: 2e5 to 6.5e9.")] = 46e6,
    rows: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 64,
    ranks: Annotated[int | None, typer.Option(help="Processes per contender (default 2; 1 for units).")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32 or bf16 (default fp32; bf16 for offload, unless the CPU multiplies slower in it)."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw (fused) or sgd.")] = "adamw",
    clip_norm: Annotated[float, typer.Option(help="Largest gradient norm; 0: nobody clips.")] = 0.0,
    folder: Annotated[
        str | None, typer.Option(help="Where contenders keep their files while they run (default: the system's).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or sim (simulated).")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 5,
    steps: Annotated[int, typer.Option(help="Timed steps of a turn.")] = 5,
    warm: Annotated[int, typer.Option(help="Steps before the first turn.")] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds until a contender that is silent is given up.")] = 300.0,
    within: Annotated[
        float | None, typer.Option(help="Seconds after which no round begins (default: all rounds are run).")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="What goes between two simulated nodes, as 200mbit (needs root; --ranks 4).")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Contenders, by name or pattern; may be repeated.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Contenders to leave out, by name or pattern.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="What the others are divided by (default torch-ddp; 1 rank: fastest bare loop).")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every measurement to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Instead: draw one step of two contenders into this PNG (zero3, torch-fsdp2).")
    ] = None,
) -> None:
    """Run one job under each layout and each installed peer, in turns, and compare time, memory and bytes sent."""
    from shardfold.tools.bench import bench as command
    from shardfold.tools.bench.settings import EFFECTS, Settings
    from shardfold.tools.effects import check_effects

    check_effects(bench, locals(), EFFECTS)
    if ranks is None:
        ranks = 4 if link is not None else 1 if job == "units" else 2
    if precision is None:
        precision = command.usual_precision(job, device)
    settings = Settings(
        job=job,
        params=params,
        rows=rows,
        context=context,
        ranks=ranks,
        threads=threads,
        precision=precision,
        optimizer=optimizer,
        clip_norm=clip_norm,
        folder=folder,
        device=device,
        rounds=rounds,
        steps=steps,
        warm=warm,
        timeout=timeout,
        within=within,
        link=link,
    )
    chosen, others = command.words(only), command.words(without)
    if timeline is not None:
        command.draw_timeline(settings, chosen, timeline)
        return
    trusted = command.bench(settings, chosen, others, reference=reference, json_file=json, as_markdown=markdown)
    raise typer.Exit(0 if trusted else FAILED)


app.add_typer(cli_ckpt.app, name="ckpt")
cli_run.register(app)
cli_plan.register(app)
cli_tune.register(app)
register_answers(app)
_cli_serve.register(app)
_cli_board.register(app)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # After `run` there may be a script's own --debug: what is ours stands before.
    ours = arguments.index("run") if "run" in arguments[:2] else len(arguments)
    debug = "--debug" in arguments[:ours]
    words = [each for each in arguments if each != "--debug"]
    if words[:2] == cli_tune.PLAN.split():
        arguments[arguments.index("plan") : arguments.index("tune") + 1] = [cli_tune.PLAN]
    if words[:2] == FACE.split():
        arguments[arguments.index("train") : arguments.index("face") + 1] = [FACE]
    try:
        status = command_of(app, next(iter(arguments), "")).main(
            [each for place, each in enumerate(arguments) if place >= ours or each != "--debug"],
            prog_name="shardfold",
            standalone_mode=False,
            obj=debug,  # for the command that starts others
        )
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        status = refuse(error)
    if status == launch.INTERRUPTED and INTERRUPTION.received:  # which the parser makes a status of, too
        INTERRUPTION.say()
    sys.exit(status or 0)


def command_of(application: typer.Typer, word: str = "") -> Any:
    """Return the command to call; its help shows no `<bool>` behind flags.

    Args:
        word: that comes first. Where it names a command only that one is made: all of them take a tenth of a second.
    """
    of_word = copy.copy(application)
    of_word.registered_commands = [each for each in application.registered_commands if command_name(each) == word]
    of_word.registered_groups = [each for each in application.registered_groups if each.name == word]
    if of_word.registered_commands or of_word.registered_groups:
        application = of_word
    commands: list[Any] = [typer.main.get_command(application)]
    first = commands[0]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for each in (*command.params, command.get_help_option(typer.Context(command))):
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""
    return first


def command_name(command: Any) -> str:
    """Of what was registered with a name, or by the name of its function."""
    return command.name or typer.main.get_command_name(command.callback.__name__)


def refuse(error: BaseException) -> int:
    """Say in one sentence what is wrong and return the exit status."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return launch.INTERRUPTED
    # The parser's own errors: typer has moved their classes between its versions, but never renamed this method.
    parser_message = getattr(error, "format_message", None)
    if parser_message is not None:
        offer_own_name(error)
        message = parser_message().strip().replace("Input should be", "it should be")
        # With no arguments at all the parser has shown the help, and its message is empty.
        if message:
            message = printable(message)
            print(f"Error: {message}{'' if message.endswith(('.', ')', '?')) else '.'}", file=sys.stderr)
        return launch.SAID
    if isinstance(error, ShardfoldError):
        print(f"Error: {printable(str(error))}", file=sys.stderr)
        return launch.SAID
    if isinstance(error, ModuleNotFoundError) and (said := extras.sentence("this command", error)):
        print(f"Error: {said}", file=sys.stderr)
        return launch.SAID
    first = (str(error).strip().splitlines() or ["no message"])[0]
    print(f"Error: {type(error).__name__}: {printable(first)} (--debug shows the traceback)", file=sys.stderr)
    return FAILED
