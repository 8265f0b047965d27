"""The settings of `shardfold eval`. Imports no torch, so that the command line refuses bad values at once."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from shardfold.errors import ConfigError
from shardfold.tools.answering.open_config import OpenConfig
from shardfold.tools.effects import Effect
from shardfold.tools.tune.config import Source, TuneConfig

__all__ = ["EvalConfig"]

ANSWERS_ONLY = ("it is about answers that are generated, and none are", "give --answers another number")
SAMPLES_ONLY = ("one greedy answer is given to each prompt", "give --best-of 8")


def _as_in_tune(name: str) -> Any:
    """The field of that name as ``shardfold tune`` has it."""
    return copy.copy(TuneConfig.model_fields[name])


class EvalConfig(OpenConfig):
    """What a model is held to. Field descriptions are the command line's help."""

    effects: ClassVar[tuple[Effect, ...]] = (
        *OpenConfig.effects,
        *(Effect(name, lambda given: given.answers > 0, *ANSWERS_ONLY) for name in ("max_tokens", "best_of", "reward")),
        *(Effect(name, lambda given: given.best_of > 1, *SAMPLES_ONLY) for name in ("temperature", "top_p", "seed")),
    )

    data: tuple[Source, ...] = _as_in_tune("data")
    layout: str = Field("zero3", description=OpenConfig.model_fields["layout"].description)
    pack: bool = Field(False, description="Several rows share a line of tokens; none sees another: the same figures.")
    batch_tokens: int = Field(8192, ge=1, description="Tokens that go through the model at once, on each rank.")
    template: str = Field("model", description="The chat template: model (the tokenizer's own), a file, or a name.")
    train_on: Literal["assistant", "last", "completion", "all"] = Field(
        "assistant",
        description="Tokens of conversations that are scored: assistant (all its turns), last, completion, all.",
    )
    answers: int = Field(64, ge=0, description="Prompts that are answered, the first of the data; 0: none.")
    max_tokens: int = Field(256, ge=1, description="Tokens of an answer, at most.")
    best_of: int = Field(1, ge=1, le=2**16, description="Answers to each prompt, the best of which counts too.")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="Of these answers.")
    top_p: float = Field(1.0, gt=0, le=1, description="Probability of the tokens that these answers are drawn from.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of these answers.")
    reward: str | None = Field(None, description="What rates answers: a function of a file, as rewards.py:has_word.")
    out: Path | None = Field(None, description="Folder for eval.json; without it, the model's.")

    @classmethod
    def load(cls, settings: dict[str, Any], where: str = "the settings", inherited: Collection[str] = ()) -> EvalConfig:
        """Validate plain values; the first that is wrong raises one sentence."""
        for name in ("model", "data"):
            if settings.get(name) is None:
                raise ConfigError(f"{where}: there is no {name}: give {'a run' if name == 'model' else '--data'}.")
        return super().load(settings, where, inherited)
