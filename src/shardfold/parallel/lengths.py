"""What a module is made to have in place of a whole: a part of a parameter, and numbers of its own shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["adapt_lengths", "is_transposed", "keep_part"]


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is ``(inputs, outputs)``, as of the Conv1D of transformers."""
    return hasattr(module, "nf")


def keep_part(parameter: nn.Parameter, part: Tensor) -> None:
    """The parameter, which stays the same object, has only ``part`` of its values from now on."""
    with torch.no_grad():
        parameter.data = part


def adapt_lengths(module: Any) -> None:
    """Those that its own forward reads or its text shows become those of its weight."""
    shape = module.weight.shape
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = shape
    elif is_transposed(module):
        module.nx, module.nf = shape
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
