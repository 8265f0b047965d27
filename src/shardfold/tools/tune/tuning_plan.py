"""What a tuning takes, before anything runs: the model as a plan sees it, and the largest micro-batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.engine.engine import Engine
from shardfold.errors import ConfigError
from shardfold.plan.checks import human
from shardfold.plan.lifetimes import CPU, GPU
from shardfold.planner.choice import Option, largest_of
from shardfold.planner.division import Division
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.tools.planning.known_models import Planned
from shardfold.tools.recipes.largest import most_that_fit
from shardfold.tools.tune._model_config import changed_config, with_length
from shardfold.tools.tune.adapters import adapted
from shardfold.tools.tune.config import TuneConfig
from shardfold.tools.tune.models import ModelPlace, hollow_model

__all__ = ["most_samples", "planned_tuning"]


def planned_tuning(config: TuneConfig, division: Division, samples: int = LINE[0]) -> Planned:
    """The model of a run, and a micro-batch of it as a run has it: of samples of several lengths, so that there is a
    mask, and keys and values that several heads share are repeated.

    Args:
        config: of the run.
        division: how ranks share the model.
        samples: of the micro-batch; of recipes of pairs, pairs.
    """
    place = ModelPlace.find(config.model)
    config = with_length(config, place)
    model = hollow_model(changed_config(config, place), config.task)
    model = adapted(model, config.adapter, config.task, place.folder)
    shape = (samples, 2, config.text.length) if config.kind == "pair" else (samples, config.text.length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens, "position_ids": tokens.clone()}
    if config.adapter is not None and config.adapter.kind == "prefix":
        inputs.pop("position_ids")  # which peft makes
    if not config.text.pack:
        inputs["attention_mask"] = tokens.clone()
    batch = {**inputs, "labels": tokens.clone(), "documents": tokens.int()}
    parameters = sum({id(p): p.numel() for p in model.parameters()}.values())
    loss = partial(_loss, again=config.recipe == "orpo")
    subject = Subject(model, batch, loss, division=division)
    return Planned(f"{config.recipe} of {config.model}", subject, parameters, config.text.length)


def _loss(model: nn.Module, batch: dict[str, Tensor], *, again: bool = False) -> Tensor:
    """A loss that holds what those of recipes do: logits in fp32, and a value for each token; ``again``: twice, for two
    sets of targets."""
    inputs = {name: tokens.reshape(-1, tokens.shape[-1]) for name, tokens in batch.items()}
    labels, _ = inputs.pop("labels"), inputs.pop("documents")
    kwargs: dict[str, Any] = {**inputs, "use_cache": False}
    logits = model(**kwargs).logits
    if logits.dim() == 2:  # of a reward model
        return -F.logsigmoid(logits[::2] - logits[1::2]).mean()
    logits = logits[:, -labels.shape[1] :].float()
    losses = [
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") for _ in range(2 if again else 1)
    ]
    return torch.stack(losses).sum() / labels.numel()


def most_samples(config: TuneConfig, engine: Engine, rows: int) -> int:
    """The most samples of a micro-batch that fit on all ranks, by plan, of so many rows; all ranks call it.

    Raises:
        ConfigError: on all ranks: not even one fits.
    """
    streams = accelerator.has_streams(engine.device)
    division = Division(
        tensor=config.tensor,
        sequence_parallel=config.sequence_parallel,
        sequence=config.sequence,
        streams=streams,
        attention=None if config.attention == "auto" else config.attention,
    )
    subjects = planned_tuning(config, division).subject.ranks

    def find(budget: float) -> Option:
        rank = PlannedRank(
            mesh=engine.mesh.sizes.axes,
            budget=budget,
            precision=config.precision,
            micro_batches=config.accumulate,
            clip=bool(config.clip_norm),
            behaviour=GPU if streams else CPU,
        )
        return largest_of(subjects, rank, config.table(), config.activations)

    most, peak, budget = most_that_fit(engine, config.memory, find, rows)
    if most < 1:
        one = "pair" if config.kind == "pair" else "sample"
        raise ConfigError(
            f"--micro-batch max: not even one {one} of {config.text.length:,} tokens fits: a step peaks at "
            f"{human(peak)}, and each rank has {human(budget)}: choose another --layout, --activations recompute, "
            "a smaller --length, or more ranks."
        )
    return min(most, max(1, rows // (engine.data_ranks * config.accumulate)))
