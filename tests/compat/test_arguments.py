"""Optimizers and schedules that refuse what a config gives them: the sentence names the config's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_read import read
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.testing import Ranks
from tests.support.deepspeed_training import ROWS, adamw, build

ONE = {"train_micro_batch_size_per_gpu": ROWS}
OPTIMIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"lr": -1}, "optimizer.params.lr is -1"),
    ("AdamW", {"lr": 0.1, "betas": [2, 0.9]}, "optimizer.params.betas is [2, 0.9]"),
    ("Adam", {"lr": 0.1, "eps": -1}, "optimizer.params.eps is -1"),
    ("Adam", {"lr": -1, "bias_correction": False}, "optimizer.params.lr is -1"),
    ("Lamb", {"lr": 0.1, "weight_decay": -1}, "optimizer.params.weight_decay is -1"),
    ("Lamb", {"lr": 0.1, "max_coeff": -3}, "optimizer.params.max_coeff is -3"),
    ("Lion", {"lr": 0.1, "betas": [3, 3]}, "optimizer.params.betas is [3, 3]"),
    ("Muon", {"lr": 0.1, "momentum": -1}, "optimizer.params.momentum is -1"),
    ("Muon", {"adam_lr": -1}, "optimizer.params.adam_lr is -1"),
    ("SGD", {"lr": 0.1, "momentum": -3}, "optimizer.params.momentum is -3"),
    ("SGD", {"lr": "x"}, "optimizer.params.lr is 'x'"),
    (
        "SGD",
        {"lr": 0.1, "momntum": 0.9},
        "optimizer.params.momntum is not an argument of SGD. Did you mean 'momentum'?",
    ),
]
SCHEDULES: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupDecayLR", {}, "scheduler.params.total_num_steps is missing, which WarmupDecayLR needs"),
    ("OneCycle", {}, "scheduler.params.cycle_min_lr and scheduler.params.cycle_max_lr are missing"),
    ("WarmupDecayLR", {"total_num_steps": 0}, "scheduler.params.total_num_steps is 0"),
    ("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, "scheduler.params.warmup_max_lr is [1, 2, 3]"),
    ("StepLR", {}, "scheduler.params.step_size is missing, which StepLR needs"),
    ("OneCycleLR", {"max_lr": 1, "total_steps": -1}, "scheduler.params.total_steps is -1"),
]


def said_of(sections: list[dict[str, Any]]) -> list[str]:
    """What ``initialize`` says of each of these sections of a config."""
    said: list[str] = []
    for section in sections:
        try:
            initialize(model=build(), config={**ONE, "optimizer": adamw(), **section})
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    return said


@pytest.mark.parametrize("section, cases", [("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)])
def test_what_an_optimizer_or_a_schedule_refuses_is_said_with_the_key(
    ranks: Ranks, section: str, cases: list[tuple[str, dict[str, Any], str]]
):
    """A value that it does not take, an argument that it lacks or does not have."""
    sections = [{section: {"type": kind, "params": params}} for kind, params, _ in cases]
    (said,) = ranks.run(said_of, sections, world_size=1)
    for (kind, params, words), sentence in zip(cases, said, strict=True):
        assert sentence.startswith(f"DeepSpeedConfigError: {words}"), (kind, params, sentence)


def with_a_schedule_that_lacks_an_argument(on: int) -> tuple[str, bool]:
    model, params = build(), {} if dist.get_rank() == on else {"total_num_steps": 9}
    schedule = {"type": "WarmupDecayLR", "params": params}
    config = {**ONE, "optimizer": adamw(), "scheduler": schedule, "zero_optimization": {"stage": 3}}
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as raised:
        patch.setattr(sf.Engine, "__init__", lambda *args, **options: made.append(args))
        initialize(model=model, config=config)
    assert not made
    kept = zip(model.state_dict().values(), build().state_dict().values(), strict=True)
    return str(raised.value), all(torch.equal(here, before) for here, before in kept)


def test_an_argument_that_one_rank_lacks_is_refused_on_all_and_the_models_stay(ranks: Ranks):
    """Before anything is made: the models still have all of their values at stage 3."""
    for words, kept in ranks.run(with_a_schedule_that_lacks_an_argument, 1, world_size=2):
        assert "scheduler.params.total_num_steps is missing" in words and kept


def test_a_config_that_is_a_folder_is_called_one(tmp_path: Path):
    with pytest.raises(DeepSpeedConfigError) as raised:
        read(str(tmp_path), world_size=1)
    assert str(raised.value) == f"{str(tmp_path)!r} is a folder: give the path of a JSON file."


@pytest.mark.parametrize("section", ["", "optimizer", "zero_optimization"])
def test_a_comment_as_a_key_is_given_no_other_key(section: str):
    """``_comment`` is like ``comet``, and ``_comment`` of an optimizer like nothing: neither is suggested."""
    said: dict[str, Any] = {"_comment": "of last week"}
    with pytest.raises(DeepSpeedConfigError) as raised:
        read({"train_batch_size": 1, **({section: said} if section else said)}, world_size=1)
    assert "_comment'" in str(raised.value) and "write a comment as `// ...`" in str(raised.value)
    assert "Did you mean" not in str(raised.value)
