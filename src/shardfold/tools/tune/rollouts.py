"""Answers of the model that trains, what they are worth, and batches of them.

Answers are drawn with :func:`shardfold.generate` from the engine itself: there is one set of weights, and the
log-probabilities that come with an answer are those of the training forward.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

import shardfold as sf
from shardfold.tools.tune.adapters import beginning, without_adapter
from shardfold.tools.tune.config import RolloutConfig
from shardfold.tools.tune.data.batches import Batch, Window, collate
from shardfold.tools.tune.data.rows import Tokens
from shardfold.tools.tune.models import hollow_model
from shardfold.tools.tune.rewards import Completion, rewards_of
from shardfold.tools.tune.run import Loss, Recipe, Totals

if TYPE_CHECKING:
    from shardfold.tools.tune.run import TuneRun

__all__ = [
    "AnswerBatch",
    "DrawnAnswer",
    "RolloutRecipe",
    "RolloutTotals",
    "mean_of_answers",
    "token_log_probs",
    "values_at",
]

SHOWN = 4
"""Answers of a step that samples.jsonl keeps."""


@dataclass(eq=False)
class DrawnAnswer:
    """One answer.

    Attributes:
        row: of its prompt, in the data.
        prompt, tokens: token numbers.
        log_probs: of its tokens, as it was drawn.
        ended: whether at a stop token.
        rewards: by name.
        advantage: a number for all of its tokens.
    """

    row: int
    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    ended: bool
    rewards: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())


@dataclass(eq=False)
class AnswerBatch:
    """The answers of one forward and backward.

    Attributes:
        drawn: in the order of the batch's samples.
        batch: prompts and answers, on the rank's device; answers are its targets.
        old: (targets,) log-probabilities as the answers were drawn.
        reference: (targets,) the same of the reference; None: there is none.
    """

    drawn: list[DrawnAnswer]
    batch: Batch
    old: Tensor
    reference: Tensor | None = None

    @property
    def sample(self) -> Tensor:
        """(targets,) int64: which answer each target is of."""
        return self.batch.documents[self.batch.labels != -100].long()

    @property
    def lengths(self) -> Tensor:
        """(answers,) tokens of each."""
        return torch.bincount(self.sample, minlength=len(self.drawn))


def values_at(logits_or_values: Tensor, batch: Batch) -> Tensor:
    """What stands where something is predicted: ``(B, L, ...)`` to ``(targets, ...)``, in the order of the samples."""
    return logits_or_values[batch.labels != -100]


def token_log_probs(logits: Tensor, batch: Batch, temperature: float) -> Tensor:
    """(targets,) of what each target is, at that temperature, in fp32."""
    scores = values_at(logits, batch).float() / temperature
    labels = batch.labels[batch.labels != -100]
    return scores.gather(-1, labels[:, None]).squeeze(-1) - scores.logsumexp(-1)


def mean_of_answers(values: Tensor, micro: AnswerBatch) -> Tensor:
    """(targets,) to (answers,): the mean of each answer's tokens."""
    sums = torch.zeros(len(micro.drawn), dtype=values.dtype, device=values.device)
    return sums.index_add(0, micro.sample, values) / micro.lengths.clamp(min=1)


class RolloutTotals(Totals):
    """Sums of a step, and what its answers were."""

    def __init__(self, drawn: Sequence[DrawnAnswer], rewards: Sequence[str]) -> None:
        super().__init__()
        self._drawn, self._names = drawn, rewards

    def means(self, engine: sf.Engine) -> dict[str, float]:
        """Over all targets, and of rewards, lengths and ends over all answers, of all ranks."""
        found, count = super().means(engine), len(self._drawn)
        sums = {
            "reward": [each.reward for each in self._drawn],
            "answer_tokens": [float(len(each.tokens)) for each in self._drawn],
            "ended": [float(each.ended) for each in self._drawn],
        }
        if len(self._names) > 1:
            for name in self._names:
                sums[f"reward_{name}"] = [each.rewards[name] for each in self._drawn]
        for name, values in sums.items():
            found[name] = engine.mean(sum(values) / max(count, 1), weight=float(count))
        return found


