"""A checkpoint's weights in others' files, read and written tensor by tensor, and there as a whole or not at all.

hf      safetensors as transformers writes them: one file, or several and an index; tied weights once
torch   what ``torch.save(model.state_dict(), path)`` writes
dcp     what ``torch.distributed.checkpoint.save(model.state_dict(), ...)`` writes
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

import torch

from shardfold.checkpoint.files import NAMES, UnwrittenPiece, divided, write_file
from shardfold.checkpoint.folders import check_apart, sync_folder, write_synced
from shardfold.checkpoint.index import Piece
from shardfold.checkpoint.names import Rename, renamer
from shardfold.checkpoint.reader import Checkpoint
from shardfold.checkpoint.stored import HF_INDEX, Stored, weights_of
from shardfold.errors import CheckpointError, ConfigError, did_you_mean
from shardfold.plan.checks import known_arguments

__all__ = ["TARGETS", "ExportReport", "export_to", "new_folder", "write_folder"]

LOG = getLogger("shardfold")
TARGETS = ("hf", "torch", "dcp")
SHARD_BYTES = 5 * 10**9
LEFT_OUT = "%s has extra state of modules (%s), which %r files have no place for: it is left out; to='torch' writes it."
Tick = Callable[[int], None]

#: What a folder of transformers has beside the weights.
BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "*processor_config.json",
)


@known_arguments
@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        path: the file or folder.
        files: names of the files with tensors in it.
        num_tensors: written, tied ones once.
        num_bytes: of these.
    """

    path: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int

    def __str__(self) -> str:
        what = f"{self.num_tensors} tensors, {self.num_bytes / 2**20:.1f} MiB"
        return f"{self.path}: {what} in {len(self.files)} file{'s' * (len(self.files) != 1)}"


