"""The models that `shardfold plan` knows, each built without memory, and a micro-batch of them."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardfold.errors import ConfigError, ModelError, ShardfoldError, did_you_mean
from shardfold.plan.checks import described, is_integer
from shardfold.planner.division import Division
from shardfold.planner.setting import Subject
from shardfold.sharding.materialize import meta_init
from shardfold.tools.named_optimizers import OPTIMIZERS, named_optimizer
from shardfold.tools.packages import PACKAGES, config_of_type, package_of, timm_model
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import SIZES, GPTConfig

__all__ = ["KNOWN", "Planned", "planned_model"]

LENGTH = 2048  # tokens, where a model does not say how many it takes

SIZES_OF_CONFIGS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "hidden_size",
    "n_embd",
    "d_model",
    "num_attention_heads",
    "n_head",
    "vocab_size",
)
"""Settings of transformers that are numbers of 1 or more."""

#: Configurations of transformers, by the name of what they are shaped like.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-7b": ("llama", {"vocab_size": 32000, "max_position_embeddings": 4096}),
    "llama-13b": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "max_position_embeddings": 4096,
        },
    ),
    "llama-70b": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
        },
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-base": ("bert", {"vocab_size": 28996}),
    "bert-large": (
        "bert",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "vit-base": ("vit", {}),
    "t5-base": ("t5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
}


@dataclass(frozen=True)
class Planned:
    """A model to plan for.

    Attributes:
        name: as given.
        subject: the model and a micro-batch of ``samples``.
        parameters: elements.
        length: tokens of a sample; 0: it has none.
        made: the micro-batch is made here, from what the model says that it takes.
        optimizer: what it is called.
    """

    name: str
    subject: Subject
    parameters: int
    length: int
    made: bool = False
    optimizer: str = "AdamW"


def planned_model(
    given: str,
    *,
    length: int | None = None,
    samples: int = 1,
    division: Division | None = None,
    real: bool | None = None,
    optimizer: str = "adamw",
    galore_rank: int = 16,
) -> Planned:
    """The model that a name, a path of a config.json, ``timm:NAME``, ``transformers:TYPE``, or ``module:function``
    gives; the function gives a model, or a model and a micro-batch. ``division``: how ranks share it; ``real``: as of a
    subject; ``optimizer``: its name, of ``OPTIMIZERS``.

    Raises:
        ConfigError: it gives none, or does not divide.
    """
    batch: Any = None
    named = package_of(given)
    if named is not None and named[0] == "timm":
        if length is not None:
            raise ConfigError(f"--length is of tokens, and {given} takes images: leave it out.")
        model = _of_timm(given, named[1])
        batch = _images(model, samples)
    elif named is None and ":" in given and not Path(given).exists():
        model, batch = _called(given)
        if batch is not None and length is not None:
            raise ConfigError(
                f"--length: the function of --model {given} gives a micro-batch of its own: leave it out."
            )
    elif given in SIZES:
        config = GPTConfig.named(given, **({"context": length} if length else {}))
        with meta_init():
            model = GPT(config)
        length = config.context
        tokens = _tokens(samples, length)
        batch = {"tokens": tokens, "targets": tokens}
    else:
        config = _config(given) if named is None else {"model_type": named[1]}
        model, length = _of_transformers(given, config, length)
    if made := batch is None:
        batch = _batch(model, samples, length or LENGTH)
        if length and "pixel_values" in batch and "input_ids" not in batch:
            raise ConfigError(f"--length is of tokens, and {given} takes images: leave it out.")
    numel = sum({id(p): p.numel() for p in model.parameters()}.values())
    unsaid = given.endswith(".json") or (named is not None and named[0] == "transformers")
    name = f"{given} ({type(model).__name__})" if unsaid else given
    try:
        makes = None if optimizer == "adamw" else partial(_optimizer, name=optimizer, rank=galore_rank)
        subject = Subject(model, batch, real=real, division=division or Division(), optimizer=makes)
    except (ConfigError, ModelError) as error:
        raise type(error)(_by_options(str(error), division or Division())) from error
    return Planned(name, subject, numel, length or 0, made, OPTIMIZERS[optimizer])


def _optimizer(model: nn.Module, *, name: str, rank: int) -> Optimizer:
    found = named_optimizer(name, model, galore={"rank": rank})
    return found(list(model.parameters())) if isinstance(found, partial) else found


def _by_options(said: str, division: Division) -> str:
    """What is wrong with how ranks share a model, in a sentence about the options that say so."""
    for axis, size in division.axes.items():
        said = said.replace(f"parallel= has {size} ranks on {axis!r}, but", f"--{axis} {size}:")
        said = said.replace("or leave the axis out", f"or leave --{axis} out") if axis == "expert" else said
    chunks = re.match(r"parallel= has (\d+) stages, but ", said)
    if chunks is not None:
        order = f" --order {division.order}" if int(chunks[1]) != division.pipeline else ""
        said = f"--pipeline {division.pipeline}{order} makes {chunks[1]} stages, but {said[chunks.end() :]}"
    return re.sub(r"\{'pipeline': (\d+)\}", r"--pipeline \1", said)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _called(given: str) -> tuple[nn.Module, Any]:
    module, _, name = given.partition(":")
    if not module or not name:
        what = f"{module}:NAME, a model of that package" if module in PACKAGES else "module:function"
        raise ConfigError(f"--model {given} has nothing {'behind' if module else 'before'} its colon: write {what}.")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"--model {given} cannot be imported: {error}.") from error
        raise ConfigError(
            f"--model {given}: Python finds no module {error.name!r}. Run the command in the folder that has it, as "
            "`python -m shardfold plan`, or name this folder in PYTHONPATH."
        ) from error
    except ImportError as error:
        raise ConfigError(f"--model {given} cannot be imported: {error}.") from error
    except AttributeError as error:
        raise ConfigError(f"--model {given}: {error}. Write it as module:function.") from error
    if not callable(function):
        raise ConfigError(f"--model {given} is a {type(function).__name__}: name a function that gives a module.")
    try:
        with meta_init():
            made: Any = function()
    except ShardfoldError:
        raise
    except Exception as error:
        if "uninitialized parameter" in str(error):
            raise ConfigError(
                f"--model {given} has a layer that gets its shape from the first batch, as nn.LazyLinear: give one "
                "with all sizes, as nn.Linear."
            ) from error
        raise ConfigError(f"--model {given}, called without arguments, fails: {_first(error)}.") from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {given} gives {described(made)}: it is to give a module, or (module, micro-batch).")
    if batch is None and "input_ids" not in signature(model.forward).parameters:
        raise ConfigError(
            f"--model {given} gives a {type(model).__name__} whose forward takes no input_ids, so it is not known what "
            "it trains on: have the function give (module, micro-batch)."
        )
    return model, batch


def _first(error: Exception) -> str:
    """The first lines of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(". :")


