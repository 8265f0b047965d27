"""A model with the weights of a checkpoint, to be used: no optimizer, no process group, no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shardfold.checkpoint.folders import check_place
from shardfold.checkpoint.names import Rename, renamer
from shardfold.checkpoint.stored import Later, Stored, open_weights
from shardfold.comm.mesh import parse_device
from shardfold.errors import CheckpointError, ConfigError
from shardfold.plan.checks import check_flags, described, known_arguments
from shardfold.sharding.materialize import meta_init
from shardfold.sharding.segment import check_dtype
from shardfold.sharding.stand_ins import takes_extra
from shardfold.sharding.whole_state import every_buffer, extra_states

__all__ = ["load_model"]


@known_arguments
def load_model(
    path: str | Path,
    model: nn.Module | Callable[[], nn.Module],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> nn.Module:
    """Gives a model the weights of a checkpoint, or of safetensors files, tensor by tensor.

    Parameters become new objects, as by ``load_state_dict(assign=True)``, one after the other: beside the model one
    tensor is in memory, and the values that a factory would have given them never are.

    Args:
        path: a checkpoint, a folder of checkpoints (the latest is taken), a safetensors file or a folder of them.
        model: a module, or what makes one; a factory is called under ``sf.meta_init()``, so that its parameters take no
            memory.
        dtype: of floating parameters and buffers, as by ``module.to(dtype)``; None: the module's own.
        device: None: where the module is; the CPU for a factory's.
        strict: False leaves alone what the checkpoint does not have (it must have values) and what the model does not.
        rename: from the checkpoint's names to the model's: regular expressions and what they are replaced with, in
            order, or a function.

    Returns:
        The module, in ``eval()`` mode.

    Raises:
        ConfigError: an argument is of a wrong type.
        CheckpointError: names or shapes do not fit, all are listed and nothing was changed; or a file is damaged.

    Examples:
        >>> saved = engine.save(f"{folder}/step-0", wait=True)
        >>> plain = sf.load_model(folder, lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
        >>> tuple(plain(x).shape)
        (4, 8)
    """
    check_place("load_model()", path, "a checkpoint or of safetensors files")
    check_dtype("load_model()", dtype)
    check_flags("load_model()", strict=strict)
    device = parse_device("device", device) if device is not None else None
    if not isinstance(model, nn.Module) and not callable(model):
        raise ConfigError(f"load_model(): the model is {described(model)}: give a module, or what makes one.")
    if not isinstance(model, nn.Module):
        with meta_init():
            model = model()
    stored = open_weights(path).renamed(renamer(rename, "load_model"), str(path))
    tied: dict[int, list[str]] = {}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **every_buffer(model)}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    homes = _homes(model, tensors, tied.values(), stored, strict, path)
    for names in tied.values():
        old = tensors[names[0]]
        for name in names:
            del tensors[name]
        if names[0] in homes:
            later = stored.tensors[homes[names[0]]].cast(dtype if dtype is not None else old.dtype)
            _assign(model, names, old, later, device)
    for name, part in extra_states(model).items():
        if takes_extra(part) and name in (stored.extra or {}):
            part.set_extra_state(stored.extra[name])  # pyright: ignore[reportOptionalSubscript]
    if dtype is not None or device is not None:
        model.to(device=device, dtype=dtype)  # what is not of the checkpoint
    return model.eval()


def _homes(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    tied: Iterable[list[str]],
    stored: Stored,
    strict: bool,
    path: object,
) -> dict[str, str]:
    """By name in the model, what it is called where it is stored; or CheckpointError if names or shapes do not fit."""
    homes: dict[str, str] = {}
    missing: list[str] = []
    for names in tied:
        home = next((stored.also.get(n, n) for n in names if n in stored.tensors or n in stored.also), None)
        if home is not None:
            homes |= dict.fromkeys(names, home)
        elif strict or tensors[names[0]].is_meta:
            missing.append(names[0])
    missing += [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in tensors]
    unexpected = sorted(set(stored.tensors) - set(homes.values()) - set(tensors)) if strict else []
    if strict and stored.extra is not None:
        parts = extra_states(model)
        missing += [name for name, part in parts.items() if takes_extra(part) and name not in stored.extra]
        unexpected += sorted(stored.extra.keys() - parts.keys())
    wrong = [
        f"{name} is {_shape(stored.tensors[home].shape)} there and {_shape(tensors[name].shape)} in the model"
        for name, home in homes.items()
        if stored.tensors[home].shape != tuple(tensors[name].shape)
    ]
    said = [
        f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if said + wrong:
        raise CheckpointError(f"{path} does not fit the model, nothing was changed: {'; '.join(said + wrong)}.")
    return homes


def _assign(model: nn.Module, names: list[str], old: Tensor, later: Later, device: str | torch.device | None) -> None:
    """Puts a stored tensor in the place of a parameter or buffer, wherever the model has it."""
    where = device if device is not None else "cpu" if old.is_meta else old.device
    value = later.read().to(where)
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, value)


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
