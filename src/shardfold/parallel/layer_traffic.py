"""What layers that are cut along an axis of tensor send, by layer; and what other ways to divide them would send."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardfold.parallel.model_trace import leaf_of
from shardfold.parallel.split import Forward, cut_forward, is_cut, is_partial
from shardfold.plan.cost import ring_bytes

__all__ = ["LayerCollective", "collectives", "described", "other_products"]

SENDING = ("row", "experts", "vocabulary", "gathered", "column", "kv")
"""Words of modules that send for each token where activations are whole."""


@dataclass(frozen=True)
class LayerCollective:
    """What one cut module asks of the ranks.

    Attributes:
        path: of the module.
        word: how it is cut.
        section: ``"forward"`` or ``"backward"``.
        verb: of the collective.
        elements: of its whole tensor, for each token: each vector that the module is given.
    """

    path: str
    word: str
    section: str
    verb: str
    elements: int


def collectives(model: nn.Module) -> list[LayerCollective]:
    """In the order of modules. Columns of one parent are taken to be given one tensor, whose gradients are summed
    once, with the first of them; what is ``partial`` sends its parameters' gradients once a pass, and no tokens."""
    found: list[LayerCollective] = []
    summed: set[tuple[int, int]] = set()
    for path, module, forward in _cut(model):
        ends = _between(model, module, forward) if forward.stream is not None else None
        if ends is None:
            ends = _ends(module, forward, summed)
        found += [LayerCollective(path, _word(forward), section, verb, elements) for section, verb, elements in ends]
    return found


def _ends(module: nn.Module, forward: Forward, summed: set[tuple[int, int]]) -> list[tuple[str, str, int]]:
    """Section, verb and elements of what a module sends where activations are the same on all ranks."""
    if forward.word not in SENDING:
        return []
    inputs, outputs = _widths(module, forward)
    ends: list[tuple[str, str, int]] = []
    if forward.word in ("row", "experts", "vocabulary"):
        ends.append(("forward", "ALL_REDUCE", outputs))
    if forward.word == "gathered":
        ends.append(("forward", "ALL_GATHER", sum(forward.sizes)))
    if forward.word in ("column", "kv", "gathered", "experts") and inputs:
        key = id(forward.shared), inputs
        first = key not in summed
        if forward.stream is not None and forward.word != "gathered":
            ends += [("forward", "ALL_GATHER", inputs), ("backward", "REDUCE_SCATTER", inputs)] * first
        elif first and forward.stream is None:  # else with what is joined
            ends.append(("backward", "ALL_REDUCE", inputs))
        if forward.word != "experts":
            summed.add(key)
    return ends


def _between(model: nn.Module, module: nn.Module, forward: Forward) -> list[tuple[str, str, int]] | None:
    """The same where they are divided along their sequence; None: it sends what it does otherwise."""
    inside = [(part, each) for _, part, each in _cut(module) if each.word in ("column", "kv", "row")]
    if forward.word in ("column", "kv"):
        return [] if forward.collected else None
    if forward.word == "row" or (forward.word == "vocabulary" and forward.begins):
        outputs = _widths(module, forward)[1]
        return [("forward", "REDUCE_SCATTER", outputs), ("backward", "ALL_GATHER", outputs)]
    if forward.word == "collected":
        inputs = next((_widths(part, each)[0] for part, each in inside if each.word != "row"), 0)
        return [("forward", "ALL_GATHER", inputs), ("backward", "REDUCE_SCATTER", inputs)]
    if forward.word == "scattered":
        outputs = next((_widths(part, each)[1] for part, each in inside if each.word == "row"), 0)
        return [("backward", "ALL_GATHER", outputs)]
    if forward.word == "joined":
        width = next(module.parameters(recurse=False)).numel()
        summed = any(each.word == "gathered" for _, _, each in _cut(model))
        return [("forward", "ALL_GATHER", width)] + [("backward", "REDUCE_SCATTER", width)] * summed
    return None


def _cut(model: nn.Module) -> Iterator[tuple[str, nn.Module, Forward]]:
    for path, module in model.named_modules():
        forward = cut_forward(module)
        if forward is not None:
            yield path, module, forward


def _word(forward: Forward) -> str:
    return "vocabulary" if forward.word == "gathered" and len(set(forward.sizes)) > 1 else forward.word


def _widths(module: Any, forward: Forward) -> tuple[int, int]:
    """Of what it is given, and of what it gives on this rank; of an embedding no inputs."""
    if forward.word == "experts":
        return module.down_proj.shape[1], module.down_proj.shape[1]
    first, second = module.weight.shape
    if isinstance(module, nn.Embedding) or forward.word == "vocabulary":
        return 0, second
    return (first, second) if hasattr(module, "nf") else (second, first)


