"""A model that is asked and not trained: split by a layout over the ranks, with its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardfold as sf
from shardfold.checkpoint.folders import IN_RUN
from shardfold.errors import ConfigError
from shardfold.plan.checks import parse_bytes
from shardfold.tools.answering._named_adapters import NamedAdapters, choose_adapter
from shardfold.tools.answering.byte_tokenizer import ByteTokenizer
from shardfold.tools.answering.open_config import OpenConfig
from shardfold.tools.observe.working_line import working
from shardfold.tools.quick_start import QuickStart
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import TrainConfig, read_settings
from shardfold.tools.tune.adapters import merged_tensors
from shardfold.tools.tune.models import ModelPlace, hollow_model, loading, quiet

__all__ = ["OpenConfig", "OpenedModel", "settings_of_train"]

USUAL_LENGTH = 2048
"""Tokens that a model reads whose config does not say."""


@dataclass
class OpenedModel:
    """A model that is there to be asked.

    Attributes:
        engine: of the model, without an optimizer.
        tokenizer: a fast one of transformers.
        context: tokens that the model reads at most.
        stops: tokens at which an answer ends.
        is_bytes: a GPT of `shardfold train`, whose tokens are bytes.
    """

    engine: sf.Engine
    tokenizer: Any
    context: int
    stops: tuple[int, ...]
    is_bytes: bool = False

    @classmethod
    def open(cls, config: OpenConfig, adapters: Mapping[str, Path] | None = None) -> OpenedModel:
        """Load it; each rank reads its own part.

        Args:
            adapters: folders of LoRA by names, of which the model has one at a time; it begins with none.

        Raises:
            ConfigError: there is no model, or it is a reward model, or it cannot be opened in that way.
        """
        with QuickStart.uncollected():
            try:
                return cls._open(config, adapters)
            except NotImplementedError:  # an operation without memory whose rule was left out at the start
                if not QuickStart.complete_torch():
                    raise
                return cls._open(config, adapters)

    @classmethod
    def _open(cls, config: OpenConfig, adapters: Mapping[str, Path] | None) -> OpenedModel:
        folder = config.model.expanduser()
        said = _settings(folder / "config.json")
        if "size" in said and "model_type" not in said:
            if adapters:
                raise ConfigError("--adapter is of a model of transformers: a run of shardfold train has none.")
            made = _of_train(folder, said, config)
        else:
            if said.get("recipe") == "reward":
                raise ConfigError(
                    f"{str(folder)!r} is a reward model, which rates answers and predicts no tokens: its accuracy on "
                    "held-out pairs is in its own run (--eval-data)."
                )
            made = _of_transformers(folder, config, adapters or {})
        if config.length is not None:
            made.context = min(config.length, made.context) if made.is_bytes else config.length
        made.engine.module.eval()
        return made

    @property
    def first(self) -> int | None:
        """What stands in front of a text: the token that begins one, else one that ends it; None: neither is known."""
        begins = self.tokenizer.bos_token_id
        return begins if begins is not None else self.tokenizer.eos_token_id

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, L, vocabulary) of ``input_ids`` and ``position_ids``, each (B, L)."""
        if self.is_bytes:
            return self.engine(inputs["input_ids"], positions=inputs["position_ids"])
        return self.engine(**inputs, use_cache=False).logits

    def close(self) -> None:
        self.engine.close()


def _settings(path: Path) -> dict[str, Any]:
    return read_settings(path) if path.is_file() else {}


def _engine(model: torch.nn.Module, config: OpenConfig, weights: Mapping[str, Tensor] | None) -> sf.Engine:
    model.requires_grad_(False)
    layout = config.table(_streamed(model, config))
    with loading(weights, model) as told:
        return sf.Engine(
            model,
            layout=layout,
            precision=config.precision,
            parallel=sf.Parallel(
                mesh={"tensor": config.tensor} if config.tensor > 1 else None,
                tensor="auto" if config.tensor > 1 else None,
            ),
            init=sf.Init(weights=told) if told is not None else sf.Init(),
        )


def _streamed(model: torch.nn.Module, config: OpenConfig) -> float:
    """The part of the weights that does not fit into what stays in memory."""
    if config.memory is None:
        return 1.0
    QuickStart.complete_torch()
    from shardfold.planner.inference import streamed_part  # which takes a second, and nobody else here
    from shardfold.planner.setting import Subject

    ranks = dist.get_world_size() // config.tensor if dist.is_initialized() else 1
    subject = Subject(model, torch.zeros(1, 1, dtype=torch.int64))
    stays = (parse_bytes(config.memory) or 0) * config.tensor
    return streamed_part(subject, config.table(), config.precision, stays, {"intra": ranks})


def _of_transformers(folder: Path, config: OpenConfig, adapters: Mapping[str, Path]) -> OpenedModel:
    place = ModelPlace.find(folder)
    if not adapters and place.adapter is None:  # peft needs what is left out
        QuickStart.import_models()
    tokenizer = place.tokenizer()
    with quiet():
        model = hollow_model(place.config, "lm")
    values = merged_tensors(model, place, "lm")
    if adapters:
        if config.bits is not None:
            raise ConfigError("--adapter goes with weights that are not rounded: leave --bits out, or merge it first.")
        values = NamedAdapters(model, values, adapters)
        model = values.module
        choose_adapter(model, None)
    engine = _engine(model, config, values)
    context = getattr(place.config.get_text_config(), "max_position_embeddings", None) or USUAL_LENGTH
    return OpenedModel(engine, tokenizer, context, _stops(place, tokenizer))


def _stops(place: ModelPlace, tokenizer: Any) -> tuple[int, ...]:
    """All that tokenizer, config and generation config call the end of a text."""
    found: dict[int, None] = {}
    file = place.folder / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for each in (tokenizer.eos_token_id, place.config.eos_token_id, generation.get("eos_token_id")):
        for token in each if isinstance(each, list) else [each]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def settings_of_train(folder: Path, said: Mapping[str, Any]) -> TrainConfig:
    """Of a run of `shardfold train` that has a checkpoint.

    Raises:
        ConfigError: it has none.
    """
    if not (folder / IN_RUN).is_dir():
        raise ConfigError(
            f"the run {str(folder)!r} has no checkpoint: train with --save-every, which writes one at the end too."
        )
    return TrainConfig.load(dict(said), where=str(folder / "config.json"), inherited=said.keys())


def _of_train(folder: Path, said: Mapping[str, Any], config: OpenConfig) -> OpenedModel:
    shape = settings_of_train(folder, said).model_shape()
    with sf.meta_init():
        model = GPT(shape)
    engine = _engine(model, config, None)
    with working("loading"):
        engine.load(folder, weights_only=True)
    tokenizer = ByteTokenizer()
    return OpenedModel(engine, tokenizer, shape.context, (tokenizer.eos_token_id,), is_bytes=True)
