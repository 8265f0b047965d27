"""WHICH frozen parameters rest as codes (see ``Layout.base``).

By default those are the matrices of linear layers (also transformers' ``Conv1D``) and of experts that one parameter
stacks, of three dimensions. These keep their dtype:

- the head: what a model calls its output embeddings; of a model that says nothing, the last linear layer, where it is
  in no list of modules;
- what an embedding uses too;
- adapters, by the names that layers of peft say;
- what has fewer elements than a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from shardfold.errors import ModelError, did_you_mean
from shardfold.plan.formats import FORMATS
from shardfold.plan.quantized import Quantized
from shardfold.plan.rules import matches, text_of

__all__ = ["coded_parameters"]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
ADAPTERS = ("adapter_layer_names", "other_param_names")
"""Where layers of peft say which of their attributes are adapters."""


def coded_parameters(model: nn.Module, base: Quantized | None, trained: Collection[int]) -> frozenset[int]:
    """Parameters that rest as codes, by ``id``; ``trained``: those that do not.

    Raises:
        ModelError: a pattern matches nothing, or nothing is left to be coded.
    """
    if base is None:
        return frozenset()
    for pattern in (*base.included, *base.left_out):
        if not any(matches(pattern, path, module) for path, module in model.named_modules()):
            known = [path for path, _ in model.named_modules() if path]
            raise ModelError(
                f"Quantized(...) names {text_of(pattern)!r}, which matches no module."
                f"{did_you_mean(text_of(pattern), known[:200])}"
            )
    kept = {id(p) for module in _named(model, base.left_out) for p in module.parameters()}
    kept |= {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    if not base.modules:
        kept |= {id(p) for module in _heads(model) for p in module.parameters()}
        kept |= {id(p) for module in model.modules() for p in _adapters(module)}
    wanted = _matrices(model) if not base.modules else _all_matrices(_named(model, base.included))
    least = min(FORMATS[base.format].block, 256)
    found = {id(p): p for p in wanted if id(p) not in kept}
    coded = {
        key
        for key, p in found.items()
        if key not in trained and p.is_floating_point() and p.dim() > 1 and p.numel() >= least
    }
    if not coded and not any(key in trained for key in found):
        raise ModelError(
            "the layout's base= names a format, but the model has no frozen matrix that it is for: freeze the base "
            "with requires_grad_(False), or name modules with Quantized(format=..., modules=('*',))."
        )
    return frozenset(coded)


def _named(model: nn.Module, patterns: tuple[str | type, ...]) -> list[nn.Module]:
    return [m for path, m in model.named_modules() if any(matches(pattern, path, m) for pattern in patterns)]


def _all_matrices(modules: list[nn.Module]) -> Iterator[nn.Parameter]:
    return (p for module in modules for p in module.parameters() if p.dim() > 1)


def _matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights of linear layers, and parameters that stack those of experts."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and ((_is_linear(module) and name == "weight") or _is_stack(module, p)):
                yield p


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_stack(module: nn.Module, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 3 and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and not _is_linear(module)


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    told = False
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        head = ask() if callable(ask) else None
        if isinstance(head, nn.Module):
            told = True
            yield head
    linear = [(path, module) for path, module in model.named_modules() if _is_linear(module)]
    if not told and linear:
        path, module = linear[-1]
        names = path.split(".")
        above = (model.get_submodule(".".join(names[:count])) for count in range(len(names)))
        if not any(isinstance(outer, LISTS) for outer in above):
            yield module


def _adapters(module: nn.Module) -> Iterator[nn.Parameter]:
    names = [name for attribute in ADAPTERS for name in getattr(module, attribute, ()) or ()]
    for name in names:
        part = getattr(module, name, None)
        if isinstance(part, nn.Module):
            yield from part.parameters()
        elif isinstance(part, nn.Parameter):
            yield part