def described(model: nn.Module, itemsize: int) -> list[str]:
    """Lines: modules that are cut, what they send for each token, and those that are whole. Numbers in paths are left
    out where modules are alike."""
    rows: dict[tuple[str, ...], int] = {}
    sent: dict[str, list[LayerCollective]] = {}
    for each in collectives(model):
        sent.setdefault(each.path, []).append(each)
    ranks, axis = 1, ""
    for path, module, forward in _cut(model):
        ranks, axis = forward.group.parts, forward.group.axis
        shapes = " ".join(f"{name}{list(p.shape)}" for name, p in module._parameters.items() if p is not None)
        text = ", ".join(
            f"{c.section} {c.verb} {c.elements:,} elements "
            f"({ring_bytes(c.verb, c.elements * itemsize, ranks):,.0f} bytes sent)"
            for c in sent.get(path, [])
        )
        key = re.sub(r"\d+", "*", path), _word(forward), shapes, text or "nothing of its own"
        rows[key] = rows.get(key, 0) + 1
    if not rows:
        return []
    lines = [f"cut along {axis!r} over {ranks} ranks; what is sent is for each token:"]
    for (path, word, shapes, text), count in rows.items():
        lines.append(f"  {count:>3} x {path:<44}{word:<12}{shapes}; {text}")
    lines += _totals(collectives(model), ranks, itemsize)
    whole: dict[tuple[str, str], int] = {}
    for path, module in model.named_modules():
        if is_partial(module) and not is_cut(module):
            count = sum(p.numel() for p in module._parameters.values() if p is not None and p.requires_grad)
            key = re.sub(r"\d+", "*", path), f"works on parts, backward ALL_REDUCE of {count:,} elements for each pass"
            whole[key] = whole.get(key, 0) + 1
        elif not is_cut(module) and leaf_of(module) is not None:
            key = re.sub(r"\d+", "*", path), vars(module).get("_shardfold_left", "the plan does not name it")
            whole[key] = whole.get(key, 0) + 1
    lines += [f"  {count:>3} x {path:<44}whole: {why}" for (path, why), count in whole.items()]
    width = max((c.elements for c in collectives(model) if c.word == "row"), default=0)
    if width:
        lines.append(_others(width, itemsize))
    return lines


def _totals(sent: list[LayerCollective], ranks: int, itemsize: int) -> list[str]:
    lines: list[str] = []
    for section in ("forward", "backward"):
        mine = [each for each in sent if each.section == section]
        num_bytes = sum(ring_bytes(each.verb, each.elements * itemsize, ranks) for each in mine)
        lines.append(f"  in all: {section} {len(mine)} calls, {num_bytes:,.0f} bytes sent")
    return lines


def _others(width: int, itemsize: int) -> str:
    """Why layers are divided along one dimension."""
    tokens, cube = 32768, 8
    one = other_products(tokens, width, cube)
    names = ", ".join(f"{name} {elements * itemsize / 1e6:,.0f} MB" for name, elements in one.items())
    return (
        f"  2D, 2.5D and 3D products are not built: with {cube} ranks and {tokens:,} tokens a block of width {width:,} "
        f"sends in forward {names}, but they divide each vector too, so norms, residuals and losses could not stay the "
        "model's own."
    )


def other_products(tokens: int, width: int, ranks: int) -> dict[str, float]:
    """Elements that a rank sends or gets in the forward of one block: matrices of width to 3, 1 and 4 times it and back
    from 4 times it.

    1D (Megatron-LM, arXiv 1909.08053): two all-reduces. 2.5D (Tesseract, 2105.14500) on 2 x 2 x ranks/4: of each
    product, blocks of activations and weights are broadcast in their rows and columns; with a depth of one it is 2D
    (Optimus, 2104.05343). 3D (2105.14450), where ranks are a cube: activations and weights are gathered, and outputs
    are summed and scattered, along one edge each.
    """
    given, made, weights = 7 * tokens * width, 9 * tokens * width, 12 * width**2
    found = {"1D": 2 * ring_bytes("ALL_REDUCE", tokens * width, ranks)}
    if ranks >= 4 and ranks % 4 == 0:
        side, depth = 2, ranks // 4
        name = "2D" if depth == 1 else "2.5D"
        found[name] = (given / (side * depth) + weights / side) * (side - 1) / side
    side = round(ranks ** (1 / 3))
    if side**3 == ranks and side > 1:
        found["3D"] = (given + made + weights) / side**2 * (side - 1) / side
    return found
