"""GRPO: TRL's loss on the same answers, the same training on any ranks, and that it learns."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tools.tune import Adapter, GRPOConfig
from shardfold.tools.tune.grpo import GRPO, group_advantages
from shardfold.tools.tune.rewards import Completion, rewards_of
from shardfold.tools.tune.rollouts import AnswerBatch
from shardfold.tools.tune.run import TuneRun
from tests.tools.tune.support import model_folder, write_rows

MOST = 6
WORDS = "abcdefgh"


class Kept(GRPO):
    """GRPO that keeps the answers of each step."""

    def __init__(self) -> None:
        self.steps: list[list[AnswerBatch]] = []

    def micros(self, run: TuneRun, drawn: Any) -> list[AnswerBatch]:
        self.steps.append(super().micros(run, drawn))
        return self.steps[-1]


def config(folder: Path, **more: Any) -> GRPOConfig:
    """Of eight prompts, two of which are a step of each rank."""
    data = folder / "prompts.jsonl"
    if not data.is_file():
        model_folder(folder / "model", scale=3.0)
        write_rows(data, [{"prompt": f"say {word * (1 + i % 3)} ", "contains": word} for i, word in enumerate(WORDS)])
    settings: dict[str, Any] = {
        "model": folder / "model", "data": str(data), "cache": folder / "cache", "reward": "contains,ends",
        "max_tokens": MOST, "n": 4, "micro_batch": 1, "accumulate": 2, "lr": 3e-3, "steps": 5, "schedule": "constant",
    }  # fmt: skip
    return GRPOConfig(**{**settings, **more})


def trained(settings: GRPOConfig, recipe: GRPO, steps: int) -> tuple[list[float], TuneRun]:
    """Losses of some steps; the engine is left open."""
    from rich.console import Console

    run = TuneRun(settings, Console(quiet=True), recipe)
    recipe.begin(run)
    windows = iter(run.batches)
    return [run.step(windows).loss for _ in range(steps)], run


def _log_probs(model: Any, micro: AnswerBatch) -> Tensor:
    """(answers, MOST) of each answer's tokens, each text alone; 0 behind its end."""
    found = []
    for each in micro.drawn:
        logits = model(input_ids=torch.tensor([each.prompt + each.tokens])).logits[0, len(each.prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(each.tokens)[:, None]).squeeze(-1)
        found.append(torch.cat([chosen, chosen.new_zeros(MOST - len(each.tokens))]))
    return torch.stack(found)


def _trl_loss(settings: GRPOConfig, model: Any, micro: AnswerBatch, reference: Any, tokens: int) -> Tensor:
    """As TRL's trainer computes it, before it divides by accumulation."""
    from trl import GRPOTrainer

    trainer: Any = object.__new__(GRPOTrainer)
    state = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "importance_sampling_level": "token", "beta": settings.beta, "loss_type": settings.loss,
        "epsilon_low": settings.epsilon, "epsilon_high": settings.epsilon_high or settings.epsilon,
        "max_completion_length": MOST, "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False,
        "model": model, "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value
        ),
        "_metrics": {"train": {}, "eval": {}}, "tools": None,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    }  # fmt: skip
    vars(trainer).update(state)
    from collections import defaultdict

    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    mask = torch.tensor([[1] * len(each.tokens) + [0] * (MOST - len(each.tokens)) for each in micro.drawn])
    found = _log_probs(model, micro)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (found, torch.zeros_like(found), None)
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64), "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask), "completion_mask": mask, "num_items_in_batch": torch.tensor(tokens),
        "advantages": torch.tensor([each.advantage for each in micro.drawn]),
        "old_per_token_logps": None if settings.updates == 1 else _spread(micro.old, mask),
        "ref_per_token_logps": _log_probs(reference, micro).detach(),
    }  # fmt: skip
    return trainer._compute_loss(model, inputs)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    found = torch.zeros(mask.shape)
    found[mask.bool()] = values
    return found


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"loss": "dapo"}, marks=pytest.mark.soak, id="dapo"),
        pytest.param({"loss": "grpo", "beta": 0.1, "epsilon_high": 0.28}, id="grpo-kl"),
        pytest.param({"loss": "dr_grpo", "updates": 2}, id="dr_grpo-twice"),
    ],
)
def test_losses_are_those_of_trl_on_the_same_answers(tmp_path: Path, more: dict[str, Any]) -> None:
    """Twenty updates: ours, and plain PyTorch with TRL's loss and torch's AdamW, from the answers that ours drew."""
    from transformers import AutoModelForCausalLM

    if "beta" in more:
        more = {**more, "reference": "copy"}
    settings, recipe = config(tmp_path, **more), Kept()
    updates = settings.updates
    losses, run = trained(settings, recipe, 20 // updates)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    for loss, micros in zip(losses, recipe.steps, strict=True):
        tokens = sum(len(micro.old) for micro in micros)
        of_updates = []
        for _ in range(updates):
            parts = [_trl_loss(settings, model, micro, reference, tokens) for micro in micros]
            whole = torch.stack(parts).sum() if settings.loss == "dapo" else torch.stack(parts).mean()
            whole.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            of_updates.append(whole.item())
        assert loss == pytest.approx(sum(of_updates) / updates, abs=1e-5)
    if run.recipe.reference is not None:  # pyright: ignore[reportAttributeAccessIssue]
        run.recipe.reference.close()  # pyright: ignore[reportAttributeAccessIssue]
    run.engine.close()


def _on_ranks(folder: str, layout: str, accumulate: int) -> tuple[list[float], list[Any]]:
    settings = config(
        Path(folder), layout=layout, accumulate=accumulate, adapter=Adapter(rank=4), beta=0.1, scale="batch", lr=3e-2
    )
    losses, run = trained(settings, Kept(), 3)
    drawn = [each.tokens for micros in run.recipe.steps for micro in micros for each in micro.drawn]  # pyright: ignore
    run.engine.close()
    return losses, drawn


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_ranks_train_as_one_rank_does(ranks: Ranks, tmp_path: Path) -> None:
    """Parameters split, an adapter, the reference without it, deviations of all rewards: two ranks of one micro-batch
    draw the answers, and have the losses, of one rank of two."""
    alone = _on_ranks(str(tmp_path), "ddp", 2)
    both = ranks.run(_on_ranks, str(tmp_path), "zero3", 1, world_size=2, timeout=200)
    for losses, _ in both:
        assert losses == pytest.approx(alone[0], abs=1e-5)
    assert sorted(both[0][1] + both[1][1]) == sorted(alone[1])


def test_the_first_ratio_is_one_and_the_reference_has_no_adapter(tmp_path: Path) -> None:
    """Log-probabilities as drawn are those of the training forward, and the reference's those of the base."""
    settings = config(tmp_path, adapter=Adapter(rank=4), beta=1e-9, temperature=0.7, lr=0.3, clip_norm=0.0)
    recipe = Kept()
    losses, run = trained(settings, recipe, 2)
    assert len(losses) == 2
    micro = recipe.micros(run, [recipe.steps[-1][0].drawn])[0]
    from shardfold.tools.tune.rollouts import token_log_probs

    base = _base_log_probs(tmp_path, micro, 0.7)
    assert micro.reference is not None
    assert micro.reference.tolist() == pytest.approx(base.tolist(), abs=1e-5)
    with torch.no_grad():
        now = token_log_probs(run.logits(micro.batch), micro.batch, 0.7)
    assert (now - micro.reference).abs().max() > 1e-3  # it has learnt something
    fresh = recipe.micros(run, recipe.draw(run, next(iter(run.batches)), 4))[0]
    with torch.no_grad():
        now = token_log_probs(run.logits(fresh.batch), fresh.batch, 0.7)
    assert now.tolist() == pytest.approx(fresh.old.tolist(), abs=1e-5)
    run.engine.close()


def _base_log_probs(folder: Path, micro: AnswerBatch, temperature: float) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    found = []
    for each in micro.drawn:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([each.prompt + each.tokens])).logits[0, len(each.prompt) - 1 : -1]
        found.append((logits / temperature).log_softmax(-1).gather(-1, torch.tensor(each.tokens)[:, None]).squeeze(-1))
    return torch.cat(found)


