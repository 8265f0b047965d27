"""LoftQ: a rounded weight and two small matrices that together are near the weight (Li et al., arXiv 2310.08659)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfold.plan.formats import FORMATS, format_named

__all__ = ["loftq", "rounded"]

ROUNDS = 5
"""Of algorithm 1, as in its experiments."""


def rounded(value: Tensor, format: str) -> Tensor:
    """What a tensor is, once it has rested in a format; fp32."""
    form = FORMATS[format_named(format, "format of the base")]
    flat = value.detach().float().flatten()
    length = -(-flat.numel() // form.block) * form.block
    payload = torch.empty(form.nbytes(length), dtype=torch.uint8)
    form.encode_tensor(flat, payload)
    found = torch.empty(1, length)
    form.decode(payload.view(1, -1), found)
    return found.flatten()[: flat.numel()].view_as(value)


def loftq(
    weight: Tensor, rank: int, scaling: float, format: str, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rounded weight, ``A`` and ``B``, so that ``rounded + scaling * B A`` is near the weight.

    Args:
        weight: ``(out, in)``.
        rank: of the matrices.
        scaling: that LoRA multiplies their product by.
        format: that the weight is to rest in.
        rounds: how often rounding and decomposition take turns; after each they are nearer, or as near.
    """
    weight = weight.detach().float()
    product = torch.zeros_like(weight)
    base, a, b = weight, weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(weight.shape[0], rank)
    for _ in range(rounds):
        base = rounded(weight - product, format)
        u, s, v = torch.linalg.svd(weight - base, full_matrices=False)
        root = s[:rank].sqrt()
        b, a = u[:, :rank] * root, root[:, None] * v[:rank]
        product = b @ a
    return base, a / scaling**0.5, b / scaling**0.5
