"""Which parameters are matrices of hidden layers, as optimizers of whole matrices sort them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["hidden_matrices"]


def hidden_matrices(model: nn.Module, others: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of hidden layers among the trainable parameters, and the rest: what has not two dims, what an
    ``nn.Embedding`` holds (and what is tied to it), and what a pattern of ``others`` names."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        hidden = p.dim() == 2 and id(p) not in embeddings and not any(fnmatchcase(name, o) for o in others)
        if p.requires_grad:
            (matrices if hidden else rest).append(p)
    return matrices, rest