def test_advantages_are_of_groups() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    deviation = (2 / 3) ** 0.5
    expected = [-1 / (deviation + 1e-4), 0.0, 0.0, 1 / (deviation + 1e-4), 0.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, "group").flatten().tolist() == pytest.approx(expected)
    assert group_advantages(rewards, "none")[0].tolist() == [-1, 0, 0, 1]
    assert group_advantages(rewards, "batch", 2.0)[0, 3] == pytest.approx(1 / 2.0001)


def _answer(text: str, **row: Any) -> Completion:
    return Completion("", text, True, [], row)


def test_rewards_of_our_own_and_of_a_file(tmp_path: Path) -> None:
    found = rewards_of("contains,ends,gsm8k")
    assert found["contains"](_answer("A Cat sat.", contains="cat")) == 1
    assert found["contains"](_answer("A Cat sat.", contains=["cat", "dog"])) == 0
    assert found["ends"](_answer("")) == 1
    solution = "48/2 = <<48/2=24>>24\n#### 1,024"
    assert [found["gsm8k"](_answer(text, answer=solution)) for text in ("so 1024.", "#### 1,024.0", "#### 7", "")] == [
        0, 1, 0, 0
    ]  # fmt: skip
    (tmp_path / "mine.py").write_text(
        "def short(answer):\n    return -len(answer.text)\n\ndef bad(answer):\n    return None\n"
    )
    mine = rewards_of(f"ends, {tmp_path}/mine.py:short")
    assert mine["short"](_answer("four")) == -4
    with pytest.raises(ConfigError, match="is a finite number"):
        rewards_of(f"{tmp_path}/mine.py:bad")["bad"](_answer(""))
    with pytest.raises(ConfigError, match=r"no function 'shirt'.*'short'"):
        rewards_of(f"{tmp_path}/mine.py:shirt")
    with pytest.raises(ConfigError, match=r"no reward 'end'.*'ends'"):
        rewards_of("end")
    with pytest.raises(ConfigError, match="column 'contains' is None"):
        found["contains"](_answer("a"))


@pytest.mark.parametrize(
    "more, words",
    [
        ({"beta": 0.1}, "there is none: give --lora 16"),
        ({"sequence": 2}, "leave --sequence out"),
        ({"pipeline": 2}, "leave --pipeline out"),
        ({"adapter": {"kind": "prefix"}}, "not drawn with a prefix"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        config(tmp_path, **more)
