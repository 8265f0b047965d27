"""fp32 weights of a checkpoint, of ours or of DeepSpeed's, without an engine."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfold.checkpoint.deepspeed import DeepSpeedFolder
from shardfold.checkpoint.folders import INDEX, LATEST, read_name
from shardfold.checkpoint.reader import Checkpoint
from shardfold.checkpoint.stored import Later, weights_of
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.compat.deepspeed.whole_files import written_whole
from shardfold.errors import CheckpointError
from shardfold.plan.checks import parse_bytes

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
]


class LazyTensor(NamedTuple):
    """A weight that is read when :meth:`contiguous` asks for it."""

    later: Later

    @property
    def shape(self) -> tuple[int, ...]:
        return self.later.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.later.dtype

    def contiguous(self) -> Tensor:
        """Reads it."""
        return self.later.read().contiguous()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: Any = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The fp32 weights and the buffers of a checkpoint, as ``module.load_state_dict`` takes them.

    Args:
        checkpoint_dir: the folder that it was saved in.
        tag: of the checkpoint; None: the one that the file ``latest`` names.
        exclude_frozen_parameters: leaves out what was not trained.
        lazy_mode: weights are read one by one, each by its ``contiguous()``.

    Returns:
        Tensors on the CPU by name; tied ones are one tensor.

    Raises:
        ValueError: there is no tag and no file ``latest``.
        FileNotFoundError: there is no checkpoint of that tag.
        CheckpointError: it is not complete, or damaged.
    """
    weights, also = _weights(_folder(checkpoint_dir, tag), exclude_frozen_parameters)
    wide = {name: LazyTensor(later.cast(torch.float32)) for name, later in weights.items()}
    if lazy_mode:
        return wide | {name: wide[home] for name, home in also.items()}
    read = {name: lazy.contiguous() for name, lazy in wide.items()}
    return read | {name: read[home] for name, home in also.items()}


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Any, tag: Any = None) -> nn.Module:
    """Moves the model to the CPU and gives it the fp32 weights of a checkpoint; returns the model."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """:func:`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights of a checkpoint as files that ``torch.load`` or safetensors reads, one in memory at a time.

    Args:
        checkpoint_dir: the folder that it was saved in.
        output_dir: gets ``pytorch_model.bin`` or ``model.safetensors``, or several of them and an index.
        dtype: of floating parameters and buffers.
        max_shard_size: bytes of a file, or such as ``"5GB"``; None: one file.
        safe_serialization: writes safetensors.
        tag: of the checkpoint; None: the one that the file ``latest`` names.
        exclude_frozen_parameters: leaves out what was not trained.

    Raises:
        As :func:`get_fp32_state_dict_from_zero_checkpoint`.
    """
    wanted = _dtype(dtype)
    weights, also = _weights(_folder(checkpoint_dir, tag), exclude_frozen_parameters)
    weights = {name: later.cast(wanted) for name, later in weights.items()}
    limit = _bytes(max_shard_size) if max_shard_size is not None else None
    files = list(_split(weights, limit))
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    homes: dict[str, str] = {}
    for number, names in enumerate(files):
        part = f"-{number + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        tensors = {name: weights[name].read().contiguous() for name in names}
        # Files of torch.save keep ties; safetensors does not, so a tied weight is there once.
        ties = {} if safe_serialization else {n: tensors[home] for n, home in also.items() if home in tensors}
        _write(tensors | ties, folder / f"{stem}{part}{suffix}", safe_serialization)
        homes |= dict.fromkeys((*names, *ties), f"{stem}{part}{suffix}")
    if len(files) > 1:
        total = sum(later.nbytes for later in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        with written_whole(folder / f"{stem}{suffix}.index.json") as draft:
            draft.write_text(text)


def get_optim_files(checkpoint_dir: Any) -> list[str]:
    """The files of DeepSpeed's with the optimizer's state in a checkpoint's folder, by rank.

    Of a checkpoint of ours, one made for the occasion that has the ZeRO stage.
    """
    folder = Path(checkpoint_dir)
    if (folder / INDEX).is_file():
        return [str(_stand_in(folder.resolve()) / "zero_pp_rank_0_mp_rank_00_optim_states.pt")]
    found = sorted(folder.glob("*_optim_states.pt"), key=lambda path: _numbers(path.name))
    if not found:
        raise FileNotFoundError(f"{folder} has no files *_optim_states.pt.")
    return [str(path) for path in found]


def get_model_state_file(checkpoint_dir: Any, zero_stage: int) -> str:
    """The file of DeepSpeed's with the model's state and the ``client_state`` in a checkpoint's folder.

    Of a checkpoint of ours, one made for the occasion that has the ``client_state``.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    if (folder / INDEX).is_file():
        return str(_stand_in(folder.resolve()) / "mp_rank_00_model_states.pt")
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    if not (folder / name).is_file():
        raise FileNotFoundError(f"can't find model states file at '{folder / name}'")
    return str(folder / name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _stand_in(folder: Path) -> Path:
    """Files in DeepSpeed's form with what a checkpoint of ours keeps beside its tensors, until this process ends."""
    from shardfold.compat.deepspeed.saving import client_state_of

    client, own = client_state_of(folder)
    made = tempfile.TemporaryDirectory(prefix="shardfold-states-")
    _KEPT.append(made)
    target = Path(made.name)
    stage = own.get("zero_stage", 0)
    torch.save(client | own | {"module": None}, target / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {"zero_stage": stage}}, target / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return target


# -- what there is to read


def _folder(checkpoint_dir: Any, tag: Any) -> Path:
    root = Path(checkpoint_dir)
    if tag is None:
        if not (root / LATEST).is_file():
            raise ValueError(f"Unable to find 'latest' file at {root / LATEST}: give the tag of a checkpoint.")
        tag = read_name(root / LATEST)
        if tag is None:
            raise CheckpointError(f"{root / LATEST} is damaged: it does not name a folder beside it.")
    folder = root / str(tag)
    if not folder.is_dir():
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder


def _weights(folder: Path, exclude_frozen: bool) -> tuple[dict[str, Later], dict[str, str]]:
    """Weights and buffers by name, and further names with the first one of each."""
    if not (folder / INDEX).is_file():
        return _foreign_weights(folder, exclude_frozen)
    checkpoint = Checkpoint(folder)
    stored = weights_of(checkpoint)
    left_out = {name for name, p in checkpoint.parameters.items() if p.digest is not None}
    if exclude_frozen:
        left_out |= {name for name, p in checkpoint.parameters.items() if not p.trainable}
    elif left_out:
        raise CheckpointError(
            f"{folder} was saved with exclude_frozen_parameters=True: read it with exclude_frozen_parameters=True."
        )
    kept = {name: later for name, later in stored.tensors.items() if name not in left_out}
    return kept, {name: home for name, home in stored.also.items() if home in kept}


def _foreign_weights(folder: Path, exclude_frozen: bool) -> tuple[dict[str, Later], dict[str, str]]:
    theirs = DeepSpeedFolder.open(folder)
    found: dict[str, Later] = {}
    for name in theirs.names:
        if name in theirs.buffers:
            buffer = theirs.buffers[name]
            found[name] = Later(tuple(buffer.shape), buffer.dtype, lambda b=buffer: b)
        elif name in theirs.frozen:
            if not exclude_frozen:
                found[name] = Later(*theirs.frozen[name])
        else:
            found[name] = Later(theirs.places[name].shape, torch.float32, lambda n=name: theirs.read(n))
    return found, {other: name for name, others in theirs.also.items() if name in found for other in others}


# -- files


def _split(weights: Mapping[str, Later], limit: int | None) -> Iterator[list[str]]:
    """Names of what goes into one file each; a tensor is in one file."""
    names: list[str] = []
    size = 0
    for name, later in weights.items():
        if limit is not None and names and size + later.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += later.nbytes
    yield names


def _write(tensors: dict[str, Tensor], path: Path, safe: bool) -> None:
    """All ranks may write the same file at once."""
    with written_whole(path) as draft:
        if safe:
            from safetensors.torch import save_file

            save_file(tensors, draft, metadata={"format": "pt"})
        else:
            torch.save(tensors, draft)


def _bytes(size: int | str) -> int:
    """
    Raises:
        WrongArgument: it is no size.
    """
    number = size if isinstance(size, int) else parse_bytes(size)
    if number is None:
        raise WrongArgument(f"max_shard_size={size!r}: it is a number of bytes, or such as '5GB' or '500MB'.")
    return number


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    """
    Raises:
        WrongArgument: it is none of fp32, fp16 and bf16.
    """
    names = {
        "float32": "float32",
        "fp32": "float32",
        "float16": "float16",
        "fp16": "float16",
        "half": "float16",
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
    }
    name = names.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise WrongArgument(f"dtype={dtype!r}: it is float32, float16 or bfloat16.")
    return getattr(torch, name)


def _numbers(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The script ``zero_to_fp32.py`` that lies beside checkpoints."""
    parser = argparse.ArgumentParser(description="Writes the fp32 weights of a checkpoint as files of PyTorch.")
    parser.add_argument("checkpoint_dir", help="the folder that the checkpoint was saved in")
    parser.add_argument("output_dir", help="the folder for the files")
    parser.add_argument("--max_shard_size", default="5GB", help="the largest file, such as 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="of the checkpoint; without it, the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    given = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        given.max_shard_size,
        given.safe_serialization,
        given.tag,
        given.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
