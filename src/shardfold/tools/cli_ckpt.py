"""The commands `shardfold ckpt`: look into checkpoints, check them, carry them out and in.

Nothing here imports torch before a command needs it; errors are told by ``cli.main``.
"""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated

import typer

from shardfold.errors import CheckpointError, ConfigError, did_you_mean
from shardfold.plan.checks import parse_bytes
from shardfold.tools.observe.printable import printable

__all__ = ["app"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}

Source = Annotated[Path, typer.Argument(help="What to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="What to write.", show_default=False)]
Renames = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="PATTERN=NEW", help="Rename tensors by a regular expression; may be repeated."),
]

app = typer.Typer(
    help="Look into, check and convert checkpoints.",
    epilog="For example: shardfold ckpt export runs/a/step-100 exported/ --to hf",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """Look into, check and convert checkpoints."""


@app.command("export", epilog="For example: shardfold ckpt export runs/a exported/ --to hf --dtype bf16 --config gpt2/")
def export(
    source: Source,
    target: Target,
    to: Annotated[
        str, typer.Option(help="hf (safetensors as transformers has them), torch (torch.save), dcp, or onnx.")
    ],
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; as kept, if not given.")] = None,
    shard_size: Annotated[str, typer.Option(help="Bytes of a file of hf, at most: 500MB, 5GB, 1GiB.")] = "5GB",
    config: Annotated[
        Path | None, typer.Option(help="hf: a config.json, or a folder with it and perhaps a tokenizer, to copy.")
    ] = None,
    state: Annotated[str, typer.Option(help="weight, or average: averaged weights where there are some.")] = "weight",
    rename: Renames = None,
    bits: Annotated[int | None, typer.Option(help="onnx: 8 or 4, to which weights are rounded.")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="onnx: rows, by which the cost of --bits is told; may be repeated.")
    ] = None,
) -> None:
    """Write the weights of a checkpoint (SOURCE, or the latest in it) to a file or folder of others' kind (TARGET).

    An adapter of peft, or a run of shardfold tune that has one, is merged into its base: --to hf or onnx. What goes to
    onnx is a whole model: a run of shardfold tune or train, a folder of transformers, an adapter.
    """
    if to == "onnx":
        given = {"--dtype": dtype, "--config": config, "--rename": rename}
        given |= {"--state": state != "weight", "--shard-size": shard_size != "5GB"}
        _export_onnx(source, target, bits, data or [], [option for option, value in given.items() if value])
        return
    if bits is not None or data:
        raise ConfigError(f"{'--bits' if bits is not None else '--data'} is for --to onnx: leave it out.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is unknown.{did_you_mean(dtype, DTYPES)}")
    shard_bytes, names = _bytes(shard_size), _renames(rename)
    import torch

    from shardfold.checkpoint import export_to
    from shardfold.tools.observe.working_line import working

    kind = getattr(torch, DTYPES[dtype]) if dtype is not None else None
    if is_adapter(source):
        _check_merge(source, to, config=config, state=state, renames=names)
        from shardfold.tools.tune.merge import merge

        with working("merging") as line:
            merged = merge(source, target, dtype=kind, shard_bytes=shard_bytes, tick=line.amount)
        print(printable(str(merged)))
        return
    with working("exporting") as line:
        report = export_to(
            source,
            target,
            to,
            dtype=kind,
            shard_bytes=shard_bytes,
            config=config,
            state=state,
            rename=names,
            tick=line.amount,
        )
    print(printable(str(report)))


@app.command("import", epilog="For example: shardfold ckpt import gpt2/model.safetensors runs/gpt2/step-0 --from hf")
def import_(
    source: Source,
    target: Target,
    form: Annotated[str, typer.Option("--from", help="hf, torch, dcp, deepspeed, or auto, which looks.")] = "auto",
    key: Annotated[
        str | None, typer.Option(help="Where in a file of torch or dcp the weights are, if not at a usual place.")
    ] = None,
    rename: Renames = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Unpickle objects in files of torch and dcp, which may run any code.")
    ] = False,
) -> None:
    """Write a checkpoint (TARGET) from files of others' kind (SOURCE): weights, and an optimizer's state if known."""
    names = _renames(rename)
    from shardfold.checkpoint import import_from
    from shardfold.tools.observe.working_line import working

    with working("importing") as line:
        report = import_from(source, target, form, key=key, rename=names, trust=trust, tick=line.amount)
    print(printable(str(report)))


def _export_onnx(source: Path, target: Path, bits: int | None, data: list[Path], others: list[str]) -> None:
    if others:
        raise ConfigError(f"{others[0]} says nothing of --to onnx, which takes a model as it is: leave it out.")
    from shardfold.tools.observe.working_line import working
    from shardfold.tools.onnx.onnx_export import export_onnx

    with working("exporting") as line:
        report = export_onnx(source, target, bits=bits, data=data, say=line.now)
    print(printable(str(report)))


def is_adapter(path: Path) -> bool:
    """Whether a path is an adapter of peft, or a run that has one."""
    return any((folder / "adapter_config.json").is_file() for folder in (path, path / "adapter"))


