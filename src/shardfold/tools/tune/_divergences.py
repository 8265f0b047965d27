"""How far two distributions are apart, as distillation has it."""

from __future__ import annotations

from torch import Tensor

from shardfold.tools.tune.config import DistillConfig

__all__ = ["divergences"]


def divergences(student: Tensor, teacher: Tensor, config: DistillConfig) -> Tensor:
    """KL between two distributions at each place, in nats, times the temperature's square (Hinton et al., arXiv
    1503.02531, section 2).

    Args:
        student, teacher: ``(n, vocabulary)``, logits.

    Returns:
        ``(n,)``; forward: ``KL(teacher || student)``; reverse: ``KL(student || teacher)``.
    """
    ours, theirs = ((logits / config.temperature).log_softmax(-1) for logits in (student, teacher))
    of, to = (theirs, ours) if config.divergence == "forward" else (ours, theirs)
    return config.temperature**2 * (of.exp() * (of - to)).sum(-1)
