"""The command `shardfold plan`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan import presets
from shardfold.plan.checks import parse_bytes
from shardfold.tools.effects import Effect, check_effects
from shardfold.tools.named_optimizers import check_optimizer

if TYPE_CHECKING:
    from shardfold.plan.auto_wire import AutoWire
    from shardfold.plan.layout import Layout
    from shardfold.planner.division import Division

__all__ = ["plan", "register"]

MODES = ("keep", "select", "recompute")
MOVED = ("host", "disk")
"""Modes that are looked at where they are asked for."""
MANY = 10**9
"""Samples of a micro-batch, and micro-batches of a step: more is a slip of the keyboard."""
LONGEST = 10**7
"""Tokens of a sample."""
NOTHING_FITS = 1
"""The exit status where what was asked for fits nowhere."""
EFFECTS = (
    *(
        Effect(name, lambda plan: not plan.inference, "--inference plans no training")
        for name in ("batch", "host", "accumulate", "layout", "activations", "wire", "price", "html", "optimizer")
    ),
    *(
        Effect(name, lambda plan: plan.inference, "it is about generation", "give --inference")
        for name in ("weights", "bits", "stays", "page_size")
    ),
    Effect("stays", lambda plan: plan.weights != "memory", "weights rest in memory", "give --weights disk"),
    Effect(
        "accumulate",
        lambda plan: plan.micro_batch is not None,
        "a search counts the micro-batches of a step by --batch, unless --micro-batch is given",
    ),
    Effect("batch", lambda plan: plan.micro_batch is None, "with --micro-batch, --accumulate says how many a step has"),
    Effect(
        "price",
        lambda plan: plan.micro_batch is None,
        "what tokens cost is said of the fastest way, for which --micro-batch is left out",
    ),
    Effect("optimizer", lambda plan: plan.html is None, "the page of --html plans AdamW"),
    Effect("survive", lambda plan: not plan.inference, "--inference plans no training"),
    Effect("survive", lambda plan: plan.html is None, "the page of --html has no copies"),
    Effect("survive", lambda plan: plan.optimizer == "adamw", "copies are of AdamW's states", "give --optimizer adamw"),
    Effect("exact", lambda plan: plan.survive is not None, "it is about ranks that die", "give --survive rank"),
    Effect("wire", lambda plan: not plan.exact, "with --exact gradients travel as layouts have them"),
    Effect(
        "galore_rank",
        lambda plan: plan.optimizer.startswith("galore"),
        "it is of GaLore",
        "give --optimizer galore",
    ),
    Effect(
        "order",
        lambda plan: max(plan.pipeline or [1]) > 1,
        "an order is of stages, which --pipeline 2 or more makes",
    ),
)
"""What options need that do nothing by themselves."""
APART = {"--inference": ("sequence", "pipeline")}
"""Axes that these options do not go with."""


Model = Annotated[
    str,
    typer.Option(
        help="A size of `train`, a shape such as llama-7b, a config.json, transformers:TYPE, timm:NAME, or "
        "module:function."
    ),
]
MicroBatch = Annotated[
    str | None,
    typer.Option(
        metavar="INTEGER|max",
        help="Samples on each device at a time, or max: the most that fit (default: looks for the fastest).",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MANY,
        help="Samples of a step of all devices, rounded up to whole micro-batches (default: one of each).",
    ),
]
Accumulate = Annotated[
    int | None, typer.Option(min=1, max=MANY, help="With --micro-batch: micro-batches of a step (default 1).")
]
Tensor = Annotated[
    list[int] | None, typer.Option(min=1, help="Ranks that share each layer; repeated: sizes to look at.")
]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="With --tensor: norms are divided by tokens, too.")
]
Sequence = Annotated[
    list[int] | None, typer.Option(min=1, help="Ranks that have parts of the same sequences; may be repeated.")
]
Expert = Annotated[
    list[int] | None, typer.Option(min=1, help="Ranks among which experts are shared out; may be repeated.")
]
Pipeline = Annotated[
    list[int] | None, typer.Option(min=1, help="Ranks among which stages of layers are; may be repeated.")
]
Order = Annotated[
    list[str] | None,
    typer.Option(
        help="In which order stages run micro-batches: 1f1b, gpipe, interleaved:2, looped-bfs, zb-h1, interleaved-zb, "
        "zbv, v-half, v-min, dualpipev; may be repeated (default 1f1b)."
    ),
]
Wire = Annotated[
    str | None,
    typer.Option(
        help="What else parameters and gradients may travel in, as of Engine(wire=): auto, auto:0.01, auto:int8."
    ),
]
Inference = Annotated[
    bool, typer.Option("--inference", help="To serve it: weights and the cache of keys and values, by dtype.")
]


Weights = Annotated[str, typer.Option(help="With --inference: where weights rest, memory, host or disk.")]
Bits = Annotated[int | None, typer.Option(help="With --inference: bits of a weight, 2, 4 or 8.")]
Stays = Annotated[str | None, typer.Option(help="With --weights: bytes that stay in memory, as 2GiB.")]
PageSize = Annotated[
    int, typer.Option(min=1, max=LONGEST, help="With --inference: tokens of a page of keys and values.")
]
Real = Annotated[
    bool,
    typer.Option("--real", help="Run the model on zeros with memory, for a forward that asks for values (.item())."),
]


OptimizerName = Annotated[
    str, typer.Option(help="adamw, adamw8bit, adafactor, lion, muon, galore or galore8bit, whose states are counted.")
]
GaloreRank = Annotated[int, typer.Option(min=1, max=2**16, help="Rank of what GaLore projects gradients to.")]
Survive = Annotated[
    str | None, typer.Option(help="Who holds a copy of each rank's optimizer states: another rank, or a host.")
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Sums in the order of ranks, whose bits do not depend on how many these are.")
]
Price = Annotated[float | None, typer.Option(help="Price of a device for an hour: says what 10^9 tokens cost.")]


def plan(
    model: Model = "demo",
    gpus: Annotated[str, typer.Option(help="How many of which device, nodes first: 8xA100-40G, 4x8xH100.")] = "1xH100",
    memory: Annotated[str | None, typer.Option(help="Memory of each device, in place of its own, as 40GiB.")] = None,
    precision: Annotated[str, typer.Option(help="Precision policy.")] = "bf16",
    micro_batch: MicroBatch = None,
    batch: Batch = None,
    host: Annotated[str | None, typer.Option(help="Host memory for each device, as 64GiB (default: enough).")] = None,
    accumulate: Accumulate = None,
    length: Annotated[int | None, typer.Option(min=1, max=LONGEST, help="Tokens of a sample.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Layouts to look at; may be repeated.")] = None,
    activations: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(MODES)}, host, disk; may be repeated.")
    ] = None,
    tensor: Tensor = None,
    sequence_parallel: SequenceParallel = False,
    sequence: Sequence = None,
    expert: Expert = None,
    pipeline: Pipeline = None,
    order: Order = None,
    wire: Wire = None,
    survive: Survive = None,
    exact: Exact = False,
    real: Real = False,
    price: Price = None,
    optimizer: OptimizerName = "adamw",
    galore_rank: GaloreRank = 16,
    inference: Inference = False,
    weights: Weights = "memory",
    bits: Bits = None,
    stays: Stays = None,
    page_size: PageSize = 16,
    html: Annotated[Path | None, typer.Option(help="Write the plan here too, as one page with sliders.")] = None,
) -> None:
    """Say what fits before anything runs: the peak of each layout on these devices, when it is reached and why.

    The exit status is 0 where something fits, 1 where nothing does, and 2 where an option is refused.
    """
    check_effects(plan, locals(), EFFECTS)
    if price is not None and not 0 < price < float("inf"):
        raise ConfigError(f"--price {price:g}: give what a device costs an hour, above 0.")
    tables, auto, size = _checked(activations, layout, precision, wire, micro_batch, gpus, survive, exact=exact)
    check_optimizer(optimizer)
    if weights not in ("memory", "host", "disk"):
        raise ConfigError(f"--weights {weights}: it is memory, host or disk.")
    if bits not in (None, 2, 4, 8):
        raise ConfigError(f"--bits {bits}: it is 2, 4 or 8.")
    if stays is not None and parse_bytes(stays) is None:
        raise ConfigError(f"--stays {stays}: it names no bytes: write it as 2GiB or 500MB.")
    if inference and size == "max":
        raise ConfigError("--inference says itself how many sequences fit: give --micro-batch a number, or none.")
    if real and max(pipeline or [1]) > 1:
        raise ConfigError("--real does not go with --pipeline, whose stages are run without memory: leave one out.")
    from shardfold.tools.planning.command import print_inference, print_plan, write_plan_page

    divisions = _divisions(
        tensor or [1], sequence or [1], expert or [1], pipeline or [1], order or ["1f1b"], accumulate or 1, size,
        sequence_parallel=sequence_parallel, alone="--inference" if inference else "--html" * bool(html))  # fmt: skip
    samples = size if isinstance(size, int) else 1
    if inference:
        if not print_inference(model, gpus, memory=memory, length=length, sequences=samples, division=divisions[0],
                               real=real or None, precision=precision, weights=weights, bits=bits, stays=stays,
                               page=page_size):  # fmt: skip
            raise typer.Exit(NOTHING_FITS)
        return
    if html is not None:
        if moved := [mode for mode in activations or () if mode in MOVED]:
            raise ConfigError(f"--html does not follow --activations {moved[0]}: leave one of them out.")
        write_plan_page(
            html, model, gpus, memory=memory, precision=precision, length=length, layouts=list(tables),
            modes=activations or list(MODES), samples=samples, divisions=divisions, real=real or None,
            accumulate=accumulate,
        )  # fmt: skip
    fits = print_plan(
        model, gpus, memory=memory, precision=precision, micro_batch=size, accumulate=accumulate or 1, length=length,
        tables=tables, modes=activations or list(MODES), batch=batch, host=host, survive=survive, exact=exact,
        divisions=divisions, wire=auto, real=real or None, price=price, optimizer=optimizer, galore_rank=galore_rank,
    )  # fmt: skip
    if not fits:
        raise typer.Exit(NOTHING_FITS)


def _checked(
    activations: list[str] | None,
    layout: list[str] | None,
    precision: str,
    wire: str | None,
    micro_batch: str | None,
    gpus: str,
    survive: str | None,
    *,
    exact: bool,
) -> tuple[dict[str, Layout], AutoWire | None, int | str | None]:
    """Tables by name, wires, and samples of a micro-batch, of options that name something.

    Raises:
        ConfigError: one names nothing, or they do not go together.
    """
    from shardfold.plan.layout import ORDERED, Precision
    from shardfold.planner.hardware import cluster
    from shardfold.planner.ranking import layouts_for

    for mode in activations or ():
        if mode not in (known := (*MODES, *MOVED)):
            raise ConfigError(f"--activations {mode}: a plan follows {', '.join(known)}.{did_you_mean(mode, known)}")
    Precision.named(precision)
    size = _samples(micro_batch)
    if size and wire:
        raise ConfigError("--wire is a dimension of a search, which has no --micro-batch: leave one of them out.")
    names = layout or layouts_for(cluster(gpus))
    tables = {name: presets.named(name).replace(copies=survive) for name in names}
    if exact:
        tables = {name: table.replace(reduce=f"{table.reduce}{ORDERED}") for name, table in tables.items()}
    if wire is None:
        return tables, None, size
    from shardfold.plan.auto_wire import AutoWire

    return tables, AutoWire.named(wire), size


def _samples(given: str | None) -> int | str | None:
    """What ``--micro-batch`` says.

    Raises:
        ConfigError: it is no number, nor ``max``.
    """
    if given is None or given == "max":
        return given
    if not given.isdecimal() or not 1 <= int(given) <= MANY:
        raise ConfigError(f"--micro-batch {given}: give a number of samples, from 1 to {MANY:,}, or max.")
    return int(given)


def _divisions(
    tensors: Iterable[int],
    sequences: Iterable[int],
    experts: Iterable[int],
    pipelines: Iterable[int],
    orders: Iterable[str],
    accumulate: int,
    micro_batch: int | str | None,
    *,
    sequence_parallel: bool,
    alone: str,
) -> list[Division]:
    """How ranks share the model, by sizes of axes; ``alone``: an option that does not go with all.

    Raises:
        ConfigError: options do not go together.
    """
    from shardfold.planner.division import Division

    divisions: list[Division] = []
    for t, n, e, p, order in product(tensors, sequences, experts, pipelines, orders):
        if p > 1:
            _check_order(order)
        one = Division(
            tensor=t,
            sequence_parallel=sequence_parallel and t > 1,
            sequence=n,
            expert=e,
            pipeline=p,
            order=order if p > 1 else "1f1b",
            micro_batches=accumulate if p > 1 and micro_batch is not None else 1,
        )
        if one not in divisions:
            divisions.append(one)
    if len(divisions) > 1 and micro_batch is not None:
        raise ConfigError("--micro-batch plans one size of each axis: give each once, or leave --micro-batch out.")
    axes = [axis for division in divisions for axis in division.axes]
    if "pipeline" in axes and sequence_parallel:
        raise ConfigError("--sequence-parallel does not go with --pipeline: leave one of them out.")
    for axis in APART.get(alone, ()):
        if axis in axes:
            raise ConfigError(f"{alone} does not follow --{axis}: leave one of them out.")
    if alone == "--inference" and len(divisions) > 1:
        raise ConfigError("--inference plans one size of each axis: give each once.")
    if sequence_parallel and "tensor" not in axes:
        raise ConfigError("--sequence-parallel divides what flows between the parts of --tensor: give --tensor 2, too.")
    return divisions


def _check_order(order: str) -> None:
    """
    Raises:
        ConfigError: there is no such order, or plans do not follow it.
    """
    from shardfold.parallel.pipeline.ahead import AHEAD
    from shardfold.parallel.pipeline.stage_order import choose_order

    try:
        _ = choose_order(order, "--order")
    except ConfigError as error:
        said = str(error)
        for name in AHEAD:  # which plans refuse
            said = said.replace(f"{name}, ", "")
        raise ConfigError(said) from error


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="For example: shardfold plan --model llama-7b --gpus 8xA100-80G --micro-batch 2")(plan)
