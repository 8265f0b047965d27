"""PPO: plain PyTorch's losses on the same answers, the same training on any ranks, and checkpoints of both models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfold.testing import Ranks
from shardfold.tools.tune import Adapter, PPOConfig
from shardfold.tools.tune.ppo import PPO, advantages_of
from shardfold.tools.tune.rollouts import AnswerBatch, DrawnAnswer, token_log_probs
from shardfold.tools.tune.run import TuneRun
from tests.tools.tune.support import model_folder, tiny_tokenizer, write_rows

MOST = 6
WORDS = "abcdefgh"
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "ppo.json").read_text())
"""Of TRL's last PPO, by benchmarks/ppo_values.py."""


class Kept(PPO):
    """PPO that keeps the answers of each step, and the value model's first values."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[AnswerBatch]] = []
        self.value_losses: list[float] = []

    def begin(self, run: TuneRun) -> None:
        super().begin(run)
        self.first = {name: value.clone() for name, value in self._engine.state_dict().items()}

    def micros(self, run: TuneRun, drawn: Any) -> list[AnswerBatch]:
        self.steps.append(super().micros(run, drawn))
        return self.steps[-1]


def config(folder: Path, **more: Any) -> PPOConfig:
    """Of eight prompts, two of which are a step of one rank."""
    data = folder / "prompts.jsonl"
    if not data.is_file():
        model_folder(folder / "model", scale=3.0)
        write_rows(data, [{"prompt": f"say {word * (1 + i % 3)} ", "contains": word} for i, word in enumerate(WORDS)])
    settings: dict[str, Any] = {
        "model": folder / "model", "data": str(data), "cache": folder / "cache", "reward": "contains,ends",
        "max_tokens": MOST, "n": 3, "micro_batch": 1, "accumulate": 2, "lr": 3e-3, "steps": 5, "schedule": "constant",
    }  # fmt: skip
    return PPOConfig(**{**settings, **more})


def trained(settings: PPOConfig, recipe: PPO, steps: int) -> tuple[list[float], list[float], TuneRun]:
    """Losses of policy and value model; the engines are left open."""
    from rich.console import Console

    run = TuneRun(settings, Console(quiet=True), recipe)
    recipe.begin(run)
    windows = iter(run.batches)
    found = [run.step(windows) for _ in range(steps)]
    return [each.loss for each in found], [each.figures["value_loss"] for each in found], run


def _padded(parts: list[Tensor]) -> Tensor:
    return torch.stack([torch.cat([part, part.new_zeros(MOST - len(part))]) for part in parts])


def _policy(model: Any, micro: AnswerBatch) -> Tensor:
    """(answers, MOST), each text alone; 0 behind its end."""
    found = []
    for each in micro.drawn:
        logits = model(input_ids=torch.tensor([each.prompt + each.tokens])).logits[0, len(each.prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(each.tokens)[:, None]).squeeze(-1))
    return _padded(found)


def _values(model: Any, micro: AnswerBatch) -> Tensor:
    found = []
    for each in micro.drawn:
        hidden = model.model(input_ids=torch.tensor([each.prompt + each.tokens])).last_hidden_state
        found.append(model.score(hidden)[0, len(each.prompt) - 1 : -1, 0])
    return _padded(found)


def _judged(settings: PPOConfig, micros: list[AnswerBatch], policy: Any, value: Any, reference: Any) -> list[Any]:
    """By whole tables of answers and places, as TRL's trainer has them: old log-probabilities, values, advantages,
    returns, masks."""
    rows = []
    with torch.no_grad():
        for micro in micros:
            mask = _padded([torch.ones(len(each.tokens)) for each in micro.drawn])
            old, values = _policy(policy, micro), _values(value, micro)
            rewards = -settings.beta * (old - _policy(reference, micro)) * mask
            for row, each in enumerate(micro.drawn):
                rewards[row, len(each.tokens) - 1] += each.reward
            advantages, last = torch.zeros_like(values), torch.zeros(len(values))
            for t in reversed(range(MOST)):
                ahead = values[:, t + 1] * mask[:, t + 1] if t + 1 < MOST else 0.0
                delta = rewards[:, t] + settings.gamma * ahead - values[:, t]
                last = (delta + settings.gamma * settings.lam * last) * mask[:, t]
                advantages[:, t] = last
            rows.append([old, values, advantages, advantages + values, mask])
    every = torch.cat([advantages[mask > 0] for _, _, advantages, _, mask in rows])
    for row in rows:
        row[2] = (row[2] - every.mean()) / (every.var() + 1e-8).sqrt()
    return rows


def _update(model: Any, optimizer: Any, loss: Tensor, norm: float) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    optimizer.zero_grad()


def test_losses_are_those_of_plain_pytorch_on_the_same_answers(tmp_path: Path) -> None:
    """Twenty updates of both models, by tables of all answers and places, from the answers that ours drew."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    settings, recipe = config(tmp_path, reference="copy", lam=0.9, gamma=0.97, value_lr=1e-2), Kept()
    losses, value_losses, run = trained(settings, recipe, 5)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    value = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    value.load_state_dict(recipe.first)
    reference = copy.deepcopy(policy)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        for model, lr in ((policy, settings.lr), (value, settings.value_lr))
    ]
    for step, micros in enumerate(recipe.steps):
        rows = _judged(settings, micros, policy, value, reference)
        count = sum(mask.sum() for *_, mask in rows)
        found, found_values = [], []
        for _ in range(settings.updates):
            loss = value_loss = torch.zeros(())
            for micro, (old, values, advantages, returns, mask) in zip(micros, rows, strict=True):
                ratio = (_policy(policy, micro) - old).exp()
                worst = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
                loss = loss + (worst * mask).sum() / count
                expected = _values(value, micro)
                near = torch.clamp(expected, values - settings.value_clip, values + settings.value_clip)
                errors = torch.max((expected - returns) ** 2, (near - returns) ** 2)
                value_loss = value_loss + 0.5 * (errors * mask).sum() / count
            _update(policy, optimizers[0], loss, settings.clip_norm)
            _update(value, optimizers[1], value_loss, settings.clip_norm)
            found.append(loss.item())
            found_values.append(value_loss.item())
        assert losses[step] == pytest.approx(sum(found) / settings.updates, abs=1e-5)
        assert value_losses[step] == pytest.approx(sum(found_values) / settings.updates, abs=1e-5)
    recipe.close()
    run.engine.close()