def _config(given: str) -> dict[str, Any]:
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {given} cannot be read: {error}.") from error
        if not isinstance(found, dict) or "model_type" not in found:
            raise ConfigError(f"--model {given} has no 'model_type', so it is not a config of transformers.")
        return found
    if given not in KNOWN:
        names = [*SIZES, *KNOWN]
        raise ConfigError(
            f"there is no model {given!r}.{did_you_mean(given, names)} --model takes one of these names, the path of a "
            "config.json of transformers, transformers:TYPE, timm:NAME, or module:function of your own."
        )
    kind, sizes = KNOWN[given]
    return {"model_type": kind, **sizes}


def _of_transformers(given: str, config: dict[str, Any], length: int | None) -> tuple[nn.Module, int | None]:
    """The model of a configuration, for what it trains on."""
    settings = dict(config)
    kind = settings.pop("model_type")
    for name in SIZES_OF_CONFIGS:
        if name in settings and not is_integer(settings[name], 1):
            raise ConfigError(f"--model {given}: {name} is {described(settings[name])}: it is a number of 1 or more.")
    made = config_of_type(f"--model {given}", kind, settings)
    if getattr(made, "is_encoder_decoder", False) and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = getattr(made, "pad_token_id", None) or 0  # what labels are shifted by
    import transformers

    named = [name for name in settings.get("architectures") or () if hasattr(transformers, name)]
    try:
        with meta_init():
            model = getattr(transformers, named[0])(made) if named else _auto(transformers, made)
    except Exception as error:
        raise ConfigError(f"--model {given}: transformers makes no model of it: {_first(error)}.") from error
    model.train()
    text = made.get_text_config() if hasattr(made, "get_text_config") else made
    most = next(
        (
            n
            for each in (made, text)
            for name in ("max_position_embeddings", "n_positions")
            if (n := getattr(each, name, 0))
        ),
        None,
    )
    if length is not None and isinstance(most, int) and length > most > 0 and _counts_positions(model, most):
        raise ConfigError(f"--length {length}: {given} has positions for {most:,} tokens: give as many at most.")
    return model, length or (min(most, LENGTH) if isinstance(most, int) and most > 0 else length)


