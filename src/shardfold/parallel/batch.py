"""A batch of whole sequences, and one rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.errors import ConfigError, did_you_mean
from shardfold.parallel.cut import CutBatch
from shardfold.plan.checks import described

__all__ = ["IGNORED", "INPUTS", "Sharded", "read_batch", "read_documents"]

IGNORED = -100
"""The label of a token that does not count, as in PyTorch."""

INPUTS = ("input_ids", "tokens", "inputs_embeds")
LABELS = ("shift_labels", "targets", "labels")
"""Which of them a loss is of, the first that is there."""
POSITIONS = ("position_ids", "positions")
DOCUMENTS = ("cu_seqlens", "cu_seq_lens_q", "document_ids", "attention_mask")
LEFT_OUT = ("cu_seq_lens_k", "max_length_q", "max_length_k")
"""What other kernels are told of documents."""
CUT = (*INPUTS, *LABELS, *POSITIONS, "token_type_ids")


@dataclass(frozen=True, eq=False)
class Sharded:
    """One batch, as far as attention and losses need to know.

    Attributes:
        cut: of its sequences.
        valid: how many labels of this rank count; None: there are none.
        checksum: of what all ranks along the axis have alike.
    """

    cut: CutBatch
    valid: float | None
    checksum: int


def read_batch(
    batch: Mapping[str, Any],
    ranks: int,
    rank: int,
    order: str,
    shift: bool,
    also: Sequence[str],
    whole: Sequence[str],
    *,
    padding: int | None = None,
) -> tuple[Sharded, dict[str, Any]]:
    """What there is to know, and the part of ``rank``; see :func:`shardfold.sequence_shard`. ``padding``: the token
    behind whose number positions are counted, and which itself has that number for one.

    Raises:
        ConfigError: a tensor is unknown or of another length, or there are fewer tokens than ranks.
    """
    source = _check(batch, also, whole)
    rows, length = source.shape[:2]
    lengthwise = {name: value for name, value in batch.items() if name in (*CUT, *also) and isinstance(value, Tensor)}
    for name, value in lengthwise.items():
        if value.dim() < 2 or value.shape[1] != length:
            raise ConfigError(
                f"sequence_shard(): {name!r} has the shape {tuple(value.shape)}, but the batch has {rows} rows of "
                f"{length} tokens: it is (batch, tokens, ...)."
            )
    documents = read_documents(batch, rows, length)
    cut = CutBatch.of(length, ranks, order, documents, rows)
    name = POSITIONS["tokens" in batch]
    if name not in lengthwise:
        restart = any(key in batch for key in DOCUMENTS if key != "attention_mask")
        lengthwise[name] = _positions(cut if restart else None, rows, length, source.device)
        if padding is not None:
            words = source.dim() == 2 and not source.is_floating_point()
            lengthwise[name] = _behind(padding, lengthwise[name], source if words and not restart else None)
    if shift and "labels" in lengthwise and "shift_labels" not in lengthwise:
        lengthwise["shift_labels"] = F.pad(lengthwise["labels"][:, 1:], (0, 1), value=IGNORED)
    kept = {key: value for key, value in batch.items() if key not in (*DOCUMENTS, *LEFT_OUT)}
    given = {**kept, **{key: _cut(value, cut, rank) for key, value in lengthwise.items()}}
    labels = next((given[key] for key in LABELS if key in given), None)
    valid = None if labels is None else float((labels != IGNORED).sum())
    checksum = _checksum(source, cut)
    return Sharded(cut, valid, checksum), given


def _check(batch: Any, also: Sequence[str], whole: Sequence[str]) -> Tensor:
    """The inputs.

    Raises:
        ConfigError: it is no batch of known tensors.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(f"sequence_shard() gets {described(batch)}: it takes tensors by name, as {{'input_ids': x}}.")
    for argument, names in (("also", also), ("whole", whole)):
        if isinstance(names, str):
            raise ConfigError(f"sequence_shard({argument}={names!r}): it is a list of names, {argument}=[{names!r}].")
        for name in names:
            if name not in batch:
                raise ConfigError(
                    f"sequence_shard({argument}=...): the batch has no {name!r}.{did_you_mean(name, map(str, batch))}"
                )
    known = (*CUT, *DOCUMENTS, *LEFT_OUT, *also, *whole)
    for name, value in batch.items():
        if isinstance(value, Tensor) and name not in known:
            raise ConfigError(
                f"sequence_shard(): whether {name!r} lies along the sequence is not known: name it in also= (it is "
                f"cut) or in whole= (it stays).{did_you_mean(str(name), known)}"
            )
    source = next((batch[name] for name in INPUTS if isinstance(batch.get(name), Tensor)), None)
    if source is None or source.dim() < 2:
        raise ConfigError(
            f"sequence_shard(): the batch has {', '.join(map(str, batch)) or 'nothing'}, but no (batch, tokens, ...) "
            f"under one of {', '.join(INPUTS)}."
        )
    return source