class Given(PPO):
    """PPO whose answers and rewards are given, by step."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self._case = case

    def draw(self, run: TuneRun, window: Any, n: int) -> list[list[DrawnAnswer]]:
        answers, rewards = self._case["answers"][run.done], self._case["rewards"][run.done]
        mine = range(run.engine.data_rank, len(answers), run.engine.data_ranks)
        return [
            [
                DrawnAnswer(row, self._case["prompts"][row], answers[row], [0.0] * len(answers[row]), True,
                            {"given": rewards[row]})
                for row in mine
            ]
        ]  # fmt: skip

    def micros(self, run: TuneRun, drawn: Any) -> list[AnswerBatch]:
        found = super().micros(run, drawn)
        with torch.no_grad():
            for each in found:
                each.old = token_log_probs(run.logits(each.batch), each.batch, 1.0)
        return found


def _written(folder: Path) -> None:
    """TRL's models."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    sizes = LlamaConfig(**GOLDEN["sizes"], num_labels=1)
    for said, kind in (("policy", AutoModelForCausalLM), ("value", AutoModelForSequenceClassification)):
        model = kind.from_config(sizes, dtype=torch.float32)
        kept = GOLDEN["weights"][said].items()
        model.load_state_dict({name: torch.tensor(numbers) * GOLDEN["scale"] for name, numbers in kept})
        model.save_pretrained(folder / said)
        tiny_tokenizer().save_pretrained(folder / said)
    write_rows(folder / "prompts.jsonl", [{"prompt": "a"}] * 8)


