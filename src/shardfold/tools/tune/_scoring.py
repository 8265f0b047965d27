"""How likely a model finds given tokens: the one measure below loss, bits per byte, accuracy and choices.

Rows are put into batches by their lengths, batches are dealt out to the data ranks, and what comes back is a score per
row, the same on every rank. Each row's sum is formed on one rank, so totals do not depend on how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import shardfold as sf
from shardfold.tools.observe.working_line import working
from shardfold.tools.tune.data.packing import best_fit
from shardfold.tools.tune.data.rows import Tokens

__all__ = ["Forward", "RowScore", "score_rows", "windows_of"]

Forward = Callable[[Mapping[str, Tensor]], Tensor]
"""From ``input_ids`` and ``position_ids``, each (B, L) int64, to logits (B, L, vocabulary). Ranks call it together."""

MOST_LOGITS = 1 << 24
"""So many logits are made floats and normalized at once: 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class RowScore:
    """Of the scored tokens of one row.

    Attributes:
        log_prob: sum of their log-probabilities, in nats.
        tokens: how many they are.
        likeliest: how many of them were the likeliest token at their place.
    """

    log_prob: float
    tokens: int
    likeliest: int

    @property
    def greedy(self) -> bool:
        """Whether greedy generation would have given these tokens."""
        return self.likeliest == self.tokens


def score_rows(
    engine: sf.Engine, forward: Forward, rows: Sequence[Tokens], *, batch_tokens: int, pack: int = 0
) -> list[RowScore]:
    """Score the trained tokens of every row; all ranks call it with the same rows.

    A row's first token has nothing before it and is never scored.

    Args:
        batch_tokens: of a batch, padding included; a longer row is a batch by itself.
        pack: rows are put one behind the other into lines of so many tokens; 0: each row is a line, padded.

    Raises:
        ConfigError: the model gives logits that are not finite.
    """
    batches = list(_batches(rows, batch_tokens, pack))
    often = math.ceil(len(batches) / engine.data_ranks)
    found = [[-math.inf, -math.inf] for _ in rows]
    with torch.no_grad(), working("scoring", unit="batches") as line:
        for turn in range(often):
            line.amount(turn, often)
            number = turn * engine.data_ranks + engine.data_rank
            batch = batches[min(number, len(batches) - 1)]  # ranks whose batches are done go along with the others
            scores = batch.score(forward, rows, engine.device)
            if number < len(batches):
                for row, (log_prob, likeliest) in scores.items():
                    found[row] = [log_prob, float(likeliest)]
    told = engine.max_over_ranks([value for pair in found for value in pair]) if rows else []
    return [
        RowScore(log_prob=told[2 * row], tokens=tokens.targets, likeliest=int(told[2 * row + 1]))
        for row, tokens in enumerate(rows)
    ]


def windows_of(ids: Sequence[int], first: int, length: int) -> list[tuple[list[int], int]]:
    """Cut a text that may be longer than the model's context: what is read, and how many of its last tokens count.

    Every token counts once. A window begins with the last token of the one before, the first one with `first`, such as
    the token that begins or ends a text. The last window is filled up with what stands before it.

    Returns:
        Of each window up to `length` + 1 tokens, and the number of those at its end that are scored.
    """
    whole = [first, *ids]
    found: list[tuple[list[int], int]] = []
    for begin in range(0, len(ids), length):
        end = min(begin + length, len(ids))
        found.append((whole[max(0, end - length) : end + 1], end - begin))
    return found


@dataclass(frozen=True)
class _Lines:
    """A batch: of each line the numbers of its rows, in order."""

    lines: list[list[int]]

    def score(self, forward: Forward, rows: Sequence[Tokens], device: torch.device) -> dict[int, tuple[float, int]]:
        """Sum of log-probabilities and count of likeliest tokens of each row."""
        width = max(sum(len(rows[row].ids) for row in line) for line in self.lines)
        ids = torch.zeros(len(self.lines), width, dtype=torch.int64)
        positions = torch.zeros_like(ids)
        owner = torch.full_like(ids, -1)  # of the row whose next token is scored here
        for place, line in enumerate(self.lines):
            at = 0
            for row in line:
                count = len(rows[row].ids)
                ids[place, at : at + count] = torch.from_numpy(rows[row].ids)
                positions[place, at : at + count] = torch.arange(count)
                scored = torch.from_numpy(rows[row].trained[1:].copy())
                owner[place, at : at + count - 1] = torch.where(scored, row, -1)
                at += count
            positions[place, at:] = torch.arange(width - at)  # padding is a document of its own
        if all(len(line) == 1 for line in self.lines):
            positions[:] = torch.arange(width)  # what follows a row does not reach it
        read = max(1, width - 1)  # behind the last token nothing is predicted
        logits = forward({"input_ids": ids[:, :read].to(device), "position_ids": positions[:, :read].to(device)})
        where = (owner >= 0)[:, :read]
        targets = ids[:, 1:][where[:, : width - 1]].to(logits.device)
        log_probs, likeliest = _log_probs(logits[where.to(logits.device)], targets)
        whose = owner[:, :read][where]
        return {
            row: (math.fsum(log_probs[whose == row].tolist()), int(likeliest[whose == row].sum()))
            for line in self.lines
            for row in line
        }


def _log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, (N,) fp64 on the host, and whether it was the likeliest, (N,) bool."""
    values: list[Tensor] = []
    likeliest: list[Tensor] = []
    step = max(1, MOST_LOGITS // max(1, logits.shape[-1]))
    for part, wanted in zip(logits.split(step), targets.split(step), strict=True):
        whole = part.float()
        if not whole.isfinite().all():
            raise sf.ConfigError("the model gives logits that are inf or NaN, so nothing can be scored with it.")
        values.append(whole.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double().cpu())
        likeliest.append((whole.argmax(-1) == wanted).cpu())
    return torch.cat(values), torch.cat(likeliest)


def _batches(rows: Sequence[Tokens], batch_tokens: int, pack: int) -> Iterator[_Lines]:
    """Long rows first, so that a batch's rows are about as long as each other."""
    lines = best_fit([len(each) for each in rows], pack) if pack else [[row] for row in range(len(rows))]
    lengths = [sum(len(rows[row].ids) for row in line) for line in lines]
    batch: list[list[int]] = []
    width = 0
    for line in sorted(range(len(lines)), key=lambda each: (-lengths[each], each)):
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield _Lines(batch)
            batch = []
        width = width if batch else lengths[line]
        batch.append(lines[line])
    if batch:
        yield _Lines(batch)