def read_documents(batch: Mapping[str, Any], rows: int, length: int) -> list[tuple[int, ...]] | None:
    """Where documents begin and end, by row; None: each row is one.

    Raises:
        ConfigError: what tells of them is of another shape.
    """
    edges: list[set[int]] = [{0, length} for _ in range(rows)]
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if (given := batch.get(name)) is not None:
            found = [int(each) for each in given]
            if found != sorted(found) or not found or found[0] != 0 or found[-1] != length:
                raise ConfigError(
                    f"sequence_shard(): {name!r} is {described(found)}: it ascends from 0 to the {length} "
                    "tokens of a row."
                )
            for row in edges:
                row.update(found)
    runs = {"document_ids": 0, "attention_mask": 0, **dict.fromkeys(POSITIONS, 1)}  # by how much it goes on
    for name, by in runs.items():
        value = batch.get(name)
        if value is None:
            continue
        if (
            not isinstance(value, Tensor)
            or value.dim() != 2
            or value.shape[1] != length
            or value.shape[0] not in (1, rows)
        ):
            shape = tuple(value.shape) if isinstance(value, Tensor) else described(value)
            raise ConfigError(
                f"sequence_shard(): {name!r} is {shape}: it is ({rows}, {length}), a number for each token."
            )
        ends = (value.long().diff(dim=1) != by).nonzero().tolist()
        for row, at in ends:
            for each in edges if value.shape[0] == 1 else [edges[row]]:
                each.add(at + 1)
    if all(len(row) == 2 for row in edges):
        return None
    return [tuple(sorted(row)) for row in edges]


def _positions(cut: CutBatch | None, rows: int, length: int, device: torch.device) -> Tensor:
    """``(batch, tokens)``: they begin anew with each document of ``cut``."""
    count = torch.arange(length, device=device)
    if cut is None:
        return count.expand(rows, length)
    begins = torch.zeros(len(cut.documents), length, dtype=torch.long, device=device)
    for row, edges in enumerate(cut.documents):
        begins[row, list(edges[1:-1])] = torch.tensor(edges[1:-1], dtype=torch.long, device=device)
    return (count - begins.cummax(1).values).expand(rows, length)


def _behind(padding: int, positions: Tensor, tokens: Tensor | None) -> Tensor:
    """Positions from ``padding + 1`` on; where tokens are known, those that are padding are not counted."""
    if tokens is None:
        return positions + padding + 1
    counts = (tokens != padding).long()
    return counts.cumsum(1) * counts + padding


def _cut(tensor: Tensor, cut: CutBatch, rank: int) -> Tensor:
    """What a rank has of ``(batch, tokens, ...)``."""
    return torch.cat([tensor[:, start:stop] for start, stop in cut.ranges[rank]], dim=1)


def _checksum(source: Tensor, cut: CutBatch) -> int:
    flat = source.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return crc32(repr(cut).encode(), crc32(flat.tobytes()))
