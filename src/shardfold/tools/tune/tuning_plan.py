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
from shardfold.tools.planning.known_models import Planned
from shardfold.tools.recipes.largest import most_that_fit
from shardfold.tools.tune._model_config import changed_config, with_length
from shardfold.tools.tune.adapters import adapted
from shardfold.tools.tune.config import DistillConfig, GRPOConfig, PPOConfig, RolloutConfig, TuneConfig
from shardfold.tools.tune.distill import divergences
from shardfold.tools.tune.models import ModelPlace, hollow_model
from shardfold.tools.tune.run import optimizer_of

__all__ = ["most_samples", "planned_tuning"]


def planned_tuning(config: TuneConfig, division: Division, samples: int = LINE[0]) -> Planned:
    """The model of a run, and a micro-batch of it as a run has it: of samples of several lengths, so that there is a
    mask, and keys and values that several heads share are repeated. A second model, which a run has in an engine of its
    own, lies beside it: a teacher, a reference, or what tells the worth of answers.

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
    second = _second_model(config, settings)
    if second is not None:
        model = _Both(model, second)
    optimizer = partial(_planned_optimizer, config=config)
    subject = Subject(model, batch, partial(_loss, config=config), division=division, optimizer=optimizer)
    return Planned(f"{config.recipe} of {config.model}", subject, parameters, length)


def _second_model(config: TuneConfig, settings: Any) -> nn.Module | None:
    if isinstance(config, DistillConfig):
        return hollow_model(ModelPlace.find(config.teacher).config, "lm").requires_grad_(False)
    if isinstance(config, PPOConfig):
        place = ModelPlace.find(config.model if config.value is None else config.value)
        settings = copy.deepcopy(settings if config.value is None else place.config)
        return adapted(hollow_model(settings, "score"), config.adapter, "score", place.folder)
    if isinstance(config, RolloutConfig) and config.beta and config.reference == "copy":
        return hollow_model(copy.deepcopy(settings), "lm").requires_grad_(False)
    return None


def _planned_optimizer(model: nn.Module, *, config: TuneConfig) -> Optimizer:
    """Of all engines of a run."""
    found: Optimizer | None = None
    for part in (model.model, model.second) if isinstance(model, _Both) else (model,):
        trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
        if trained:
            made = optimizer_of(config, part)
            made = made(trained) if isinstance(made, partial) else made
            for group in made.param_groups if found is not None else ():
                found.add_param_group(group)
            found = found or made
    assert found is not None
    return found


class _Both(nn.Module):
    """Two models of a run."""

    def __init__(self, model: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.model, self.second = model, second

    def forward(self, batch: dict[str, Tensor], config: TuneConfig) -> Tensor:
        return _loss_of_two(self.model, self.second, batch, config)


def _loss(model: nn.Module, batch: dict[str, Tensor], *, config: TuneConfig) -> Tensor:
    """A loss that holds what that of the recipe does."""
    if isinstance(model, _Both):
        return model(batch, config)
    labels, inputs = _inputs(batch)
    if isinstance(config, RolloutConfig):
        return _loss_of_answers(model, labels, inputs, config)
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
    scores = logits.flatten(0, 1).index_select(0, targets).float() / config.temperature
    return (scores.logsumexp(-1) - scores.gather(-1, targets[:, None]).squeeze(-1)).mean()


def _loss_of_two(model: nn.Module, second: nn.Module, batch: dict[str, Tensor], config: TuneConfig) -> Tensor:
    """What trains a model beside a second one, in the order in which a run asks them."""
    labels, inputs = _inputs(batch)
    if isinstance(config, PPOConfig):
        loss = _loss_of_answers(model, labels, inputs, config)
        return loss + second(**inputs).logits.square().mean()
    with torch.no_grad():
        said = second(**inputs).logits
        if isinstance(config, DistillConfig):
            said = said.flatten(0, 1).index_select(0, labels.flatten()).float()
    if isinstance(config, RolloutConfig):
        del said  # of which a number for each token is kept
        return _loss_of_answers(model, labels, inputs, config)
    assert isinstance(config, DistillConfig)
    targets = labels.flatten()
    student = model(**inputs).logits[:, -labels.shape[1] :].flatten(0, 1).index_select(0, targets).float()
    apart = divergences(student, said[:, : student.shape[-1]], config).mean()
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
