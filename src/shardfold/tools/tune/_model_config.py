"""transformers' config of the model that a tuning trains: that of its folder, with what the settings change."""

from __future__ import annotations

import copy
import math
from typing import Any

from shardfold.errors import ConfigError
from shardfold.tools.tune.adapters import expanded_config
from shardfold.tools.tune.config import TuneConfig
from shardfold.tools.tune.models import ModelPlace

__all__ = ["changed_config", "with_length"]


def with_length(config: TuneConfig, place: ModelPlace) -> TuneConfig:
    """The settings, where no length is given with at most as many tokens as the model has positions for."""
    most = getattr(place.config, "max_position_embeddings", None)
    if most is None or "length" in config.text.model_fields_set:
        return config
    factor = 1.0 if config.text.rope is None else float(config.text.rope["factor"])
    text = config.text.model_copy(update={"length": min(config.text.length, math.ceil(most * factor))})
    return config.model_copy(update={"text": text})


def changed_config(config: TuneConfig, place: ModelPlace) -> Any:
    """transformers' config of the model that is trained: other positions, more blocks."""
    found = copy.deepcopy(place.config)
    if (rope := config.text.rope) is not None:
        own = getattr(found, "rope_parameters", None)
        if not isinstance(own, dict) or "rope_theta" not in own:
            raise ConfigError(
                f"a model of the type {found.model_type!r} has no rotary positions that --rope could change."
            )
        before = found.max_position_embeddings
        more = {name: value for name, value in rope.items() if name != "type"}
        found.rope_parameters = {**own, "rope_type": rope["type"], "original_max_position_embeddings": before, **more}
        if rope["type"] == "linear":
            del found.rope_parameters["original_max_position_embeddings"]
        found.max_position_embeddings = math.ceil(before * float(rope["factor"]))
    if config.text.length > (most := getattr(found, "max_position_embeddings", None) or math.inf):
        raise ConfigError(
            f"length is {config.text.length}, but the model has positions for {most} tokens: give --length {most}, or "
            f"--rope yarn:{math.ceil(config.text.length / most)}."
        )
    if config.adapter is not None and config.adapter.kind == "expand":
        found = expanded_config(found, config.adapter.layers)
    return found
