"""The pieces of a model, between which it may be cut into stages.

A piece is a module that is called as a whole: a child of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` that is not
the one such list in it, or a module beside these lists that has parameters (an embedding, a norm, a head). What is
around the pieces, the code of the modules that contain them, is run by every stage, so masks and positions are nowhere
sent. A model with a method ``pipeline_pieces()`` says by itself which modules they are: it gives their paths, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from shardfold.errors import ConfigError, ModelError, did_you_mean

__all__ = ["PipelinePiece", "cost_of", "cut_by_cost", "cut_by_names", "find_pieces"]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
SAID = "pipeline_pieces"


class PipelinePiece(NamedTuple):
    """One piece: its path in the model, which is the first of several, and the module."""

    path: str
    module: nn.Module


def find_pieces(model: nn.Module) -> list[PipelinePiece]:
    """The pieces in definition order; a module that is registered twice is one.

    Raises:
        ModelError: a parameter belongs to a module around the pieces, so no stage could be the one that has it.
    """
    found: dict[int, PipelinePiece] = {}
    for piece in _said(model) if hasattr(model, SAID) else _below(model, ""):
        found.setdefault(id(piece.module), piece)
    inside = {id(p) for piece in found.values() for p in piece.module.parameters()}
    if loose := [name for name, p in model.named_parameters() if id(p) not in inside]:
        raise ModelError(
            f"parallel= has an axis of pipeline, but {', '.join(map(repr, loose[:3]))}{' ...' * (len(loose) > 3)} "
            f"belong{'s' * (len(loose) == 1)} to a module whose parts go to several stages: put it into a module of "
            "its own, which is called."
        )
    return list(found.values())


def _said(model: nn.Module) -> list[PipelinePiece]:
    """
    Raises:
        ModelError: the model names what is no module of it.
    """
    paths: Any = getattr(model, SAID)()
    try:
        return [PipelinePiece(path, model.get_submodule(path)) for path in paths]
    except (AttributeError, TypeError) as error:
        raise ModelError(f"{type(model).__name__}.{SAID}() gives paths of modules of the model: {error}.") from error


def _below(module: nn.Module, path: str) -> Iterator[PipelinePiece]:
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        inner = isinstance(child, LISTS) and len(child) and kinds[type(child)] == 1
        if isinstance(module, LISTS) and not inner:
            yield PipelinePiece(where, child)
        elif not _is_single(child):
            yield from _below(child, where)
        elif any(True for _ in child.parameters()) or any(True for _ in child.buffers() if _keeps_state(child)):
            yield PipelinePiece(where, child)


def _is_single(module: nn.Module) -> bool:
    """Whether its lists have nothing with parameters, so that it is one piece; those in which
    ``torch.nn.utils.parametrize`` keeps what it makes a parameter of are the module's own."""
    lists = [
        part
        for name, part in module.named_modules()
        if isinstance(part, LISTS) and "parametrizations" not in name.split(".")
    ]
    return not any(True for part in lists for _ in part.parameters())


def _keeps_state(module: nn.Module) -> bool:
    return any(set(part._buffers) - part._non_persistent_buffers_set for part in module.modules())


def cost_of(piece: PipelinePiece) -> float:
    """What a piece is taken to cost: the elements of its parameters, without tables that are only looked up."""
    tables = {id(p) for m in piece.module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return float(sum(p.numel() for p in piece.module.parameters() if id(p) not in tables))


def cut_by_cost(costs: Sequence[float], stages: int, ranks: int = 0) -> list[int]:
    """The stage of each piece, in order, such that the most expensive stage is as cheap as it can be, and every stage
    has a piece. ``ranks``: over which the stages are; 0: each is on one of its own.

    Raises:
        ConfigError: there are fewer pieces than stages.
    """
    count = len(costs)
    if count < stages:
        each = stages // (ranks or stages)
        most = f"{{'pipeline': {count // each}}}" + f" with {each} stages on each rank" * (each > 1)
        fewer = f"{count // ranks} stages" if ranks and count >= 2 * ranks else "one stage"
        most = f"at most {most}" if count >= 2 * each or each == 1 else f"an order with {fewer} on each rank"
        raise ConfigError(
            f"parallel= has {stages} stages, but the model has {count} piece{'s' * (count != 1)} to give them "
            f"(children of its lists, and modules beside them): give {most}."
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[list[float]] = [[sums[i] for i in range(count + 1)]]  # by stages - 1 and pieces: the dearest of them
    first: list[list[int]] = [[0] * (count + 1)]
    for number in range(1, stages):
        row, at = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(number + 1, count + 1):
            for begin in range(number, end):
                dearest = max(best[-1][begin], sums[end] - sums[begin])
                if dearest < row[end]:
                    row[end], at[end] = dearest, begin
        best.append(row)
        first.append(at)
    found, end = [0] * count, count
    for number in range(stages - 1, 0, -1):
        begin = first[number][end]
        found[begin:end] = [number] * (end - begin)
        end = begin
    return found


def cut_by_names(pieces: Sequence[PipelinePiece], names: Sequence[str], stages: int) -> list[int]:
    """The stage of each piece, where ``names`` has the first piece of each stage but the first.

    Raises:
        ConfigError: there is no such piece, or these are not in order, or not as many as it takes.
    """
    paths = [piece.path for piece in pieces]
    if len(names) != stages - 1:
        raise ConfigError(
            f"Parallel(stages=...) has {len(names)} name{'s' * (len(names) != 1)} for {stages} stages: give the first "
            f"piece of each stage but the first, {stages - 1} in all."
        )
    for name in names:
        if name not in paths:
            raise ConfigError(
                f"Parallel(stages=...) names {name!r}, which is not a piece of the model.{did_you_mean(name, paths)}"
            )
    begins = [paths.index(name) for name in names]
    if begins != sorted(set(begins)) or begins[:1] == [0]:
        raise ConfigError(
            f"Parallel(stages={list(names)!r}): every stage needs a piece of its own, in the model's order: "
            f"{', '.join(paths)}."
        )
    return [sum(begin <= i for begin in begins) for i in range(len(pieces))]
