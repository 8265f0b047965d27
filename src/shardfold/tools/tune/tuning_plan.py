"""What a tuning takes, before anything runs: the model as a plan sees it, and the largest micro-batch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from shardfold import accelerator
from shardfold.engine.engine import Engine
from shardfold.errors import ConfigError
from shardfold.plan.checks import human
from shardfold.plan.lifetimes import CPU, GPU
from shardfold.planner.choice import Option, largest_of
from shardfold.planner.division import Division
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.tools.named_optimizers import OPTIMIZERS
from shardfold.tools.planning.known_models import Planned
from shardfold.tools.recipes.largest import most_that_fit
from shardfold.tools.tune._divergences import divergences
from shardfold.tools.tune._model_config import changed_config, with_length
from shardfold.tools.tune._named_optimizer import optimizer_of
from shardfold.tools.tune.adapters import adapted
from shardfold.tools.tune.config import DistillConfig, GRPOConfig, PPOConfig, RolloutConfig, TuneConfig
from shardfold.tools.tune.models import ModelPlace, hollow_model

__all__ = ["most_samples", "planned_tuning"]


def planned_tuning(config: TuneConfig, division: Division, samples: int = LINE[0]) -> Planned:
    """The model of a run, and a micro-batch of it as a run has it: of samples of several lengths, so that there is a
    mask, and keys and values that several heads share are repeated. Of a second model that only runs forward, a teacher
    or a copy as reference, the states count; one that tells the worth of answers is trained beside the first.

    Args:
        config: of the run.
        division: how ranks share the model.
        samples: of the micro-batch; of recipes of pairs, pairs; of those that draw answers, prompts.
    """
    place = ModelPlace.find(config.model)
    config = with_length(config, place)
    settings = changed_config(config, place)
    model = adapted(hollow_model(settings, config.task), config.adapter, config.task, place.folder)
    length = config.text.length
    shape: tuple[int, ...] = (samples, length)
    if config.kind == "pair":
        shape = samples, 2, length
    if isinstance(config, GRPOConfig | PPOConfig):
        shape = samples, config.n, (length := length + config.max_tokens)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens, "position_ids": tokens.clone()}
    if config.adapter is not None and config.adapter.kind == "prefix":
        inputs.pop("position_ids")  # which peft makes
    if not config.text.pack:
        inputs["attention_mask"] = tokens.clone()
    batch = {**inputs, "labels": tokens.clone(), "documents": tokens.int()}
    parameters = sum({id(p): p.numel() for p in model.parameters()}.values())
    if isinstance(config, PPOConfig):
        model = _Both(model, _value_model(config, settings))
    frozen = _frozen_model(config, settings)
    beside = None if frozen is None else Subject(frozen, batch, division=division)
    optimizer = partial(_planned_optimizer, config=config)
    compute = partial(_loss, config=config)
    subject = Subject(model, batch, compute, division=division, optimizer=optimizer, beside=beside)
    return Planned(
        f"{config.recipe} of {config.model}", subject, parameters, length, optimizer=OPTIMIZERS[config.optimizer]
    )


def _value_model(config: PPOConfig, settings: Any) -> nn.Module:
    place = ModelPlace.find(config.model if config.value is None else config.value)
    settings = copy.deepcopy(settings if config.value is None else place.config)
    return adapted(hollow_model(settings, "score"), config.adapter, "score", place.folder)


def _frozen_model(config: TuneConfig, settings: Any) -> nn.Module | None:
    """A second model that is not trained."""
    if isinstance(config, DistillConfig):
        return hollow_model(ModelPlace.find(config.teacher).config, "lm").requires_grad_(False)
    if isinstance(config, RolloutConfig) and config.beta and config.reference == "copy":
        return hollow_model(copy.deepcopy(settings), "lm").requires_grad_(False)
    return None


def _planned_optimizer(model: nn.Module, *, config: TuneConfig) -> Optimizer:
    """Of all engines of a run."""
    made: list[Optimizer] = []
    for part in (model.model, model.second) if isinstance(model, _Both) else (model,):
        found = optimizer_of(config, part)
        trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
        made.append(found(trained) if isinstance(found, partial) else found)
    for group in (group for more in made[1:] for group in more.param_groups):
        made[0].add_param_group(group)
    return made[0]


class _Both(nn.Module):
    """Two models that a run trains."""

    def __init__(self, model: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.model, self.second = model, second

    def forward(self, batch: dict[str, Tensor], config: TuneConfig) -> Tensor:
        assert isinstance(config, PPOConfig)
        labels, inputs = _inputs(batch)
        loss = _loss_of_answers(self.model, labels, inputs, config)
        return loss + self.second(**inputs).logits.square().mean()


def _loss(model: nn.Module, batch: dict[str, Tensor], *, config: TuneConfig) -> Tensor:
    """A loss that holds what that of the recipe does."""
    if isinstance(model, _Both):
        return model(batch, config)
    labels, inputs = _inputs(batch)
    if isinstance(config, RolloutConfig):
        return _loss_of_answers(model, labels, inputs, config)
    if isinstance(config, DistillConfig):
        return _loss_beside_teacher(model, labels, inputs, config)
    logits = model(**inputs).logits
    if logits.dim() == 2:  # of a reward model
        return -F.logsigmoid(logits[::2] - logits[1::2]).mean()
    logits = logits[:, -labels.shape[1] :].float()
    twice = config.recipe == "orpo"  # for two sets of targets
    losses = [
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") for _ in range(2 if twice else 1)
    ]
    return torch.stack(losses).sum() / labels.numel()


def _inputs(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Labels, and what a model takes; both in rows of tokens."""
    inputs = {name: tokens.reshape(-1, tokens.shape[-1]) for name, tokens in batch.items()}
    labels, _ = inputs.pop("labels"), inputs.pop("documents")
    return labels, {**inputs, "use_cache": False}


def _loss_of_answers(model: nn.Module, labels: Tensor, inputs: dict[str, Any], config: RolloutConfig) -> Tensor:
    """Logits of answers alone, in fp32, and a value for each of their tokens."""
    targets = labels[:, -config.max_tokens :].flatten()
    logits = model(**inputs).logits[:, -labels.shape[1] :]
    scores = logits.flatten(0, 1)[targets].float() / config.temperature
    return (scores.logsumexp(-1) - scores.gather(-1, targets[:, None]).squeeze(-1)).mean()


def _loss_beside_teacher(model: Any, labels: Tensor, inputs: dict[str, Any], config: DistillConfig) -> Tensor:
    """What a teacher says of each target is there before the model is asked."""
    targets = labels.flatten()
    said = torch.empty(len(targets), model.config.get_text_config().vocab_size, device=labels.device)
    student = model(**inputs).logits[:, -labels.shape[1] :].flatten(0, 1)[targets].float()
    apart = divergences(student, said, config).mean()
    return (1 - config.mix) * apart + config.mix * F.cross_entropy(student, targets)


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