def as_trl(folder: str, name: str, layout: str) -> tuple[list[float], list[float]]:
    """Losses of TRL's models, answers and rewards, on these ranks."""
    own, case = Path(folder), GOLDEN["cases"][name]
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    given = {key: case["settings"][key] for key in ("lr", "beta", "epsilon", "value_clip", "gamma", "lam")}
    settings = PPOConfig(
        model=own / "policy", value=own / "value", data=str(own / "prompts.jsonl"), cache=own / "cache", layout=layout,
        reward="ends", reference="copy", n=1, max_tokens=MOST, micro_batch=4 // world, clip_norm=0.0, seed=0,
        steps=len(case["losses"]), schedule="constant", updates=GOLDEN["updates"],
        value_lr=1e-30 if case["settings"]["ends"] else None, **given,
    )  # fmt: skip
    recipe = Given(case)
    losses, value_losses, run = trained(settings, recipe, len(case["losses"]))
    recipe.close()
    run.engine.close()
    return losses, value_losses


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("whole", 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("whole", 1), ("ended", 1), ("ended", 2))),
    ],
)
def test_losses_are_those_of_trl(name: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    """Twenty steps of three updates within 1e-5 of what TRL's last PPO made of the same answers: of both models where
    answers are as long as they may be, of the policy where they end."""
    case = GOLDEN["cases"][name]
    _written(tmp_path)
    layout = "ddp" if world == 1 else "zero3"
    losses, value_losses = ranks.run(as_trl, str(tmp_path), name, layout, world_size=world)[0]
    assert losses == pytest.approx(case["losses"], abs=1e-5, rel=1e-5)
    if "value_losses" in case:
        assert value_losses == pytest.approx(case["value_losses"], abs=1e-5, rel=1e-5)


def _on_ranks(folder: str, layout: str, accumulate: int) -> tuple[list[float], list[float]]:
    settings = config(Path(folder), layout=layout, accumulate=accumulate, adapter=Adapter(rank=4), updates=2, lr=1e-2)
    recipe = Kept()
    losses, value_losses, run = trained(settings, recipe, 3)
    recipe.close()
    run.engine.close()
    return losses, value_losses


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_ranks_train_as_one_rank_does(ranks: Ranks, tmp_path: Path) -> None:
    """Parameters split, adapters, the reference without them, advantages whitened over the tokens of both ranks."""
    alone = _on_ranks(str(tmp_path), "ddp", 2)
    for found in ranks.run(_on_ranks, str(tmp_path), "zero3", 1, world_size=2, timeout=200):
        assert found[0] == pytest.approx(alone[0], abs=1e-5)
        assert found[1] == pytest.approx(alone[1], abs=1e-5)


def test_advantages_by_hand() -> None:
    """Two answers behind each other, of two tokens and of one."""
    rewards, values = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.1, 0.2, 0.4])
    last = 1.0 - 0.2
    first = 0.5 + 0.9 * 0.2 - 0.1 + 0.9 * 0.5 * last
    assert advantages_of(rewards, values, [2, 1], 0.9, 0.5).tolist() == pytest.approx([first, last, 1.6])


def test_a_run_goes_on_with_both_models(tmp_path: Path) -> None:
    """Losses after a checkpoint are those of a run that did not stop."""
    from shardfold.tools.tune import tune

    whole = tune(config(tmp_path, beta=0, steps=4, out=tmp_path / "whole"))
    tune(config(tmp_path, beta=0, steps=2, save_every=2, out=tmp_path / "half"))
    rest = tune(config(tmp_path, beta=0, steps=4, resume=tmp_path / "half", out=tmp_path / "rest"))
    assert rest.losses == whole.losses[2:]
    assert rest.figures == whole.figures


def test_a_value_model_is_there_for_each_policy_that_may_be_the_latest(tmp_path: Path) -> None:
    """Its checkpoint is whole before the policy's is begun, and stays for as long as a kill could leave the policy's
    one before the last as the latest."""
    begun: list[bool] = []

    class Watching(PPO):
        def saving(self, run: TuneRun, path: Path) -> None:
            super().saving(run, path)
            begun.append(path.exists())

    _, _, run = trained(config(tmp_path, beta=0, keep=1, save_every=1), recipe := Watching(), 0)
    windows, out = iter(run.batches), tmp_path / "run"
    for _ in range(4):
        run.step(windows)
        run.save(out)
    recipe.close()
    run.engine.close()
    assert begun == [False] * 4
    names = {kind: [each.name for each in sorted((out / kind).glob("step-*"))] for kind in ("checkpoints", "value")}
    assert names == {"checkpoints": ["step-000004"], "value": [f"step-{step:06d}" for step in (2, 3, 4)]}