def _counts_positions(model: nn.Module, most: int) -> bool:
    """Whether a table has a row for each place in a text."""
    return any(
        isinstance(module, nn.Embedding)
        and ("pos" in name or "wpe" in name)
        and most <= module.num_embeddings < most + 9
        for name, module in model.named_modules()
    )


def _of_timm(given: str, name: str) -> nn.Module:
    with meta_init():
        return timm_model(f"--model {given}", name).train()


def _images(model: nn.Module, samples: int) -> tuple[torch.Tensor]:
    """A micro-batch of images of the size that a model of timm is configured for."""
    settings: Any = getattr(model, "pretrained_cfg", None) or {}
    return (torch.empty(samples, *settings.get("input_size", (3, 224, 224)), device="meta"),)


def _auto(transformers: Any, config: Any) -> nn.Module:
    order = ["CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["Seq2SeqLM", "SpeechSeq2Seq"]  # its decoder alone is another model
    elif not getattr(config, "is_decoder", True):  # what can be a decoder, too, as BERT, is what it is trained as
        order.insert(0, "MaskedLM")
    for name in order:
        try:
            return getattr(transformers, f"AutoModelFor{name}").from_config(config)
        except ValueError:
            continue
    return transformers.AutoModel.from_config(config)


def _batch(model: nn.Module, samples: int, length: int) -> dict[str, Any]:
    """What a model of transformers takes, by its main input."""
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        return {"pixel_values": _pixels(config, samples), "labels": _tokens(samples)}
    if main != "input_ids":
        raise ConfigError(
            f"{type(model).__name__} takes {main!r}, of which it is not known what it looks like: give "
            "--model module:function, whose function gives the model and a batch."
        )
    takes = signature(model.forward).parameters
    names = [name for name in ("input_ids", "labels") if name in takes]
    made: dict[str, Any] = {name: _tokens(samples, length) for name in names or ["input_ids", "labels"]}
    if "labels" in made and type(model).__name__.endswith("ForSequenceClassification"):
        made["labels"] = _classes(config, samples)
    if "return_loss" in takes and "pixel_values" in takes and (seen := getattr(config, "vision_config", None)):
        made |= {"pixel_values": _pixels(seen, samples), "return_loss": True}
    return made


def _classes(config: Any, samples: int) -> torch.Tensor:
    """Labels of whole texts: a class of each, or numbers, as the configuration says."""
    kind, count = getattr(config, "problem_type", None), getattr(config, "num_labels", 2)
    if kind == "multi_label_classification":
        return torch.empty(samples, count, device="meta")
    numbers = kind == "regression" or (kind is None and count == 1)
    return torch.empty(samples, *[count] * (count > 1), device="meta") if numbers else _tokens(samples)


def _pixels(config: Any, samples: int) -> torch.Tensor:
    """Images of the size that a configuration has."""
    side = getattr(config, "image_size", 224)
    side = side if isinstance(side, int) else 224
    return torch.empty(samples, getattr(config, "num_channels", 3), side, side, device="meta")