class RolloutRecipe(Recipe):
    """Learns from its own answers. A step draws answers to a window of prompts, rates them, and takes ``updates``
    optimizer steps on them."""

    def begin(self, run: TuneRun) -> None:
        config = run.config
        assert isinstance(config, RolloutConfig)
        self.rewards = rewards_of(config.reward)
        self.reference = _frozen(run) if config.beta and config.reference == "copy" else None

    def close(self) -> None:
        if self.reference is not None:
            self.reference.close()

    # -- answers

    def draw(self, run: TuneRun, window: Window, n: int) -> list[list[DrawnAnswer]]:
        """``n`` answers to each prompt of each micro-batch, rated."""
        config: Any = run.config
        rows: Any = run.rows
        prompts = [[(row, rows[row]) for row in batch.rows] for batch in window.batches]
        flat = [each for part in prompts for each in part]
        stops: Any = run.stops()
        stop = [stops] if isinstance(stops, int) else stops
        answers = sf.generate(
            run.engine,
            [prompt.ids.tolist() for _, prompt in flat],
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            n=n,
            pages=config.pages,
            seed=[_seed(config.seed, run.done, row) for row, _ in flat],
            stop=stop,
        )
        found: list[list[DrawnAnswer | None]] = [[None] * n for _ in flat]
        for each in answers:
            row, prompt = flat[each.request]
            found[each.request][each.sample] = DrawnAnswer(
                row, prompt.ids.tolist(), each.tokens, each.log_probs, each.finish == "stop"
            )
        drawn = [each for part in found for each in part if each is not None]
        for each in drawn:
            self._rate(run, each)
        sizes = [len(part) * n for part in prompts]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [drawn[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _rate(self, run: TuneRun, drawn: DrawnAnswer) -> None:
        tokenizer, rows = run.tokenizer, cast(Any, run.rows)
        answer = Completion(
            prompt=tokenizer.decode(drawn.prompt),
            text=tokenizer.decode(drawn.tokens, skip_special_tokens=True),
            ended=drawn.ended,
            tokens=drawn.tokens,
            row=rows[drawn.row].fields,
        )
        drawn.rewards = {name: reward(answer) for name, reward in self.rewards.items()}

    def micros(self, run: TuneRun, drawn: Sequence[Sequence[DrawnAnswer]]) -> list[AnswerBatch]:
        """Batches of them, with the reference's log-probabilities."""
        config: Any = run.config
        found = []
        for part in drawn:
            samples = [
                Tokens(
                    np.array(each.prompt + each.tokens, np.int32),
                    np.arange(len(each.prompt) + len(each.tokens)) >= len(each.prompt),
                )
                for each in part
            ]
            bins = [[(each.row, [tokens])] for each, tokens in zip(part, samples, strict=True)]
            batch = run.on_rank(collate(bins, padded=True, pad=run.tokenizer.pad_token_id or 0))
            old = torch.tensor([value for each in part for value in each.log_probs], device=run.engine.device)
            found.append(AnswerBatch(list(part), batch, old))
        if config.beta:
            run.model.eval()
            with torch.no_grad(), self._as_reference(run):
                for each in found:
                    logits = run.logits(each.batch) if self.reference is None else self._copied(each.batch)
                    each.reference = token_log_probs(logits, each.batch, config.temperature)
            run.model.train()
        return found

    def _as_reference(self, run: TuneRun) -> AbstractContextManager[None]:
        return without_adapter(run.model) if self.reference is None else nullcontext()

    def _copied(self, batch: Batch) -> Tensor:
        assert self.reference is not None
        return self.reference(**batch.inputs, use_cache=False).logits

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """Of an evaluation: what answers to the prompts are worth, one to each; less is better, so their rewards count
        below zero."""
        drawn = self.draw(run, Window([batch], 0), 1)[0]
        rewards = torch.tensor([each.reward for each in drawn])
        ended = torch.tensor([float(each.ended) for each in drawn])
        count = max(len(drawn), 1)
        return Loss(
            -rewards.sum() / count, float(len(drawn)), {"reward": rewards.sum() / count, "ended": ended.sum() / count}
        )

    # -- steps

    def step(self, run: TuneRun, windows: Iterator[Window]) -> tuple[Any, Totals]:
        window = next(windows)
        drawn = self.draw(run, window, self.answers(run))
        micros = self.micros(run, drawn)
        self.weigh(run, micros)
        flat = [each for part in drawn for each in part]
        if run.out is not None and run.leads:
            self._write(run, run.out, flat[:SHOWN])
        said, totals = None, RolloutTotals(flat, list(self.rewards))
        config: Any = run.config
        for _ in range(config.updates):
            for micro in micros:
                loss = self.loss_of(run, micro)
                run.engine.backward(loss.value, weight=loss.weight)
                said = run.engine.step(tokens=int((micro.batch.documents >= 0).sum()))
                totals.add(loss, micro.batch)
        return said, totals

    def answers(self, run: TuneRun) -> int:
        """To each prompt."""
        raise NotImplementedError

    def weigh(self, run: TuneRun, micros: Sequence[AnswerBatch]) -> None:
        """Says how much better than expected each answer, or each token, is."""
        raise NotImplementedError

    def loss_of(self, run: TuneRun, micro: AnswerBatch) -> Any:
        """Of one micro-batch of answers."""
        raise NotImplementedError

    def _write(self, run: TuneRun, out: Path, drawn: Sequence[DrawnAnswer]) -> None:
        decode = run.tokenizer.decode
        with (out / "samples.jsonl").open("a", encoding="utf-8") as file:
            for each in drawn:
                row = {
                    "step": run.done + 1,
                    "prompt": decode(each.prompt),
                    "answer": decode(each.tokens),
                    "ended": each.ended,
                    "reward": each.reward,
                    "rewards": each.rewards,
                }
                file.write(json.dumps(row) + "\n")


def _seed(seed: int, step: int, row: int) -> int:
    """Of a prompt's draws: the same on whichever rank it is."""
    said = hashlib.blake2b(f"{seed} {step} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(said, "little") >> 1


def _frozen(run: TuneRun) -> sf.Engine:
    """The model as it began, in an engine of its own, which only runs forward."""
    config = run.config
    model, tensors = beginning(hollow_model(copy.deepcopy(run.model_config), "lm"), run.place, None, "lm", config.seed)
    model.requires_grad_(False)
    engine = sf.Engine(
        model,
        layout=config.table(),
        precision=config.precision,
        init=sf.Init(weights=tensors, seed=config.seed),
        parallel=sf.Parallel(
            mesh={axis: ranks for axis, ranks in config.axes().items() if ranks > 1} or None,
            tensor="auto" if config.tensor > 1 else None,
        ),
    )
    model.eval()
    return engine
