"""Bits per byte of a graph, by the measure of `shardfold eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.onnx.onnx_session import OnnxSession
from shardfold.tools.tune.eval_config import EvalConfig
from shardfold.tools.tune.evaluate import language_scores

__all__ = ["bits_per_byte"]

BATCH_TOKENS = 2048


class _OneRank:
    """What scoring asks of an engine, where there is none."""

    data_ranks, data_rank, device = 1, 0, torch.device("cpu")

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return values


class _OpenedGraph(OpenedModel):
    """A graph in the place of a model that an engine has."""

    def __init__(self, session: OnnxSession, tokenizer: Any, context: int) -> None:
        super().__init__(cast(sf.Engine, _OneRank()), tokenizer, context, ())
        self.session = session

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.session.forward(inputs)


def bits_per_byte(session: OnnxSession, tokenizer: Any, context: int, data: Sequence[Path]) -> float:
    """Of texts, and of what an assistant says in conversations.

    Raises:
        ConfigError: the data have neither.
    """
    # A model has to be named there; the graph is asked in its place.
    settings = {"model": ".", "data": [str(path) for path in data], "batch_tokens": BATCH_TOKENS}
    config = EvalConfig.load(settings, where="--data")
    scores = language_scores(_OpenedGraph(session, tokenizer, context), config)
    if scores is None:
        raise ConfigError("--data: no text and no answer is in there, so the cost of few bits is not known.")
    return scores.bits_per_byte
