"""Whether a graph computes what its source does: logits at several batches, lengths and pasts, and greedy texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfold.tools.onnx._onnx_source import BATCH, OnnxSource
from shardfold.tools.onnx.onnx_session import DecoderSteps, OnnxSession, continuations, positions_of

__all__ = ["TOLERANCE", "GraphComparison", "SourceAnswers"]

TOLERANCE = 1e-4
"""Of logits, over the largest of them or 1: hundreds of fp32 roundings, which runtimes do in other orders."""

STEPS = ((1, (1, 1)), (1, (9, 1, 2)), (3, (4, 3)), (8, (2, 1)))
"""Batches, and the lengths of their steps; past a first one, keys and values are of those before."""

GREEDY = 32


@dataclass(frozen=True)
class GraphComparison:
    """How far a graph is from its source.

    Attributes:
        error: the largest difference of logits, over the largest logit or 1.
        tokens: greedy tokens that were compared.
        differs: the first of them that is another one, from 0; None: all are the same. Where the two likeliest are
            nearer than rounding, either is right.
    """

    error: float
    tokens: int = 0
    differs: int | None = None

    @property
    def same(self) -> bool:
        return self.error <= TOLERANCE and self.differs is None


class SourceSteps:
    """The source, step by step, by its own cache."""

    def __init__(self, source: OnnxSource) -> None:
        self.model: Any = source.model
        self.positions = source.positions

    def step(self, ids: Tensor, mask: Tensor, past: Any) -> tuple[Tensor, Any]:
        more = {"position_ids": positions_of(mask, ids.shape[1])} if self.positions else {}
        with torch.no_grad():
            found = self.model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True, **more)
        return found.logits, found.past_key_values


class SourceAnswers:
    """What the source says to drawn inputs; afterwards it is not needed any more."""

    def __init__(self, source: OnnxSource, greedy: int = GREEDY) -> None:
        self.kind, self.greedy = source.kind, 0
        self._draw = torch.Generator().manual_seed(0)
        if source.kind != "decoder":
            self.inputs = [self._fewer(source, batch) for batch in (1, BATCH)]
            self.outputs = [source.outputs(each) for each in self.inputs]
            return
        text = source.config.get_text_config()
        self.vocabulary, context = text.vocab_size, getattr(text, "max_position_embeddings", None) or 2048
        steps = SourceSteps(source)
        self.batches = [self._batch(batch, min(sum(lengths), context)) for batch, lengths in STEPS]
        self.logits = [
            asked(steps, ids, mask, lengths) for (ids, mask), (_, lengths) in zip(self.batches, STEPS, strict=True)
        ]
        self.prompts = [self._ids(1, length)[0].tolist() for length in (3, 7)]
        self.greedy = max(0, min(greedy, context - 8))
        self.texts, self.gaps = continuations(steps, self.prompts, self.greedy) if self.greedy else ([], None)

    def _ids(self, batch: int, length: int) -> Tensor:
        return torch.randint(0, self.vocabulary, (batch, length), generator=self._draw)

    def _batch(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens, and a mask by which rows but the first lack some in front."""
        mask = torch.ones(batch, length, dtype=torch.int64)
        for row in range(1, batch):
            mask[row, : row % 3] = 0
        return self._ids(batch, length), mask

    def _fewer(self, source: OnnxSource, batch: int) -> dict[str, Tensor]:
        assert source.inputs is not None
        found = {name: value[:batch].clone() for name, value in source.inputs.items()}
        if source.kind == "encoder":
            found = {name: torch.cat([value, value], 1)[:, : 6 + batch] for name, value in found.items()}
            found["attention_mask"][batch // 2 :, -2:] = 0
        return found

    def compared(self, graph: OnnxSession) -> GraphComparison:
        """With what a graph says."""
        error = 0.0
        if self.kind != "decoder":
            for inputs, outputs in zip(self.inputs, self.outputs, strict=True):
                found = graph.run(inputs)
                seen = inputs.get("attention_mask")
                for name, value in outputs.items():
                    error = max(error, _apart(found[name], value, seen if value.dim() > 2 else None))
            return GraphComparison(error)
        for (ids, mask), logits, (_, lengths) in zip(self.batches, self.logits, STEPS, strict=True):
            for (theirs, seen), (ours, _) in zip(logits, asked(graph, ids, mask, lengths), strict=True):
                error = max(error, _apart(ours, theirs, seen))
        texts, _ = continuations(graph, self.prompts, self.greedy) if self.greedy else ([], None)
        return GraphComparison(error, self.greedy, self.first_difference(texts, TOLERANCE))

    def first_difference(self, texts: list[list[int]], tie: float = 0.0) -> int | None:
        """Of greedy texts, the first place where one is another; a tie within rounding is none, and texts may be longer
        than the source's."""
        places = []
        for row, (theirs, ours) in enumerate(zip(self.texts, texts, strict=True)):
            place = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
            if place is not None and self.gaps is not None and self.gaps[row, place] > 2 * tie:
                places.append(place)
        return min(places, default=None)


def asked(model: DecoderSteps, ids: Tensor, mask: Tensor, lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Logits of each step, and the mask of its tokens."""
    found: list[tuple[Tensor, Tensor]] = []
    past: Any = None
    at = 0
    for length in lengths:
        part, seen = ids[:, at : at + length], mask[:, : at + length]
        logits, past = model.step(part, seen, past)
        found.append((logits, seen[:, at:]))
        at += length
    return found


def _apart(ours: Tensor, theirs: Tensor, seen: Tensor | None) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if seen is not None and seen.shape == ours.shape[:2]:
        ours, theirs = ours[seen.bool()], theirs[seen.bool()]
    if not theirs.numel():
        return 0.0
    error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()
    return error if error == error else float("inf")
