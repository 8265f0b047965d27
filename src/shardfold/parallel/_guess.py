"""A plan of a model that brings none: what a trace of it finds, on inputs that are guessed where none are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.parallel.infer import CuttableLayers, infer
from shardfold.parallel.model_trace import leaf_of

__all__ = ["guessed"]

ROWS, TIME = 5, 3
MOST = 3
"""Tensors that a forward is given, of which kinds are guessed."""


def guessed(model: nn.Module, ranks: int) -> tuple[CuttableLayers, str]:
    """What can be cut of a model, and why it was not traced as a whole, or empty.

    Where the whole does not run on any inputs that can be guessed, modules inside it are traced by themselves; what
    they are given counts as differentiable then, so less is found.
    """
    return _of(model, ranks, inner=False)


def _of(module: nn.Module, ranks: int, *, inner: bool) -> tuple[CuttableLayers, str]:
    why = ""
    if leaf_of(module) is not None:
        return CuttableLayers(), ""
    for args, kwargs in _inputs(module):
        try:
            return infer(module, args, kwargs, ranks, inner=inner), ""
        except Exception as error:  # the module's own, on inputs that it is not for
            why = why or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    found = CuttableLayers()
    for name, child in module.named_children():
        if any(leaf_of(each) is not None for each in child.modules()):
            of_child, _ = _of(child, ranks, inner=True)
            for whole, part in zip((found.words, found.followed, found.left), _parts(of_child), strict=True):
                whole.update({f"{name}.{path}" if path else name: value for path, value in part.items()})
    return found, why or "its inputs cannot be guessed"


def _parts(found: CuttableLayers) -> tuple[Mapping[str, Any], ...]:
    return found.words, found.followed, found.left


def _inputs(module: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that the module may be made for, likely ones first."""
    if type(module).forward in (nn.Module.forward, nn.ModuleList.forward):
        return
    name = getattr(module, "main_input_name", None)
    config = getattr(module, "config", None)
    if name == "input_ids" and isinstance(getattr(module, "dummy_inputs", None), dict):
        yield (), {key: torch.empty((ROWS, TIME), dtype=torch.long, device="meta") for key in module.dummy_inputs}
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and isinstance(size, int):
        yield (), {name: torch.empty(ROWS, getattr(config, "num_channels", 3), size, size, device="meta")}
    try:
        parameters = signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return
    any_number = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in any_number]
    if not needed and any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        count = 1
    else:
        count = len(needed)
    if count <= MOST and not any(p.kind is Parameter.KEYWORD_ONLY for p in needed):
        for kinds in product(_kinds(module), repeat=count):
            yield tuple(kinds), {}


def _kinds(module: nn.Module) -> list[Tensor]:
    """Numbers of words, and activations as wide as the first linear layer."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    words = torch.empty((ROWS, TIME), dtype=torch.long, device="meta")
    leaves = [leaf for each in module.modules() if (leaf := leaf_of(each)) is not None]
    widths = list(dict.fromkeys(leaf.inputs for leaf in leaves if leaf.inputs))[:1]
    wide = [
        torch.empty((*shape, width), dtype=dtype, device="meta")
        for width in widths
        for shape in ((ROWS, TIME), (ROWS,))
    ]
    return [words, *wide] if leaves and not leaves[0].inputs else [*wide, words]