@known_arguments
def export_to(
    source: str | Path,
    target: str | Path,
    to: str = "hf",
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    config: str | Path | None = None,
    state: str = "weight",
    rename: Rename | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Writes the weights of a checkpoint for other programs: parameters, frozen or not, persistent buffers and, to
    ``"torch"``, extra state of modules; values are the parameters' own, without hooks of a state dict.

    One tensor is in memory at a time (``dcp``: at most the largest one's bytes, or 1/256 of all).

    Args:
        source: a checkpoint, or a folder of checkpoints, whose latest is taken.
        target: a file (``torch``) or a folder that does not exist yet.
        to: ``"hf"``, ``"torch"`` or ``"dcp"``, see the head of this module.
        dtype: of floating tensors, as by ``module.to(dtype)``; None: as they were kept, which is the precision of the
            optimizer's copy.
        shard_bytes: of a file of ``hf``, at most, unless one tensor has more.
        config: of ``hf``: a ``config.json``, or a folder with one and perhaps a tokenizer, to copy beside the weights.
        state: ``"average"`` writes averaged weights where there are some.
        rename: from the checkpoint's names to others: regular expressions and what they are replaced with, in order, or
            a function.
        tick: called with the bytes done so far and those of all, every few MiB.

    Raises:
        ConfigError: an option is unknown or has no meaning for this target.
        CheckpointError: the checkpoint is damaged, a parameter has no elements, the target exists or is inside of
            what is read, or the disk is full; nothing is left of what was written.

    Examples:
        >>> saved = engine.save(f"{folder}/step-0", wait=True)
        >>> report = sf.checkpoint.export_to(folder, f"{folder}-hf", "hf", dtype=torch.bfloat16)
    """
    target = Path(os.path.abspath(target))
    _check(to, dtype, shard_bytes, config)
    _check_new(target)
    check_apart(Path(source), target)
    beside = _beside(Path(config)) if config is not None else []
    with Checkpoint(source) as checkpoint:
        stored = weights_of(checkpoint, state).renamed(renamer(rename, "export_to"), str(checkpoint.path)).cast(dtype)
        empty = [name for name, later in stored.tensors.items() if not later.nbytes]
        if empty:
            raise CheckpointError(
                f"{checkpoint.path}: {', '.join(empty)} {'has' if len(empty) == 1 else 'have'} no elements, which "
                "readers of exported weights take for a placeholder: remove them from the model."
            )
        total = sum(later.nbytes for later in stored.tensors.values())

        def told(done: int) -> None:
            tick(done, total)

        if stored.extra and to != "torch":
            LOG.warning(LEFT_OUT, checkpoint.path, ", ".join(stored.extra), to)
        with _beside_its_place(target) as draft:
            if to == "hf":
                files = _to_hf(stored, draft, shard_bytes, told)
                for file in beside:
                    _copy(file, "config.json" if file == Path(str(config)) else file.name, draft, dtype)
            elif to == "torch":
                from shardfold.checkpoint._pt import write_pt

                write_pt(stored, draft, told)
                files = [target.name]
            else:
                from shardfold.checkpoint.dcp import write_dcp

                files = write_dcp(stored, draft, told)
    return ExportReport(target, tuple(files), len(stored.tensors), total)


@known_arguments
def write_folder(
    stored: Stored,
    target: str | Path,
    files: Mapping[str, bytes],
    *,
    shard_bytes: int = SHARD_BYTES,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Writes tensors as ``"hf"`` has them, one after the other, with files beside them, by name.

    Raises:
        CheckpointError: the target exists, or the disk is full; nothing is left of what was written.
    """
    target = Path(os.path.abspath(target))
    _check("hf", None, shard_bytes, None)
    _check_new(target)
    total = sum(later.nbytes for later in stored.tensors.values())
    with _beside_its_place(target) as draft:
        names = _to_hf(stored, draft, shard_bytes, lambda done: tick(done, total))
        for name, data in files.items():
            write_synced(draft / name, data)
    return ExportReport(target, tuple(names), len(stored.tensors), total)


@known_arguments
@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """A path to write a folder to, which has the target's name once nothing was raised, and is removed otherwise.

    Raises:
        CheckpointError: the target exists, or the disk is full.
    """
    target = Path(os.path.abspath(target))
    _check_new(target)
    with _beside_its_place(target) as draft:
        yield draft


def _check_new(target: Path) -> None:
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists: nothing was written; remove it or choose another path.")


def _check(to: str, dtype: torch.dtype | None, shard_bytes: int, config: str | Path | None) -> None:
    """
    Raises:
        ConfigError: an option is unknown or has no meaning for this target.
    """
    if to not in TARGETS:
        raise ConfigError(f"there is no form {to!r} to export to.{did_you_mean(to, TARGETS)}")
    if config is not None and to != "hf":
        raise ConfigError(f"export_to(config=...): only 'hf' has a config.json beside its weights, not {to!r}.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"export_to(dtype={dtype}): weights are of a floating dtype.")
    if shard_bytes != SHARD_BYTES and to != "hf":
        raise ConfigError(
            f"export_to(shard_bytes={shard_bytes}): only 'hf' (--to hf) is cut into files of a size (--shard-size), "
            f"not {to!r}: leave it out."
        )
    if shard_bytes < 1:
        raise ConfigError(f"export_to(shard_bytes={shard_bytes}): a file has at least one byte.")


class _Named(Piece):
    """A tensor of a file of others, which knows it by its name alone."""

    @property
    def key(self) -> str:
        return self.of


def _to_hf(stored: Stored, folder: Path, shard_bytes: int, tick: Tick) -> list[str]:
    """Files of at most so many bytes, and an index if there are several; their names."""
    folder.mkdir()
    every: list[UnwrittenPiece] = []
    for name, later in stored.tensors.items():
        kind = "buffer" if name in stored.buffers else "element"
        every.append(UnwrittenPiece(_Named(name, "", kind, NAMES[later.dtype], later.shape), later.read))
    shards = divided(every, lambda part: part.piece.nbytes, shard_bytes) or [[]]
    names, homes, done = list[str](), dict[str, str](), 0
    for number, parts in enumerate(shards, 1):
        many = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        names.append(f"model{many}.safetensors")
        written = write_file(folder / names[-1], parts, lambda more, before=done: tick(before + more))
        if written.nonfinite:
            LOG.warning("inf or NaN in %s", ", ".join(piece.of for piece in written.nonfinite))
        homes |= {part.piece.of: names[-1] for part in parts}
        done += sum(part.piece.nbytes for part in parts)
    if len(shards) > 1:
        said = {"metadata": {"total_size": done}, "weight_map": {name: homes[name] for name in sorted(homes)}}
        write_synced(folder / HF_INDEX, json.dumps(said, indent=2).encode() + b"\n")
    sync_folder(folder)
    return names


def _beside(config: Path) -> list[Path]:
    """The files to copy.

    Raises:
        ConfigError: there is no such file, or no config.json in the folder.
    """
    if config.is_dir():
        found = sorted({file for pattern in BESIDE for file in config.glob(pattern) if file.is_file()})
        if config / "config.json" not in found:
            raise ConfigError(f"config={str(config)!r} has no config.json.")
        return found
    if not config.is_file():
        raise ConfigError(f"config={str(config)!r}: there is no such file or folder.")
    return [config]


def _copy(file: Path, name: str, folder: Path, dtype: torch.dtype | None) -> None:
    """A file to beside the weights, under ``name``; the model's config says their dtype if that was chosen."""
    data = file.read_bytes()
    if name == "config.json" and dtype is not None:
        try:
            said = json.loads(data)
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON: {error}.") from None
        said["torch_dtype" if "torch_dtype" in said else "dtype"] = str(dtype).removeprefix("torch.")
        data = json.dumps(said, indent=2).encode() + b"\n"
    write_synced(folder / name, data)


@contextmanager
def _beside_its_place(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``target`` if nothing is raised and is removed otherwise."""
    draft = target.parent / f".{target.name}.writing-{os.urandom(6).hex()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        if target.is_dir():
            target.rmdir()  # it is empty
        os.rename(draft, target)
        sync_folder(target.parent)
    except OSError as error:
        _remove(draft)
        raise CheckpointError(f"{target} was not written: {error.strerror} ({error.filename}).") from error
    except BaseException:
        _remove(draft)
        raise


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)
