"""A small learned matcher: a residual network that says of two embeddings whether they are of one identity.

It is trained on pairs of embeddings of training images, as many genuine as impostor ones, of which half are the hardest
of their batch. Its input is the same for (a, b) and (b, a): their product and their distance, element by element.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.tools.recipes.face.verification import Scores

__all__ = ["Matcher", "fit", "scores_of"]

STEPS, PAIRS = 300, 256
ROWS = 8  # that are scored against all at once


class Residual(nn.Module):
    """``x + f(x)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.relu(self.one(F.relu(x))))


class Matcher(nn.Module):
    """Two embeddings ``(..., d)`` to a score ``(...)``: their cosine, and what the network adds."""

    def __init__(self, embedding: int, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(2 * embedding, width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.out = nn.Linear(width, 1)
        self.slope = nn.Parameter(torch.tensor(10.0))
        nn.init.zeros_(self.out.weight)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        size = a.shape[-1] ** 0.5
        seen = torch.cat(torch.broadcast_tensors(a * b * size, (a - b).abs() * size), -1)
        return self.slope * (a * b).sum(-1) + self.out(F.relu(self.blocks(self.into(seen)))).squeeze(-1)


def fit(embeddings: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], seed: int = 0) -> Matcher:
    """A matcher for pairs of these."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        matcher = Matcher(embeddings.shape[1])
    x, y = torch.from_numpy(embeddings), torch.from_numpy(labels)
    order = torch.argsort(y, stable=True)
    x, y = x[order], y[order]
    optimizer = torch.optim.AdamW(matcher.parameters(), lr=2e-3)
    for _ in range(STEPS):
        a = torch.randint(len(x), (PAIRS,), generator=draw)
        near = (a + 1).clamp(max=len(x) - 1)  # images lie beside others of their identity
        near = torch.where(y[near] == y[a], near, (a - 1).clamp(min=0))
        far = torch.randint(len(x), (4, PAIRS), generator=draw)
        hardest = (F.normalize(x[far], dim=-1) * F.normalize(x[a], dim=-1)).sum(-1).argmax(0)
        far = torch.where(torch.rand(PAIRS, generator=draw) < 0.5, far[hardest, torch.arange(PAIRS)], far[0])
        scores = matcher(torch.cat([x[a], x[a]]), torch.cat([x[near], x[far]]))
        same = torch.cat([y[a] == y[near], y[a] == y[far]]).float()
        loss = F.binary_cross_entropy_with_logits(scores, same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return matcher


def scores_of(matcher: Matcher, embeddings: npt.NDArray[np.float32]) -> Scores:
    """Of pairs of these embeddings."""
    x = torch.from_numpy(embeddings)

    @torch.no_grad()
    def scores(start: int, stop: int) -> npt.NDArray[np.float32]:
        parts = [matcher(x[at : min(at + ROWS, stop), None], x[None]).numpy() for at in range(start, stop, ROWS)]
        return np.concatenate(parts)

    return scores
