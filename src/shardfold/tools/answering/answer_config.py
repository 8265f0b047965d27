"""The settings of `shardfold generate` and `shardfold chat`. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from shardfold.errors import ConfigError
from shardfold.plan.checks import parse_bytes
from shardfold.tools.answering.open_config import OpenConfig

__all__ = ["AnswerConfig", "ChatConfig", "GenerateConfig"]


def _strings(given: Any) -> Any:
    """Of ``"###"`` or ``'["###", "\\n\\n"]'``."""
    if not isinstance(given, str):
        return given
    if not given.lstrip().startswith("["):
        return (given,)
    try:
        return tuple(json.loads(given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"it begins like a JSON list of strings, and is none: {error}") from None


class AnswerConfig(OpenConfig):
    """How tokens of answers are chosen, and when an answer ends. Field descriptions are the command line's help."""

    max_tokens: int = Field(256, ge=1, le=2**30, description="Tokens of an answer, at most.")
    temperature: float = Field(
        0.0, ge=0, le=1e6, allow_inf_nan=False, description="Logits are divided by it; 0 takes the likeliest token."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Of the likeliest tokens, those whose probabilities sum to it.")
    top_k: int = Field(0, ge=0, description="The likeliest so many tokens; 0: all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Tokens so many times as likely as the likeliest, at least.")
    repetition: float = Field(
        1.0, gt=0, le=1e6, description="Penalty of tokens that a text has already; 1 penalizes none."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of all draws.")
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_strings)] = Field(
        (), description='A string that ends an answer, and is no part of it; or several, as \'["###", "\\n\\n"]\'.'
    )
    template: str = Field("model", description="The chat template: model (the tokenizer's own), a file, or a name.")


class GenerateConfig(AnswerConfig):
    """Answer every prompt of a file, many at once, each as alone: one line of JSON for each answer, as it ends."""

    prompts: Path = Field(
        description="Lines of JSON: a string, or an object with prompt (text, or a list of messages) or messages."
    )
    out: Path | None = Field(
        None, description="File for the answers; those that it has already are not asked again. Without it, printed."
    )
    n: int = Field(1, ge=1, le=2**16, description="Answers to each prompt.")
    cache: str | None = Field(
        None, description="Memory for keys and values on each rank, as 1GiB; without it, as much as answers take."
    )
    rows: int = Field(256, ge=1, le=2**20, description="Answers that are under way at once on each rank, at most.")
    gather: bool = Field(
        False, description="Each rank has the whole model meanwhile, where the layout splits it; else unit by unit."
    )
    log_probs: bool = Field(False, description="The log-probability of each token is told, too.")

    @model_validator(mode="after")
    def _check_cache(self) -> GenerateConfig:
        if self.cache is not None and parse_bytes(self.cache) is None:
            raise ConfigError(f"cache: {self.cache!r} names no bytes: write it as 1GiB or 500MB.")
        return self


class ChatConfig(AnswerConfig):
    """Talk with a model: its answers appear as they come."""

    max_tokens: int = Field(1024, ge=1, le=2**30, description="Tokens of an answer, at most.")
    system: str | None = Field(None, description="What the model is told before the first message.")

    @model_validator(mode="after")
    def _check_ranks(self) -> ChatConfig:
        if self.procs > 1 or self.tensor > 1:
            raise ConfigError("chat is one process: leave out --procs and --tensor, or use shardfold generate.")
        return self