def _check_merge(source: Path, to: str, *, config: Path | None, state: str, renames: dict[str, str] | None) -> None:
    """
    Raises:
        ConfigError: an option has no meaning for what is merged.
    """
    if to != "hf":
        raise ConfigError(f"{source} has an adapter of peft, which is merged into its base: give --to hf, not {to}.")
    for option, given in (("--config", config), ("--state", state != "weight"), ("--rename", renames)):
        if given:
            raise ConfigError(f"{option} says nothing of an adapter that is merged into its base: leave it out.")


def _bytes(size: str) -> int:
    found = parse_bytes(size)
    if found is None:
        raise ConfigError(f"--shard-size {size!r} is not a number of bytes: give it as 500MB, 5GB or 1GiB.")
    return found


def _renames(rules: list[str] | None) -> dict[str, str] | None:
    if not rules:
        return None
    if lacking := [rule for rule in rules if "=" not in rule]:
        raise ConfigError(f"--rename {lacking[0]!r} has no '=': give PATTERN=NEW, such as '^module\\.='.")
    return dict(rule.rsplit("=", 1) for rule in rules)


Where = Annotated[Path, typer.Argument(help="A checkpoint, or a folder of checkpoints, whose latest is taken.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@app.command(epilog="For example: shardfold ckpt inspect runs/a/step-100 --finite")
def inspect(
    path: Where,
    finite: Annotated[bool, typer.Option("--finite", help="Read all tensors and look for inf and NaN.")] = False,
    json: Json = False,
) -> None:
    """Show what is in a checkpoint: modules, states, the layout it was written under, the run.

    With --finite the status is 1 if anything is inf or NaN.
    """
    from rich.console import Console
    from rich.markup import escape

    from shardfold.checkpoint import inspect as looking
    from shardfold.checkpoint.draft import hosts_said
    from shardfold.tools.observe.contents import contents_table, run_table, states_table
    from shardfold.tools.observe.readable import format_bytes, format_count
    from shardfold.tools.observe.tables import print_whole
    from shardfold.tools.observe.working_line import working

    with working("reading") as line:
        contents = looking.inspect(path, finite=finite, tick=line.amount)
    found = contents.not_finite
    if json:
        print(jsons.dumps(contents.to_json(), indent=2))
    else:
        index, console = contents.index, Console(highlight=False)
        layout, shown = index.layout, printable(str(contents.path), lines=False)
        console.print(
            f"[bold]{escape(shown)}[/bold]: step {index.step}, {format_count(contents.num_elements)} "
            f"parameters, {format_bytes(contents.num_bytes)} in {len(index.files)} files",
            soft_wrap=True,
        )
        said = {name: value for name, value in index.written.items() if name not in ("save", "hosts")}
        facts = {"written": ", ".join(f"{name} {value}" for name, value in said.items()), **contents.run}
        if hosts := hosts_said(index):
            facts["hosts"] = "\n".join(map(str, hosts))
        if contents.missing:
            facts["not here"] = "\n".join(map(str, contents.missing))
        if {"table", "precision", "ranks"} <= layout.keys() and isinstance(layout.get("mesh"), dict):
            mesh = " x ".join(f"{axis} {size}" for axis, size in layout["mesh"].items())
            facts["layout"] = f"{layout['precision']}, {layout['ranks']} ranks ({mesh})\n{layout['table']}"
        elif layout:
            facts["layout"] = ", ".join(f"{name} {value}" for name, value in layout.items())
        if index.nonfinite:
            facts["not finite"] = f"when written: {', '.join(index.nonfinite)}"
        if found is not None:
            facts["inf or NaN"] = "\n".join(map(str, found)) or "none"
        print_whole(console, contents_table(contents.rows()), states_table(contents.states, contents.num_bytes))
        console.print(run_table(facts))
    raise typer.Exit(1 if found else 0)


@app.command(epilog="For example: shardfold ckpt verify runs/a/step-100")
def verify(path: Where, json: Json = False) -> None:
    """Read all of a checkpoint and check it: every byte, every element of every state.

    Names each damaged tensor, its file and its bytes; the status is 1 if there is one.
    """
    from shardfold.checkpoint import verify as checking
    from shardfold.tools.observe.readable import format_bytes
    from shardfold.tools.observe.working_line import working

    try:
        with working("verifying") as line:
            found = checking.verify(path, line.amount)
    except CheckpointError as error:
        if not json:
            raise
        print(jsons.dumps({"path": str(path), "ok": False, "damage": [{"what": str(error)}]}, indent=2))
        raise typer.Exit(2) from None
    if json:
        print(jsons.dumps(found.to_json(), indent=2))
    else:
        size = f"{found.num_tensors} tensors, {format_bytes(found.num_bytes)} in {found.num_files} files"
        for each in found.damage:
            print(printable(str(each), lines=False))
        count = f"{len(found.damage)} problem{'s' * (len(found.damage) != 1)}"
        print(f"{printable(str(found.path), lines=False)}: step {found.step}, {size}: {'whole' if found.ok else count}")
    raise typer.Exit(0 if found.ok else 1)
