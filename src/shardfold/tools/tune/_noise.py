"""Noise on embeddings while a model is tuned: NEFTune (Jain et al., arXiv 2310.05914)."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EmbeddingNoise", "sample_lengths"]


def sample_lengths(documents: Tensor) -> Tensor:
    """Of each token of a batch the number of tokens that its sample has.

    Args:
        documents: ``(B, L)``, the number of each token's sample; -1 for padding.

    Returns:
        ``(B, L)`` int64, at least 1.
    """
    counts = torch.zeros(int(documents.max()) + 2, dtype=torch.int64, device=documents.device)
    numbers = documents.long() + 1
    counts.index_add_(0, numbers.flatten(), torch.ones_like(numbers).flatten())
    return counts[numbers].clamp(min=1)


class EmbeddingNoise:
    """Adds to what the embedding gives, while the model trains, noise of U(-1, 1) times ``alpha / sqrt(L d)``.

    L is the number of tokens of the sample, and d the width, as in the paper. The draws are of (seed, rank, step).

    Args:
        model: of transformers, or peft's wrapper of it.
        alpha: the paper's.
        seed: of the draws.

    Attributes:
        lengths: ``(B, L)`` of the batch that comes next, the number of tokens of each token's sample.
    """

    def __init__(self, model: Any, alpha: float, seed: int) -> None:
        self._alpha, self._seed = alpha, seed
        self._draw = torch.Generator()
        self.lengths: Tensor | None = None
        embedding: nn.Module = model.get_input_embeddings()
        embedding.register_forward_hook(self._add)

    def step(self, place: tuple[int, ...], step: int) -> None:
        """A step begins: what is drawn in it depends on no other one, and on this rank's place."""
        self._draw.manual_seed(zlib.crc32(f"{self._seed}/{place}/{step}".encode()))

    def _add(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not module.training or not torch.is_grad_enabled():
            return output
        lengths = self.lengths if self.lengths is not None else torch.tensor(output.shape[1])
        scale = self._alpha / (lengths.to(output.device, torch.float32) * output.shape[-1]).sqrt()
        noise = torch.empty(output.shape).uniform_(-1, 1, generator=self._draw).to(output.device)
        return output + (noise * scale.reshape(*scale.shape, *[1] * (output.ndim - scale.ndim))).to(output.dtype)
