"""Log-probabilities of samples, as losses need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch
    from shardfold.tools.tune.run import TuneRun

__all__ = ["by_sample", "number_of_samples", "sample_log_probs", "token_log_probs"]

IGNORED = -100


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label, fp32; 0 where there is none.

    Args:
        logits: ``(B, L, vocabulary)``.
        labels: ``(B, L)``, -100 where nothing is predicted.

    Returns:
        ``(B, L)``.
    """
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view_as(labels)


def number_of_samples(batch: Batch) -> int:
    """How many samples a batch has; 0 of a rank for which none is left."""
    return int(batch.documents.max()) + 1


def by_sample(run: TuneRun, values: Tensor, part: Batch, samples: int) -> Tensor:
    """The sum of each sample's tokens, ``(samples,)``; over the ranks that share sequences too.

    Args:
        values: ``(B, L)``, of this rank's part of a batch.
        part: that part.
        samples: of the whole batch.
    """
    inside = part.documents >= 0
    sums = torch.zeros(samples, dtype=values.dtype, device=values.device)
    return run.summed(sums.index_add(0, part.documents[inside].long(), values[inside]))


def sample_log_probs(run: TuneRun, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probability and number of the targets of each sample, both ``(samples,)``."""
    part, samples = run.on_rank(batch), number_of_samples(batch)
    sums = by_sample(run, token_log_probs(run.logits(part), part.labels), part, samples)
    with torch.no_grad():
        counts = by_sample(run, (part.labels != IGNORED).float(), part, samples)
    return sums, counts
