"""The command `shardfold plan`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan import presets

if TYPE_CHECKING:
    from shardfold.planner.division import Division

__all__ = ["plan", "register"]

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "offload", "infinity")
MODES = ("keep", "select", "recompute")


def plan(
    model: Annotated[
        str, typer.Option(help="A size of `train`, a shape such as llama-7b, a config.json, or module:function.")
    ] = "demo",
    gpus: Annotated[str, typer.Option(help="How many of which device, nodes first: 8xA100-40G, 4x8xH100.")] = "1xH100",
    memory: Annotated[str | None, typer.Option(help="Memory of each device, in place of its own, as 40GiB.")] = None,
    precision: Annotated[str, typer.Option(help="Precision policy.")] = "bf16",
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples on each device at a time (default: looks for the fastest).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step of all devices (default: one micro-batch of each).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host memory for each device, as 64GiB (default: enough).")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Layouts to look at; may be repeated.")] = None,
    activations: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODES)}; may be repeated.")] = None,
    tensor: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks that share each layer; repeated: sizes to look at.")
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="With --tensor: norms are divided by tokens, too.")
    ] = False,
    sequence: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks that have parts of the same sequences; may be repeated.")
    ] = None,
    expert: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks among which experts are shared out; may be repeated.")
    ] = None,
    pipeline: Annotated[
        int, typer.Option(min=1, help="Ranks among which stages of layers are; needs --micro-batch.")
    ] = 1,
    order: Annotated[
        str, typer.Option(help="In which order stages run --accumulate micro-batches: 1f1b, gpipe.")
    ] = "1f1b",
    inference: Annotated[
        bool, typer.Option("--inference", help="To serve it: weights and the cache of keys and values, by dtype.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the plan here too, as one page with sliders.")] = None,
) -> None:
    """Say what fits before anything runs: the peak of each layout on these devices, when it is reached and why."""
    for mode in activations or ():
        if mode not in MODES:
            raise ConfigError(f"--activations {mode}: a plan follows {', '.join(MODES)}.{did_you_mean(mode, MODES)}")
    tables = {name: presets.named(name) for name in layout or LAYOUTS}
    from shardfold.plan.layout import Precision

    Precision.named(precision)
    from shardfold.tools.planning.command import print_inference, print_plan, write_plan_page

    divisions = _divisions(
        product(tensor or [1], sequence or [1], expert or [1]), pipeline, order, accumulate, micro_batch,
        sequence_parallel=sequence_parallel, alone="--inference" if inference else "--html" if html else "",
    )  # fmt: skip
    if inference:
        print_inference(model, gpus, memory=memory, length=length, sequences=micro_batch or 1)
        return
    if html is not None:
        write_plan_page(
            html, model, gpus, memory=memory, precision=precision, length=length, layouts=list(tables),
            modes=activations or list(MODES), samples=micro_batch or 1,
        )  # fmt: skip
    print_plan(
        model, gpus, memory=memory, precision=precision, micro_batch=micro_batch, accumulate=accumulate, length=length,
        tables=tables, modes=activations or list(MODES), batch=batch, host=host,
        divisions=divisions,
    )  # fmt: skip


def _divisions(
    sizes: Iterable[tuple[int, int, int]], pipeline: int, order: str, accumulate: int, micro_batch: int | None, *,
    sequence_parallel: bool, alone: str,
) -> list[Division]:  # fmt: skip
    """How ranks share the model, by sizes of axes; ``alone``: an option that goes with none.

    Raises:
        ConfigError: options do not go together.
    """
    from shardfold.planner.division import Division

    divisions = [
        Division(
            tensor=t,
            sequence_parallel=sequence_parallel and t > 1,
            sequence=n,
            expert=e,
            pipeline=pipeline,
            order=order,
            micro_batches=accumulate if pipeline > 1 else 1,
        )
        for t, n, e in sizes
    ]
    if len(divisions) > 1 and micro_batch is not None:
        raise ConfigError("--micro-batch plans one size of each axis: give each once, or leave --micro-batch out.")
    if pipeline > 1 and micro_batch is None:
        raise ConfigError(
            "--pipeline is planned for a micro-batch that is given: add --micro-batch 1 and, as micro-batches of a "
            f"step that go through the stages, --accumulate {4 * pipeline}."
        )
    if pipeline > 1 and sequence_parallel:
        raise ConfigError("--sequence-parallel does not go with --pipeline: leave one of them out.")
    axes = [axis for division in divisions for axis in division.axes]
    if axes and alone:
        raise ConfigError(f"{alone} plans for ranks of data alone: leave --{axes[0]} out.")
    if sequence_parallel and "tensor" not in axes:
        raise ConfigError("--sequence-parallel divides what flows between the parts of --tensor: give --tensor 2, too.")
    return divisions


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="For example: shardfold plan --model llama-7b --gpus 8xA100-80G --micro-batch 2")(plan)
